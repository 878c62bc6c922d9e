"""Pytest set-up shared by the core's and every plugin's tests: the ``needs`` mark and a clean environment.

``@pytest.mark.needs("userns")`` skips a test, with the reason, where the machine lacks the service. The variable
``RL_HARNESS_REQUIRE=userns,smollm2`` says that these are there: then their absence is a failure.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

REQUIRE_VARIABLE = "RL_HARNESS_REQUIRE"
NOBODY = 65534

os.environ.setdefault("OMP_NUM_THREADS", "1")  # test workers share the cores; spinning threads starve each other
for _name in [name for name in os.environ if name.startswith("RL_HARNESS_") and name != REQUIRE_VARIABLE]:
    del os.environ[_name]  # a developer's own settings must not change what the tests see

hypothesis.settings.register_profile("rl_harness", deadline=None)
hypothesis.settings.load_profile("rl_harness")


def _root() -> str | None:
    return None if os.geteuid() == 0 else "not running as root"


def _userns() -> str | None:
    """User namespaces as an ordinary user gets them: tried for real, as nobody when we are root."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return "no unshare command"
    identity = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    command = [unshare, "--user", "--map-root-user", "--mount", "--pid", "--fork", "true"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False, **identity)  # type: ignore[call-overload]  # mypy cannot see through the dict
    return None if done.returncode == 0 else f"user namespaces are refused: {done.stderr.strip()}"


def _cgroups() -> str | None:
    """A memory controller in which we may make a group (version 2, or 1 of a hybrid hierarchy)."""
    for parent in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        if not parent.is_dir():
            continue
        try:
            group = Path(tempfile.mkdtemp(prefix="rl-harness-probe-", dir=parent))
        except OSError:
            continue
        usable = any(group.glob("memory.*"))
        group.rmdir()
        if usable:
            return None
    return "no writable memory cgroup"


def _module(name: str) -> Callable[[], str | None]:
    def probe() -> str | None:
        return None if importlib.util.find_spec(name) else f"the module {name} is not installed"

    return probe


def _modules(*names: str) -> Callable[[], str | None]:
    return lambda: next((missing for name in names if (missing := _module(name)())), None)


def _smollm2() -> str | None:
    """The small real model: converted already, or in its package and convertible."""
    if importlib.util.find_spec("rl_harness_torch") is None:
        return "rl-harness-torch is not installed"
    from rl_harness_torch import models

    name = "smollm2-135m-instruct"
    spec = models.PACKAGED[name]
    if (models.cache_home() / f"{name}-r{spec.revision}" / "model.safetensors").is_file():
        return None
    for module in (spec.package, "gguf"):
        if importlib.util.find_spec(module) is None:
            return f"the module {module} is not installed (make model)"
    return None


def _docker() -> str | None:
    """An engine, where DOCKER_HOST or the docker command's context says, with the image that tests start from."""
    if importlib.util.find_spec("rl_harness_docker") is None:
        return "rl-harness-docker is not installed"
    from rl_harness_docker import testing

    if reason := testing.unreachable():
        return reason
    testing.make_base_image()
    return None


def _agent(name: str, package: str = "rl_harness_cli_agents") -> Callable[[], str | None]:
    """A command-line agent, installed on this machine ahead: no test installs one."""

    def probe() -> str | None:
        if importlib.util.find_spec(package) is None:
            return f"the module {package} is not installed"
        from rl_harness.errors import RlHarnessError
        from rl_harness_cli_agents.__main__ import load

        agent = load(importlib.import_module(f"{package}.__main__").agents()[name])
        try:
            folder = agent(agent.Options(install="host")).mounts[0].source
        except RlHarnessError as error:
            return str(error)
        return None if folder.is_dir() else f"{folder} does not exist (python -m {package} install {name})"

    return probe


PROBES: dict[str, Callable[[], str | None]] = {
    "root": _root,
    "userns": _userns,
    "cgroups": _cgroups,
    "torch": _module("torch"),
    "smollm2": _smollm2,
    "openai": _module("openai"),
    "matplotlib": _module("matplotlib"),
    "modal": _module("modal"),
    "e2b": _module("e2b"),
    "docker": _docker,
    "langchain": _modules("langchain", "langchain_openai", "rl_harness_langchain"),
    "openai-agents": _module("agents"),
    "smolagents": _module("smolagents"),
    **{name: _agent(name) for name in ("claude-code", "codex", "opencode", "qwen-code", "pi")},
    **{name: _agent(name) for name in ("mini-swe-agent", "aider")},
    **{name: _agent(name, "rl_harness_claw") for name in ("nanobot", "openclaw")},
}


@functools.cache
def _missing(service: str) -> str | None:
    return PROBES[service]()


def _required() -> set[str]:
    return {name.strip() for name in os.environ.get(REQUIRE_VARIABLE, "").split(",") if name.strip()}


def pytest_configure(config: pytest.Config) -> None:
    unknown = _required() - PROBES.keys()
    if unknown:
        raise pytest.UsageError(f"{REQUIRE_VARIABLE} names {', '.join(sorted(unknown))}; known: {', '.join(PROBES)}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("needs"):
            unknown = set(mark.args) - PROBES.keys()
            if unknown or not mark.args:
                raise pytest.UsageError(f"{item.nodeid} needs {unknown or 'nothing'}; known: {', '.join(PROBES)}")
    # One worker runs a file: the long ones begin first, so that nobody waits for them at the end.
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for service in mark.args:
            reason = _missing(service)
            if reason is None:
                continue
            if service in _required():
                pytest.fail(f"{REQUIRE_VARIABLE} names {service}, but: {reason}", pytrace=False)
            pytest.skip(f"needs {service}: {reason}")
