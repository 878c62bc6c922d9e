"""What a registry makes of good, bad, competing and missing plugins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rl_harness import hookspecs
from rl_harness.contracts import Harness
from rl_harness.errors import ConfigError, PluginError, PluginFileError, UnknownName
from rl_harness.kinds import KINDS
from rl_harness.plugins import Registry, known_plugins, load_registry

HEAD = """
from rl_harness.hookspecs import Extension, hookimpl
"""

HARNESS = (
    HEAD
    + """
from rl_harness.contracts import Harness, HarnessCapabilities, HarnessResult, Options
from rl_harness.records import Termination

class Waiting(Harness):
    api = 1
    argument = "reason"

    class Options(Options):
        reason: str = "none given"
        patience: int = 3

    def __init__(self, options):
        self.options = options

    @property
    def capabilities(self):
        return HarnessCapabilities(protocols=frozenset(), needs_sandbox=False)

    async def run(self, context):
        return HarnessResult(termination=Termination.ANSWER)

@hookimpl
def rl_harness_harnesses():
    return [Extension("waiting", f"{__name__}:Waiting", "waits")]
"""
)


def problems(registry: Registry, distribution: str) -> list[str]:
    return [p for plugin in registry.plugins() if plugin.distribution == distribution for p in plugin.problems]


def test_built_ins_come_through_the_same_door() -> None:
    registry = load_registry()
    assert {"shell", "oracle", "nop"} <= set(registry.names("harnesses"))
    assert registry.find("harnesses", "nop").plugin.distribution == "rl-harness"


def test_an_installed_plugin_is_found_loaded_and_created_with_its_options(install) -> None:
    install("acme-waiting", HARNESS, version="1.2")
    registry = load_registry()
    assert issubclass(registry.load("harnesses", "waiting"), Harness)
    created = registry.create("harnesses", "waiting", {"patience": "5"})
    assert (created.options.patience, created.options.reason) == (5, "none given")
    assert registry.versions()["acme-waiting"] == "1.2"


def test_what_follows_a_name_sets_the_option_the_class_names(install) -> None:
    install("acme-waiting", HARNESS)
    registry = load_registry()
    assert registry.split_argument("harnesses", "waiting:for:rain") == ("waiting", {"reason": "for:rain"})
    assert registry.split_argument("harnesses", "acme_waiting:waiting") == ("acme_waiting:waiting", {})
    assert registry.split_argument("harnesses", "acme-waiting:waiting:x") == ("acme-waiting:waiting", {"reason": "x"})
    with pytest.raises(UnknownName, match="'nop' takes no argument"):
        registry.split_argument("harnesses", "nop:loudly")


def hook(body: str) -> str:
    """A plugin whose one hook does this."""
    return f"{HEAD}@hookimpl\ndef rl_harness_engines():\n    {body}\n"


BROKEN = {
    "import": ("import not_a_module_anywhere", "No module named 'not_a_module_anywhere' at .*acme_broken.py:1"),
    "syntax": ("def (", "SyntaxError.*acme_broken.py:1"),
    "exit": ("raise SystemExit('bye')", "SystemExit: bye"),
    "nothing": ("x = 1", "registers no hook"),
    "hook raises": (hook("raise ValueError('no')"), "rl_harness_engines: ValueError: no"),
    "hook exits": (hook("raise SystemExit"), "rl_harness_engines: SystemExit"),
    "not a list": (hook("return None"), "returned NoneType, not a list"),
    "a tuple": (hook("return ()"), "returned tuple, not a list"),
    "a generator": (hook("yield 1"), "returned generator, not a list"),
    "a coroutine": (hook("return []").replace("def ", "async def "), "returned coroutine, not a list"),
    "not extensions": (hook("return ['x']"), "not an Extension"),
    "a bad name": (hook("return [Extension('a b', 'm:a', '')]"), "'a b' is not a name"),
    "a bad target": (hook("return [Extension('a', 'm', '')]"), "not module:attr"),
    "twice": (hook("return [Extension('a', 'm:a', '')] * 2"), "a is registered twice"),
    "arguments": (hook("return []").replace("()", "(config)"), "config"),
    "misspelt": (
        hook("return []").replace("engines", "enginse"),
        "enginse is not a hook; did you mean rl_harness_e",
    ),
    "undecorated": (hook("return []").replace("@hookimpl", ""), "lacks the decorator"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_plugin_is_named_and_stops_no_other(install, fault: str) -> None:
    source, message = BROKEN[fault]
    install("acme-broken", source, version="0.3")
    install("acme-waiting", HARNESS)
    registry = load_registry()
    assert "waiting" in registry.names("harnesses")
    assert "torch" in registry.names("engines")
    (plugin,) = [p for p in registry.plugins() if p.distribution == "acme-broken"]
    assert plugin.label == "acme-broken 0.3 (acme_broken)"
    assert any(re.search(message, problem) for problem in plugin.problems), plugin.problems


def test_a_plugin_with_one_bad_hook_keeps_its_good_ones(install) -> None:
    install("acme-half", HARNESS + "\n@hookimpl\ndef rl_harness_engines():\n    return 3\n")
    registry = load_registry()
    assert registry.find("harnesses", "waiting").full_name == "acme-half:waiting"
    assert problems(registry, "acme-half") == ["TypeError: rl_harness_engines returned int, not a list of Extension"]


def test_each_hook_is_called_once(install) -> None:
    install(
        "acme-count", HEAD + "calls = []\n@hookimpl\ndef rl_harness_engines():\n    calls.append(1)\n    return []\n"
    )
    registry = load_registry()
    for _ in range(3):
        registry.names("engines")
        registry.plugins()
    import acme_count

    assert acme_count.calls == [1]


THING = "from rl_harness.contracts import Harness\nclass Thing(Harness):\n    "

CONTRACT_FAULTS = {
    "missing module": ("acme_bad.gone:Thing", "", "No module named 'acme_bad.gone'"),
    "missing attribute": ("acme_bad:Thing", "", "has no attribute 'Thing'"),
    "not a class": ("acme_bad:Thing", "Thing = 3", "is not a subclass of rl_harness.contracts.Harness"),
    "another kind": ("acme_bad:Thing", "from rl_harness.contracts import Renderer as Thing", "is not a subclass of"),
    "no api": ("acme_bad:Thing", THING + "pass", "states no api"),
    "newer api": ("acme_bad:Thing", THING + "api = 99", "written for api 99.*upgrade rl-harness$"),
    "older api": ("acme_bad:Thing", THING + "api = 0", "written for api 0.*upgrade acme-bad$"),
    "abstract": ("acme_bad:Thing", THING + "api = 1", "does not implement capabilities, run"),
}


@pytest.mark.parametrize("fault", CONTRACT_FAULTS)
def test_a_class_that_breaks_its_contract_is_refused_by_name(install, fault: str) -> None:
    target, body, message = CONTRACT_FAULTS[fault]
    hook = f"\n@hookimpl\ndef rl_harness_harnesses():\n    return [Extension('bad', {target!r}, '')]\n"
    install("acme-bad", HEAD + body + hook, version="7")
    with pytest.raises(PluginError, match=f"(?s)harness 'bad' of acme-bad 7.*{message}"):
        load_registry().load("harnesses", "bad")


def test_two_distributions_with_one_name_clash_only_when_it_is_chosen(install) -> None:
    install("acme-one", HARNESS)
    install("acme-two", HARNESS)
    registry = load_registry()
    assert registry.names("harnesses").count("waiting") == 1
    with pytest.raises(UnknownName, match=r"(?s)acme-one 1.0.*acme-two 1.0.*acme-one:waiting or acme-two:waiting"):
        registry.load("harnesses", "waiting")
    assert registry.load("harnesses", "acme-two:waiting").__module__ == "acme_two"
    assert registry.load("harnesses", "nop")


def test_plugins_are_disabled_by_distribution(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("acme-waiting", HARNESS)
    monkeypatch.setenv("RL_HARNESS_DISABLE_PLUGINS", "Acme_Waiting, acme-typo")
    registry = load_registry()
    assert "waiting" not in registry.names("harnesses")
    (plugin,) = [p for p in registry.plugins() if p.distribution == "acme-waiting"]
    assert plugin.disabled
    assert not plugin.problems
    assert registry.unknown_disabled() == ["acme-typo"]
    monkeypatch.setenv("RL_HARNESS_DISABLE_PLUGINS", "rl-harness-torch")
    with pytest.raises(UnknownName, match="comes with rl-harness-torch, which RL_HARNESS_DISABLE_PLUGINS switches off"):
        load_registry().load("engines", "torch")


def test_an_unknown_name_answers_with_the_nearest_and_the_package_that_has_it() -> None:
    with pytest.raises(UnknownName, match=r"no harness 'shel'\s+remedy: did you mean shell\?; registered: .*oracle"):
        load_registry().load("harnesses", "shel")
    core_alone = Registry([point for point in load_registry()._points if point.distribution == "rl-harness"])
    with pytest.raises(
        UnknownName, match="torch comes with the package rl-harness-torch: pip install rl-harness-torch"
    ):
        core_alone.load("engines", "torch")
    with pytest.raises(UnknownName, match="humaneval comes with the package rl-harness-humaneval"):
        core_alone.load("benchmarks", "humanevall")


def test_an_unknown_name_mentions_plugins_that_failed(install) -> None:
    install("acme-broken", "1/0")
    with pytest.raises(UnknownName, match=r"problems: acme-broken 1\.0"):
        load_registry().load("sandboxes", "acme")


def test_wrong_options_are_named_with_their_key_and_a_suggestion(install) -> None:
    install("acme-waiting", HARNESS)
    registry = load_registry()
    with pytest.raises(ConfigError, match=r"no option 'harness.patiense'; did you mean patience\?"):
        registry.create("harnesses", "waiting", {"patiense": 1})
    with pytest.raises(ConfigError, match=r"harness.patience = 'much'.*it is not a whole number"):
        registry.create("harnesses", "waiting", {"patience": "much"})


def test_a_local_file_is_a_plugin_when_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(HARNESS)
    monkeypatch.chdir(tmp_path)
    assert "waiting" not in load_registry().names("harnesses")
    registry = load_registry([Path("mine.py")])
    assert registry.load("harnesses", "waiting").api == 1
    assert registry.load("harnesses", "mine.py:waiting").api == 1
    assert load_registry([tmp_path / "mine.py"]).load("harnesses", "waiting") is registry.load("harnesses", "waiting")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gone.py", None, ""),
        ("mine.txt", "x", "a plugin file is a Python file"),
        ("bad.py", "1/0", r"ZeroDivisionError.*bad.py:1"),
        ("misspelt.py", HEAD + "@hookimpl\ndef rl_harness_sandboxs(): return []", "did you mean rl_harness_sandboxes"),
    ],
)
def test_a_local_file_that_does_not_load_is_an_error(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(PluginFileError, match=f"(?s){name}.*{message}"):
        load_registry([file])


def test_there_is_a_hook_for_every_kind_and_a_kind_for_every_hook() -> None:
    hooks = {name for name in vars(hookspecs) if name.startswith("rl_harness_")}
    assert hooks == {kind.hook for kind in KINDS.values()}


def test_known_plugins_name_every_kind() -> None:
    assert known_plugins().keys() == KINDS.keys()
