"""``task.toml``: Harbor's schema up to 1.4 and our own table ``[rl_harness]``, into a :class:`Task`.

Every key of the schema is either honoured or refused with the reason; a key that is not in the schema is an error.
Honoured through the sandbox (limits, images, network, users) means: passed on, and :func:`unsupported` tells before
a run starts what the chosen sandbox cannot do.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from rl_harness.contracts.sandbox import EnvironmentSpec, Limits, NetworkPolicy, SetupStep
from rl_harness.digests import digest_directory
from rl_harness.errors import TaskError
from rl_harness.hosts import FORMS as HOST_FORMS
from rl_harness.hosts import parse as parse_host
from rl_harness.tasks.task import Artifact, Task, VerifierMode, VerifierSpec
from rl_harness.tasks.toml_file import Table, Toml
from rl_harness.textfile import read_text

#: The newest schema understood; older minors read the same way.
SCHEMA = (1, 4)
DEFAULT_TIMEOUT = 600.0
DEFAULT_ARTIFACT_LIMIT = 256 << 20
DEFAULT_WORKDIR = "/app"
#: Prepares the environment of a task with our own table; in a plain Harbor task it is a file like any other.
SETUP_SCRIPT = "environment/setup.sh"

_SIZES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_NETWORKS = {
    "no-network": NetworkPolicy.NONE,
    "public": NetworkPolicy.FULL,
    "allowlist": NetworkPolicy.ALLOW_LIST,
}
#: Where a key belongs that people write at the top level, or in the wrong table.
_ELSEWHERE = {
    "cpus": "[environment] cpus",
    "memory": "[environment] memory_mb",
    "memory_mb": "[environment] memory_mb",
    "storage": "[environment] storage_mb",
    "storage_mb": "[environment] storage_mb",
    "gpus": "[environment] gpus",
    "docker_image": "[environment] docker_image",
    "image": "[environment] docker_image",
    "workdir": "[environment] workdir",
    "allow_internet": "[environment] network_mode",
    "network_mode": "[environment] network_mode",
    "allowed_hosts": "[environment] allowed_hosts",
    "build_timeout_sec": "[environment] build_timeout_sec",
    "timeout_sec": "[agent] timeout_sec or [verifier] timeout_sec",
    "timeout": "[agent] timeout_sec or [verifier] timeout_sec",
    "environment_mode": "[verifier] environment_mode",
    "name": "[task] name",
    "description": "[task] description",
    "authors": "[task] authors",
    "keywords": "[task] keywords",
    "author_name": "[metadata] author_name",
    "author_email": "[metadata] author_email",
    "difficulty": "[metadata] difficulty",
    "category": "[metadata] category",
    "tags": "[metadata] tags",
    "answer": "[rl_harness] answer",
    "max_turns": "[rl_harness] max_turns",
    "allow_tampered": "[rl_harness] allow_tampered",
    "artifacts": "artifacts, at the top of the file before any table",
}

_Network = tuple[NetworkPolicy, tuple[str, ...]]


def read_task(directory: Path) -> Task:
    directory = directory.absolute()
    toml = Toml(directory / "task.toml")
    root = toml.root()
    _check_version(root)
    _refuse_steps(directory, root)
    ours = root.table("rl_harness")
    package = _read_package(root)
    metadata = root.table("metadata")
    root.string("source")

    environment, limits, network, gpus = _read_environment(root, directory / "environment", ours is not None)
    if ours is not None:
        environment = msgspec.structs.replace(environment, setup=_read_setup(directory, environment.build_timeout))
    agent_timeout, agent_network = _read_agent(root, network)
    solution_env = _read_solution(root)
    own = _read_own(ours)
    verifier = _read_verifier(root, directory, own, environment, limits, network, agent_network)
    root.finish(_ELSEWHERE)

    for script in (directory / "tests/test.sh", directory / "solution/solve.sh", directory / SETUP_SCRIPT):
        if script.is_file() and b"\r\n" in script.read_bytes():
            raise TaskError(f"{script}: has CRLF line ends, which bash does not understand", remedy="save it with LF")

    solution = directory / "solution"
    return Task(
        name=directory.name,
        directory=directory,
        instruction=_read_instruction(directory),
        digest=digest_directory(directory),
        environment=environment,
        limits=limits,
        network=agent_network[0],
        network_allow=agent_network[1],
        gpus=gpus,
        agent_timeout=agent_timeout,
        verifier=verifier,
        max_turns=own.max_turns,
        needs_sandbox=verifier.mode != "answer",
        solution=solution if solution.is_dir() else None,
        solution_env=solution_env,
        allow_tampered=own.allow_tampered,
        package=package,
        metadata=dict(metadata.data) if metadata else {},
    )


def _read_instruction(directory: Path) -> str:
    path = directory / "instruction.md"
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise TaskError(f"{path}: there is no such file", remedy="write what the agent has to do into it") from None
    except (OSError, ValueError) as error:
        raise TaskError(f"{path}: cannot be read: {error}") from None
    if not text.strip():
        raise TaskError(f"{path}: the instruction is empty", remedy="write what the agent has to do into it")
    return text.strip()


def _check_version(root: Table) -> None:
    name = "schema_version" if root.has("schema_version") or not root.has("version") else "version"
    if root.has("schema_version") and root.has("version"):
        raise root.error("version", "is the old name of schema_version, which is there too", "remove one")
    version = root.string(name)
    if version is None:
        return
    found = re.fullmatch(r"(\d+)\.(\d+)", version)
    if not found or not (1, 0) <= (int(found[1]), int(found[2])) <= SCHEMA:
        raise root.error(name, f"{version!r} is not a schema this version reads", "use 1.0 to 1.4")


def _refuse_steps(directory: Path, root: Table) -> None:
    reason = "tasks of several steps are not supported; a task is one instruction and one verifier"
    root.refuse("steps", reason)
    root.refuse("multi_step_reward_strategy", reason)
    files = {
        "steps": reason,
        "trajectory.json": "an agent cannot be given an earlier trajectory",
        "tests/docker-compose.yaml": "a verifier of several containers is not supported",
        "tests/.harborignore": "ignore rules are not supported; remove the files that must not be uploaded",
        "solution/.harborignore": "ignore rules are not supported; remove the files that must not be uploaded",
    }
    for name, why in files.items():
        if (directory / name).exists():
            raise TaskError(f"{directory / name}: {why}")


def _read_package(root: Table) -> str | None:
    table = root.table("task")
    if table is None:
        return None
    name = table.string("name")
    if name is None:
        raise table.error("name", "is missing", remedy='give it as "org/name", or remove the table [task]')
    if not _PACKAGE.fullmatch(name) or ".." in name:
        raise table.error("name", f"must be written as org/name, not {name!r}")
    table.string("version")
    table.string("description")
    table.strings("keywords")
    for author in _tables(table, "authors"):
        if author.string("name") is None:
            raise author.error("name", "is missing")
        author.string("email")
        author.finish()
    table.finish()
    return name


def _tables(table: Table, name: str) -> list[Table]:
    value = table.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise table.error(name, "must be an array of tables")
    return [Table(table.toml, (*table.key, name), item) for item in value]


def _read_environment(
    root: Table, directory: Path, own: bool, within: Table | None = None
) -> tuple[EnvironmentSpec, Limits, _Network, int]:
    """``[environment]``, or the table ``within`` (a verifier's own environment, of the same schema)."""
    table = within or root.table("environment") or Table(root.toml, ("environment",), {})
    system = table.string("os")
    if system is not None and system.lower() != "linux":
        raise table.error("os", f"{system!r}: only linux tasks can be run")
    table.refuse("tpu", "no sandbox can be given TPUs")
    table.refuse("gpu_types", "no sandbox can be given GPUs of a chosen type")
    table.refuse("mcp_servers", "MCP servers cannot be given to an agent")
    table.refuse("skills_dir", "skills cannot be given to an agent")
    table.refuse("healthcheck", "readiness checks are not run; let the environment's image be ready when it starts")
    limits = Limits(
        memory=_size(table, "memory", "memory_mb"),
        disk=_size(table, "storage", "storage_mb"),
        cpus=table.positive("cpus"),
        pids=None,
    )
    gpus = table.integer("gpus") or 0
    default = NetworkPolicy.NONE if own else NetworkPolicy.FULL
    network = _read_network(table, legacy=True) or (default, ())
    workdir = table.string("workdir") or DEFAULT_WORKDIR
    _check_absolute(table, "workdir", workdir)
    image = table.string("docker_image")
    dockerfile = directory / "Dockerfile"
    compose = directory / "docker-compose.yaml"
    spec = EnvironmentSpec(
        directory=directory if directory.is_dir() else None,
        dockerfile=dockerfile if dockerfile.is_file() and not image else None,
        image=image,
        compose=compose if compose.is_file() else None,
        workdir=workdir,
        env=_read_env(table),
        build_timeout=table.positive("build_timeout_sec") or DEFAULT_TIMEOUT,
    )
    table.finish({"image": "[environment] docker_image", "timeout_sec": "[environment] build_timeout_sec"})
    return spec, limits, network, gpus


def _read_setup(directory: Path, timeout: float) -> tuple[SetupStep, ...]:
    path = directory / SETUP_SCRIPT
    if not path.exists():
        return ()
    try:
        script = read_text(path)
    except (OSError, ValueError) as error:
        raise TaskError(f"{path}: cannot be read: {error}") from None
    return (SetupStep(name=SETUP_SCRIPT, script=script, timeout=timeout),)


def _size(table: Table, old: str, new: str) -> int | None:
    megabytes = table.integer(new, least=1)
    size = megabytes << 20 if megabytes is not None else None
    if not table.has(old):
        return size
    value = table.get(old)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG])\s*", value.upper()) if isinstance(value, str) else None
    if found is None:
        raise table.error(old, f"must be a string such as '2G', not {value!r:.60}", remedy=f"or write {new} = 2048")
    old_size = int(float(found[1]) * _SIZES[found[2]])
    if size is not None and size != old_size:
        raise table.error(old, f"says {value!r}, and {new} says {megabytes}", remedy=f"keep {new} only")
    return old_size


