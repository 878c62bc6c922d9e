"""Configuration: where values come from, which one wins, and that nothing given is ever ignored in silence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from rl_harness.errors import ConfigError, UnknownName
from rl_harness.runs.keys import known_keys
from rl_harness.runs.layers import Text, file_layer, key_lines
from rl_harness.runs.resolve import Resolved, resolve

PLUGIN = """
from typing import Literal
from pydantic import ByteSize
from rl_harness.contracts import Benchmark, Harness, HarnessCapabilities, Options, SandboxProvider, SandboxCapabilities
from rl_harness.hookspecs import Extension, hookimpl

class Agent(Harness):
    api = 1
    argument = "target"

    class Options(Options):
        target: str = "nowhere"
        style: Literal["terse", "chatty"] = "terse"
        env: dict[str, str] = {}
        patience: int | None = 3

    def __init__(self, options): ...
    capabilities = HarnessCapabilities(protocols=frozenset(), needs_sandbox=False)
    async def run(self, context): ...

class Box(SandboxProvider):
    api = 1

    class Options(Options):
        memory: ByteSize = ByteSize(1024)
        tags: list[str] = []

    def __init__(self, options): ...
    capabilities = SandboxCapabilities()
    async def create(self, spec): ...
    async def list(self, labels=None): ...
    async def reap(self, labels=None, *, force=False): ...

class Sums(Benchmark):
    api = 1
    name = "sums"
    version = "2"
    splits = {"only": 1}

    class Options(Options):
        digits: int = 1

    def __init__(self, options): ...
    defaults = {"sampling.max_tokens": 32, "sandbox.memory": "2KiB", "samples": 2}
    def directories(self, split, cache): ...

@hookimpl
def rl_harness_harnesses():
    return [Extension("agent", f"{__name__}:Agent", "")]

@hookimpl
def rl_harness_sandboxes():
    return [Extension("box", f"{__name__}:Box", ""), Extension("crate", f"{__name__}:Box", "")]

@hookimpl
def rl_harness_benchmarks():
    return [Extension("sums", f"{__name__}:Sums", "")]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a plugin file and a configuration that uses it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kit.py").write_text(PLUGIN)
    write(tmp_path)
    return tmp_path


def write(directory: Path, text: str = "", *, head: str = "") -> None:
    base = 'plugins = ["kit.py"]\nharness = "agent"\n'
    (directory / "rl-harness.toml").write_text(f"{base}{head}\n[sandbox]\nname = 'box'\n{text}")


def given(*options: str, environment: dict[str, str] | None = None, **flags: Any) -> Resolved:
    """Resolve with flags such as ``sandbox__name="box"`` (two underscores are a dot)."""
    by_key = {
        tuple(name.split("__")): (f"--{name.split('__')[0]}", Text(v) if isinstance(v, str) else v)
        for name, v in flags.items()
    }
    return resolve(by_key, options, environment=environment or {})


def setting(resolved: Resolved, key: str) -> tuple[Any, str]:
    (found,) = [s for s in resolved.settings if s.key == key]
    return found.value, found.origin


def test_every_layer_wins_over_the_ones_below_it_and_is_named_as_origin(project: Path) -> None:
    write(project, "memory = '5KiB'", head="seed = 1")
    file = project / "rl-harness.toml"
    assert setting(given(benchmark="sums"), "sampling.max_tokens") == (32, "benchmark sums")
    assert setting(given(), "sandbox.memory") == (5 * 1024, f"{file}:6")
    environment = {"RL_HARNESS_SANDBOX__MEMORY": "6KiB", "RL_HARNESS_SEED": "7"}
    resolved = given(environment=environment, benchmark="sums")
    assert setting(resolved, "sandbox.memory") == (6 * 1024, "$RL_HARNESS_SANDBOX__MEMORY")
    assert setting(resolved, "seed") == (7, "$RL_HARNESS_SEED")
    resolved = given("sandbox.memory=4GiB", environment=environment, seed="9")
    assert setting(resolved, "sandbox.memory") == (4 * 1024**3, "-o sandbox.memory")
    assert setting(resolved, "seed") == (9, "--seed")
    assert resolved.config.sandbox.plugin_options == {"memory": "4GiB"}


def test_what_nobody_sets_is_a_default_of_the_core_the_plugin_or_the_benchmark(project: Path) -> None:
    resolved = given(benchmark="sums")
    assert setting(resolved, "concurrency") == (16, "default")
    assert setting(resolved, "sandbox.memory") == (2048, "benchmark sums")
    assert setting(resolved, "harness.style") == ("terse", "default of agent")
    assert setting(given(), "sandbox.memory") == (1024, "default of box")


def test_the_nearest_file_upward_is_used_and_its_paths_are_relative_to_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, head="model = './weights'\nruns_dir = 'out'")
    below = project / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    config = given().config
    assert (config.model, config.runs_dir) == (str(project / "weights"), project / "out")
    assert config.plugins == (project / "kit.py",)


def test_a_named_file_replaces_the_nearest(project: Path) -> None:
    (project / "other.toml").write_text('plugins = ["kit.py"]\nharness = "agent"\nsandbox = "box"\nseed = 3\n')
    assert resolve({}, [], config=Path("other.toml"), environment={}).config.seed == 3
    assert given(environment={"RL_HARNESS_CONFIG": "other.toml"}).config.seed == 3
    with pytest.raises(ConfigError, match=r"no configuration file gone\.toml"):
        resolve({}, [], config=Path("gone.toml"), environment={})


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("none", None), ('"5"', 5)],
)
def test_option_values_are_typed_by_their_key(project: Path, text: str, value: object) -> None:
    assert setting(given(f"harness.patience={text}"), "harness.patience")[0] == value


def test_bare_strings_lists_and_tables_on_the_command_line(project: Path) -> None:
    resolved = given("name=2024", "sandbox.tags=one", "harness.env.PORT=80", "harness.env.HOST=here", "limit=none")
    assert resolved.config.name == "2024"
    assert resolved.config.limit is None
    assert setting(resolved, "sandbox.tags")[0] == ["one"]
    assert setting(resolved, "harness.env") == ({"PORT": "80", "HOST": "here"}, "-o harness.env.PORT")
    assert setting(given('sandbox.tags=["a", "b"]'), "sandbox.tags")[0] == ["a", "b"]


UNKNOWN = {
    "core": ("conccurrency = 3", r"rl-harness.toml:3: there is no key 'conccurrency'; did you mean 'concurrency'\?"),
    "wrong table": ("temperature = 0.5", "did you mean 'sampling.temperature'"),
    "nested": ("sampling.topp = 0.5", "no key 'sampling.topp'; did you mean 'sampling.top_p'"),
    "a value as table": ("model.name = 'x'", "'model' is a value, not a table with 'name'"),
    "a table as value": ("sampling = 3", "'sampling' is a table; set one of temperature"),
    "secret": ("api_key = 'sk-1'", "secrets are never written here: name the environment variable"),
}


@pytest.mark.parametrize("fault", UNKNOWN)
def test_a_key_that_nothing_reads_is_an_error_with_its_place(project: Path, fault: str) -> None:
    line, message = UNKNOWN[fault]
    write(project, head=line)
    with pytest.raises(ConfigError, match=message):
        given()


def test_unknown_keys_of_plugins_variables_and_options_are_errors_too(project: Path) -> None:
    write(project, "memroy = 1")
    with pytest.raises(
        ConfigError, match=r"rl-harness.toml:6: there is no option 'sandbox.memroy'; did you mean memory"
    ):
        given()
    write(project)
    with pytest.raises(ConfigError, match=r"\$RL_HARNESS_MODLE: there is no key 'modle'; did you mean 'model'"):
        given(environment={"RL_HARNESS_MODLE": "x"})
    with pytest.raises(ConfigError, match=r"-o sandbx.memory: there is no key 'sandbx.memory'; did you mean 'sandbox'"):
        given("sandbx.memory=3")
    with pytest.raises(ConfigError, match="-o seed: not of the form key=value"):
        given("seed")


def test_a_variable_that_holds_a_secret_may_have_our_prefix(project: Path) -> None:
    given("api_key_env=RL_HARNESS_MY_KEY", environment={"RL_HARNESS_MY_KEY": "sk-1"})


def test_wrong_values_are_told_with_origin_and_key(project: Path) -> None:
    write(project, head="samples = 0")
    with pytest.raises(ConfigError, match=r"rl-harness.toml:3: samples = 0: it must be at least 1"):
        given()
    write(project)
    with pytest.raises(ConfigError, match=r"--limit: limit = 'many': it is not a whole number"):
        given(limit="many")
    with pytest.raises(ConfigError, match=r"-o harness.style: harness.style = 'loud'.*'terse' or 'chatty'"):
        given("harness.style=loud")