def _read_env(table: Table) -> dict[str, str]:
    values = table.string_map("env")
    for key, value in values.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            raise table.toml.error((*table.key, "env", key), "is not a name for an environment variable")
        if re.fullmatch(r"\$\{.*\}", value):
            raise table.toml.error(
                (*table.key, "env", key),
                f"{value!r} asks for a variable of the host, which never enters a sandbox",
                remedy="write the value itself",
            )
        if "\0" in value:
            raise table.toml.error((*table.key, "env", key), "must not contain a zero byte")
    return values


def _read_network(table: Table, *, legacy: bool = False) -> _Network | None:
    mode = table.string("network_mode")
    hosts = table.strings("allowed_hosts")
    internet = table.boolean("allow_internet") if legacy else None
    if mode is None:
        if hosts is not None:
            raise table.error("allowed_hosts", "is only read with network_mode = 'allowlist'")
        if internet is None:
            return None
        return (NetworkPolicy.FULL if internet else NetworkPolicy.NONE), ()
    policy = _NETWORKS.get(mode)
    if policy is None:
        near = difflib.get_close_matches(mode, _NETWORKS, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else None
        raise table.error("network_mode", f"must be one of {', '.join(_NETWORKS)}, not {mode!r}", remedy)
    if internet is not None and internet != (policy is not NetworkPolicy.NONE):
        raise table.error("allow_internet", f"says {internet}, and network_mode says {mode!r}", "keep network_mode")
    if policy is not NetworkPolicy.ALLOW_LIST and hosts:
        raise table.error("allowed_hosts", f"is only read with network_mode = 'allowlist', not {mode!r}")
    for host in hosts or ():
        try:
            parse_host(host)
        except ValueError as error:
            raise table.error("allowed_hosts", f"takes {HOST_FORMS}: {error}") from None
    return policy, tuple(hosts or ())


def _check_absolute(table: Table, name: str, path: str) -> None:
    pure = PurePosixPath(path)
    if not pure.is_absolute() or ".." in pure.parts or pure == PurePosixPath("/"):
        raise table.error(name, f"must be an absolute path below / without '..', not {path!r}")


def _read_agent(root: Table, baseline: _Network) -> tuple[float, _Network]:
    table = root.table("agent")
    if table is None:
        return DEFAULT_TIMEOUT, baseline
    timeout = table.positive("timeout_sec") or DEFAULT_TIMEOUT
    user = _user(table)
    if user not in (None, "root", "0"):
        raise table.error("user", "the agent runs as the sandbox's own user; another one cannot be chosen")
    network = _read_network(table) or baseline
    table.finish(_ELSEWHERE)
    return timeout, network


def _user(table: Table) -> str | None:
    value = table.get("user")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise table.error("user", f"must be a user name or number, not {value!r:.60}")
    return str(value)


def _read_solution(root: Table) -> dict[str, str]:
    table = root.table("solution")
    if table is None:
        return {}
    env = _read_env(table)
    table.finish()
    return env


class _Own(msgspec.Struct, frozen=True, kw_only=True):
    """``[rl_harness]``: the keys Harbor does not have (it ignores the table)."""

    present: bool = False
    mode: VerifierMode | None = None
    answers: tuple[str, ...] = ()
    max_turns: int | None = None
    allow_tampered: bool = False
    artifact_limit: int = DEFAULT_ARTIFACT_LIMIT


def _read_own(table: Table | None) -> _Own:
    if table is None:
        return _Own()
    mode = _choice(table, "verifier", ("separate", "shared", "answer"))
    answers: tuple[Any, ...] = ()
    if table.has("answer"):
        value = table.get("answer")
        answers = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else ()
        if not answers or not all(isinstance(item, str) and item.strip() for item in answers):
            raise table.error("answer", "must be a string or an array of strings, none of them empty")
        if mode not in (None, "answer"):
            raise table.error("answer", f"is only read with verifier = 'answer', not {mode!r}")
        mode = "answer"
    elif mode == "answer":
        raise table.error("verifier", "'answer' needs the answer", remedy="add: answer = '...'")
    limit = table.integer("artifact_limit_mb", least=1)
    own = _Own(
        present=True,
        mode=mode,
        answers=answers,
        max_turns=table.integer("max_turns", least=1),
        allow_tampered=table.boolean("allow_tampered") or False,
        artifact_limit=limit << 20 if limit else DEFAULT_ARTIFACT_LIMIT,
    )
    table.finish({"artifacts": _ELSEWHERE["artifacts"], "timeout_sec": _ELSEWHERE["timeout_sec"]})
    return own


def _choice(table: Table, name: str, values: tuple[VerifierMode, ...]) -> VerifierMode | None:
    stated = table.string(name)
    if stated is None:
        return None
    for value in values:
        if value == stated:
            return value
    raise table.error(name, f"must be one of {', '.join(values)}, not {stated!r}")


def _read_verifier(
    root: Table,
    directory: Path,
    own: _Own,
    environment: EnvironmentSpec,
    limits: Limits,
    baseline: _Network,
    agent_network: _Network,
) -> VerifierSpec:
    table = root.table("verifier") or Table(root.toml, ("verifier",), {})
    timeout = table.positive("timeout_sec") or DEFAULT_TIMEOUT
    env = _read_env(table)
    user = _user(table)
    table.refuse("collect", "commands between agent and verifier are not run; declare what they read as artifacts")
    mode = _verifier_mode(table, own)
    network = _read_network(table) or baseline

    bundled = False
    if (inner := table.table("environment")) is not None:
        if mode != "separate":
            raise table.error("environment", f"is only read when the verifier is separate, not {mode}")
        environment, limits, inner_network, gpus = _read_environment(root, directory / "tests", True, inner)
        network = _read_network(table) or inner_network
        bundled = bool(environment.image or environment.dockerfile)
        if gpus:
            raise inner.error("gpus", "a verifier cannot be given GPUs")
    elif mode == "separate" and (directory / "tests/Dockerfile").is_file():
        bundled = True
        environment = EnvironmentSpec(
            directory=directory / "tests",
            dockerfile=directory / "tests/Dockerfile",
            workdir=environment.workdir,
            env=environment.env,
            build_timeout=environment.build_timeout,
        )
    table.finish(_ELSEWHERE)

    if mode == "shared" and network != agent_network:
        raise table.error(
            "network_mode",
            "agent and verifier ask for different networks, and they share one sandbox",
            remedy="set [verifier] environment_mode = 'separate'",
        )
    artifacts = _read_artifacts(root)
    if mode == "answer":
        if artifacts:
            raise root.error("artifacts", "is not read by a task that is graded on its answer")
        return VerifierSpec(mode=mode, timeout=timeout, answers=own.answers)
    if not bundled and not (directory / "tests/test.sh").is_file():
        raise TaskError(
            f"{directory / 'tests/test.sh'}: there is no verifier",
            remedy="write a script that puts a number into /logs/verifier/reward.txt, or give "
            "[rl_harness] answer for a task graded on its final answer",
        )
    return VerifierSpec(
        mode=mode,
        timeout=timeout,
        env=env,
        user=user,
        artifacts=artifacts or (Artifact(source=environment.workdir),),
        artifact_limit=own.artifact_limit,
        environment=environment,
        limits=limits,
        network=network[0],
        network_allow=network[1],
        bundled=bundled,
    )


def _verifier_mode(table: Table, own: _Own) -> VerifierMode:
    stated = _choice(table, "environment_mode", ("separate", "shared"))
    if stated and own.mode and stated != own.mode:
        raise table.error(
            "environment_mode", f"says {stated!r}, and [rl_harness] says {own.mode!r}", remedy="keep one of them"
        )
    if mode := own.mode or stated:
        return mode
    return "separate" if own.present or table.data.get("environment") is not None else "shared"


def _read_artifacts(root: Table) -> tuple[Artifact, ...]:
    value = root.get("artifacts")
    if value is None:
        return ()
    if not isinstance(value, list):
        raise root.error("artifacts", "must be an array")
    artifacts = []
    for item in value:
        if isinstance(item, str):
            item = {"source": item}
        elif not isinstance(item, dict):
            raise root.error("artifacts", f"must hold paths or tables, not {item!r:.60}")
        table = Table(root.toml, ("artifacts",), item)
        source = table.string("source")
        if source is None:
            raise table.error("source", "is missing")
        _check_absolute(table, "source", source)
        table.refuse("destination", "artifacts keep their path")
        if table.string("service") not in (None, "main"):
            raise table.error("service", "of several containers, artifacts are taken from the agent's only")
        artifacts.append(Artifact(source=source.rstrip("/"), exclude=table.strings("exclude") or ()))
        table.finish()
    return tuple(artifacts)