@pytest.mark.parametrize(
    ("address", "message"),
    [("localhost:8000", "not an address such as"), ("http://me:sk-1@host/v1", "name the variable that holds it")],
)
def test_an_address_is_one_and_holds_no_key(project: Path, address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        given(base_url=address)


def test_broken_toml_names_file_and_line(project: Path) -> None:
    (project / "rl-harness.toml").write_text("seed = 1\nseed = = 2\n")
    with pytest.raises(ConfigError, match=r"rl-harness.toml: .*line 2"):
        given()


def test_values_nested_too_deeply_are_wrong_values(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"-o seed: .*it is not a whole number"):
        given("seed=" + "[" * 5000)
    (project / "rl-harness.toml").write_text("seed = " + "[" * 5000)
    with pytest.raises(ConfigError, match=r"rl-harness.toml: nested too deeply"):
        given()


def test_options_of_a_plugin_that_was_replaced_are_unused_not_offered_to_the_other(project: Path) -> None:
    write(project, "memory = '5KiB'")
    resolved = given(sandbox__name="crate")
    assert resolved.config.sandbox.plugin_options == {}
    (unused,) = [s for s in resolved.unused if s.key == "sandbox.memory"]
    assert "for sandbox box, but --sandbox chose crate" in unused.origin


def test_a_plugin_named_with_and_without_its_distribution_is_the_same(project: Path) -> None:
    write(project, "memory = '5KiB'")
    assert setting(given(sandbox__name="kit.py:box"), "sandbox.memory")[0] == 5 * 1024
    assert setting(given(environment={"RL_HARNESS_SANDBOX": "box"}), "sandbox.memory")[0] == 5 * 1024
    assert given(environment={"RL_HARNESS_SANDBOX": "crate"}).config.sandbox.plugin_options == {}


def test_options_without_a_name_go_to_whatever_is_chosen(project: Path) -> None:
    (project / "rl-harness.toml").write_text("plugins = ['kit.py']\nharness = 'agent'\n[sandbox]\nmemory = '5KiB'\n")
    assert setting(given(sandbox__name="box"), "sandbox.memory")[0] == 5 * 1024


def test_what_a_run_does_not_use_is_listed_with_the_reason(project: Path) -> None:
    write(project, "[backend]\nname = 'torch'\n[engine]\nname = 'torch'\ndtype = 'bf16'\n")
    reasons = {s.key: s.origin for s in given().unused}
    assert "does not train" in reasons["backend.name"]
    assert "harness agent calls no model" in reasons["engine.dtype"]


def test_a_name_with_an_argument_sets_the_option_the_plugin_says(project: Path) -> None:
    resolved = given(harness__name="agent:module:function")
    assert resolved.config.harness.name == "agent"
    assert setting(resolved, "harness.target") == ("module:function", "--harness")


def test_a_benchmark_has_options_and_a_version_like_any_plugin(project: Path) -> None:
    resolved = given("benchmark.digits=2", benchmark="sums@2")
    assert resolved.config.benchmark is not None
    assert (resolved.config.benchmark.name, resolved.config.benchmark.plugin_options) == ("sums@2", {"digits": 2})
    with pytest.raises(ConfigError, match=r"no option 'benchmark\.digit'; did you mean digits"):
        given("benchmark.digit=2", benchmark="sums")


def test_task_directories_replace_the_files_benchmark_and_the_other_way_round(project: Path) -> None:
    (project / "here").mkdir()
    write(project, head="benchmark = 'sums'")
    resolved = given(tasks=["here"])
    assert (resolved.config.benchmark, resolved.config.tasks) == (None, (Path("here"),))
    assert [s.key for s in resolved.unused] == ["benchmark.name"]
    write(project, head="tasks = ['t']")
    assert given(benchmark="sums").config.tasks == ()
    write(project, head="tasks = ['t']\nbenchmark = 'sums'")
    with pytest.raises(ConfigError, match="both a benchmark and task directories"):
        given()


def test_plugin_files_of_all_layers_are_loaded(project: Path) -> None:
    (project / "more.py").write_text(PLUGIN.replace('"agent"', '"agent2"').replace('"box"', '"box2"'))
    resolved = given(plugins=["more.py"], harness__name="agent2")
    assert resolved.config.plugins == (project / "kit.py", Path("more.py"))


def test_unknown_names_are_errors_unless_asked_to_collect_them(project: Path) -> None:
    with pytest.raises(UnknownName, match=r"no sandbox 'boxx'.*\n.*did you mean box"):
        given(sandbox__name="boxx")
    resolved = resolve({("sandbox", "name"): ("--sandbox", "boxx")}, environment={}, strict=False)
    assert [str(error).splitlines()[0] for error in resolved.errors] == ["there is no sandbox 'boxx'"]


def test_evaluation_keys_are_refused_or_unused_in_a_training_run(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"--limit: limit is for evaluations.*\n.*-o evaluation.limit=5"):
        resolve(
            {("limit",): ("--limit", "5"), ("trainer", "name"): ("--trainer", "grpo")}, environment={}, strict=False
        )
    write(project, head="limit = 5")
    resolved = resolve({("trainer", "name"): ("--trainer", "grpo")}, environment={}, strict=False)
    assert any(s.key == "limit" and "evaluation.limit" in s.origin for s in resolved.unused)


def test_training_keys_are_unused_in_an_evaluation(project: Path) -> None:
    resolved = given("training.steps=3", "evaluation.limit=2", harness__name="agent")
    assert {s.key for s in resolved.unused} == {"training.steps", "evaluation.limit"}
    assert all("does not train" in s.origin for s in resolved.unused)


@pytest.mark.parametrize("key", ["split", "training.split", "evaluation.split"])
def test_task_directories_have_no_splits_to_choose(project: Path, key: str) -> None:
    tasks = {("tasks",): ("command line", [str(project)])}
    with pytest.raises(ConfigError, match=rf"{key}: task directories have no splits"):
        resolve(tasks, [f"{key}=dev"], environment={}, strict=False)
    section, _, name = key.rpartition(".")
    write(project, **({"text": f"[{section}]\n{name} = 'dev'\n"} if section else {"head": f"{name} = 'dev'"}))
    resolved = resolve(tasks, environment={}, strict=False)
    assert any(s.key == key and "no splits" in s.origin for s in resolved.unused)


def test_lines_of_keys_in_every_toml_notation() -> None:
    text = 'a = 1\nb.c = 2\n\n[d]\n"e f" = 3 # x\n[g.h]\ni = """\nj = 4\n"""\n'
    lines = key_lines(text)
    assert lines["a",] == 1
    assert lines["b", "c"] == 2
    assert lines["d", "e f"] == 5
    assert lines["g", "h", "i"] == 7


def test_every_key_of_the_model_can_be_set_in_a_file(tmp_path: Path) -> None:
    """A key the documentation names and the loader ignores is a defect."""
    for key in known_keys():
        file = tmp_path / "x.toml"
        file.write_text(f"{'.'.join(key)} = 1\n")
        assert list(file_layer(file).values) == [key]


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("sandbox.memory=lots", "it is not a size such as 1GiB or 512MiB"),
        ("pool.memory=5Q", "it is not a size such as 1GiB or 512MiB"),
        ("sandbox.memory=1", "it must be at least 1048576"),
        ("sandbox.processes=x", "it is not a whole number such as 8"),
        ("concurrency=2.5", "it is not a whole number such as 8"),
        ("concurrency=0", "it must be at least 1"),
        ("agent_timeout=soon", "it is not a number such as 0.5"),
        ("snapshots.use=maybe", "it is neither true nor false"),
        ("sandbox.storage=tape", "it must be 'disk' or 'memory'"),
        ("base_url=localhost:1", "it is not an address such as http://127.0.0.1:8000/v1"),
    ],
)
def test_a_wrong_value_is_told_with_a_right_one_and_no_remedy_of_something_else(option, told):
    """What was wrong came in the words of a library, with a list of options that were not."""
    key, _, value = option.partition("=")
    with pytest.raises(ConfigError) as error:
        resolve({}, [option], environment={})
    assert re.fullmatch(
        rf"-o {key}: {key} = '?{re.escape(value)}'?: {re.escape(told)}(; units are .*)?", str(error.value)
    )
    assert error.value.remedy is None
    assert error.value.exit_code == 2


def test_a_folder_with_a_similar_name_is_named(tmp_path, monkeypatch):
    (tmp_path / "my-task").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UnknownName, match=r"there is no folder 'my-taks' here[^\n]*\n.*did you mean the folder ./my-task"
    ):
        resolve({("benchmark", "name"): ("command line", Text("my-taks"))}, [], environment={})
