"""Compose files of tasks: what of them is honoured, and a refusal, with file and key, for everything else.

A task's file describes the services beside the agent's; the agent's own is called ``main`` and takes its image from the
task where it names none. What would reach outside (host mounts, host namespaces, devices, privileges, published ports)
is refused, and so is every key that would be ignored.
"""

from __future__ import annotations

import difflib
import graphlib
import re
import reprlib
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml  # type: ignore[import-untyped]  # PyYAML has no types
from rl_harness.errors import TaskError

from rl_harness_docker.files import read_text

MAIN = "main"
DEFAULT_NETWORK = "default"

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")
_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?::?-([^}]*))?\}|(\w+)|)")
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?(?:(\d+)ms)?")
_OF_BUILD = ("context", "dockerfile", "args", "target")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|git@")
_LONGEST = 365 * 24 * 3600.0
_MOST_RETRIES = 1_000_000
_IDLE = (["sleep", "infinity"], ["tail", "-f", "/dev/null"])

_OUTSIDE = {
    "privileged": "gives the container the rights of the engine's machine",
    "cap_add": "gives capabilities, which only -o sandbox.capabilities does",
    "security_opt": "changes the container's confinement",
    "devices": "reaches devices of the engine's machine",
    "device_cgroup_rules": "reaches devices of the engine's machine",
    "volumes": "mounts into the container; files belong into its image",
    "volumes_from": "mounts into the container; files belong into its image",
    "network_mode": "leaves the sandbox's own networks",
    "pid": "shares a namespace",
    "ipc": "shares a namespace",
    "uts": "shares a namespace",
    "userns_mode": "shares a namespace",
    "cgroup": "shares a namespace",
    "cgroup_parent": "leaves the engine's limits",
    "ports": "publishes a port on the engine's machine; services reach each other by name without it",
    "env_file": "is not read; write the variables under environment",
    "extra_hosts": "names addresses outside the sandbox",
    "external_links": "reaches containers outside the sandbox",
    "use_api_socket": "gives access to the engine",
}


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A health check; seconds."""

    test: tuple[str, ...]
    interval: float = 30.0
    timeout: float = 30.0
    retries: int = 3
    start_period: float = 0.0


class Build(msgspec.Struct, frozen=True, kw_only=True):
    context: Path
    dockerfile: Path
    args: Mapping[str, str] = {}
    target: str = ""


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """``depends_on``: service to ``service_started``, ``service_healthy`` or ``service_completed_successfully``."""

    name: str
    image: str | None = None
    build: Build | None = None
    command: tuple[str, ...] | None = None
    entrypoint: tuple[str, ...] | None = None
    environment: Mapping[str, str] = {}
    working_dir: str | None = None
    user: str | None = None
    hostname: str | None = None
    networks: tuple[str, ...] = (DEFAULT_NETWORK,)
    depends_on: Mapping[str, str] = {}
    healthcheck: Check | None = None


class Project(msgspec.Struct, frozen=True, kw_only=True):
    """``services`` in an order in which each comes after those it depends on; ``main`` is among them. ``networks``:
    name to whether it is internal."""

    services: tuple[Service, ...]
    networks: Mapping[str, bool]

    @property
    def main(self) -> Service:
        return next(service for service in self.services if service.name == MAIN)


def read_compose(file: Path) -> Project:
    """Raises TaskError, and nothing else whatever the file holds, naming the file and the key."""
    text = read_text(file)
    try:
        return _Reader(file).project(yaml.load(text, Loader=_Loader))
    except TaskError:
        raise
    except yaml.YAMLError as error:
        raise TaskError(f"{file}: {error}") from None
    except RecursionError:
        raise TaskError(f"{file}: is nested too deeply") from None
    except Exception as error:  # YAML's own readers of dates and numbers, paths that no system takes, ...
        raise TaskError(f"{file}: is not a compose file: {type(error).__name__}: {error}") from None


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # of an untyped module
    """Refuses a key given twice, of which YAML would keep the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = key_node.value if isinstance(key_node.value, str) else None
            if key is not None and key != "<<" and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice", key_node.start_mark
                )
            seen.add(key)
        return dict(super().construct_mapping(node, deep))


class _Reader:
    def __init__(self, file: Path) -> None:
        self._file = file

    def error(self, key: str, reason: str, remedy: str | None = None) -> TaskError:
        return TaskError(f"{self._file}: {key}: {reason}", remedy=remedy)

    def project(self, data: Any) -> Project:
        if not isinstance(data, dict) or not isinstance(data.get("services"), dict):
            raise TaskError(
                f"{self._file}: has no services", remedy="write the containers beside the agent's as services"
            )
        for key in data:
            if key not in ("services", "networks", "version", "name") and not str(key).startswith("x-"):
                raise self.error(str(key), "is not supported in a task's compose file")
        networks = self._networks(data.get("networks"))
        services = {str(name): self._service(str(name), value) for name, value in data["services"].items()}
        services.setdefault(MAIN, Service(name=MAIN))
        for service in services.values():
            for network in service.networks:
                if network not in networks:
                    raise self.error(f"services.{service.name}.networks", f"there is no network {network!r}")
            for other in service.depends_on:
                if other not in services:
                    raise self.error(f"services.{service.name}.depends_on", f"there is no service {other!r}")
        return Project(services=self._ordered(services), networks=networks)

    def _networks(self, value: Any) -> dict[str, bool]:
        networks = {DEFAULT_NETWORK: False}
        for name, form in self._table("networks", value).items():
            form = self._table(f"networks.{name}", form)
            for key, setting in form.items():
                if key != "internal" and (key, setting) != ("driver", "bridge"):
                    raise self.error(f"networks.{name}.{key}", "is not supported")
            networks[str(name)] = self._flag(f"networks.{name}.internal", form.get("internal"))
        return networks

    def _service(self, name: str, value: Any) -> Service:
        at = f"services.{name}"
        if not _NAME.fullmatch(name):
            raise self.error(at, "is not a name for a service")
        table = self._table(at, value)
        self._check_keys(at, table)
        command = self._words(f"{at}.command", table.get("command"))
        entrypoint = self._words(f"{at}.entrypoint", table.get("entrypoint"))
        build = self._build(f"{at}.build", table["build"]) if "build" in table else None
        image = self._text(f"{at}.image", table.get("image"))
        if name == MAIN:
            self._check_main(at, command, entrypoint)
            if "healthcheck" in table:
                raise self.error(f"{at}.healthcheck", "nothing runs in the agent's container that could be checked")
        elif image is None and build is None:
            raise self.error(at, "needs an image or a build")
        return Service(
            name=name,
            image=None if build else image,
            build=build,
            command=command,
            entrypoint=entrypoint,
            environment=self._environment(f"{at}.environment", table.get("environment")),
            working_dir=self._text(f"{at}.working_dir", table.get("working_dir")),
            user=self._text(f"{at}.user", table.get("user")),
            hostname=self._text(f"{at}.hostname", table.get("hostname")),
            networks=self._names(f"{at}.networks", table.get("networks")) or (DEFAULT_NETWORK,),
            depends_on=self._depends(f"{at}.depends_on", table.get("depends_on")),
            healthcheck=self._healthcheck(f"{at}.healthcheck", table.get("healthcheck")),
        )

    def _check_keys(self, at: str, table: Mapping[str, Any]) -> None:
        known = {*Service.__struct_fields__, "expose", "init", "restart"}
        for key, value in table.items():
            if key in _OUTSIDE:
                raise self.error(f"{at}.{key}", f"is refused: it {_OUTSIDE[key]}")
            if key not in known and not str(key).startswith("x-"):
                raise self._ignored(at, key, known)
            if key == "restart" and value != "no":
                raise self.error(f"{at}.restart", "services are not restarted", "remove the key")
            if key == "init" and value is not True:
                raise self.error(f"{at}.init", "every container has an init process", "remove the key")

    def _check_main(self, at: str, command: tuple[str, ...] | None, entrypoint: tuple[str, ...] | None) -> None:
        words = [*(entrypoint or ()), *(command or ())]
        if words[:2] == ["sh", "-c"] or words[:2] == ["/bin/sh", "-c"]:
            words = self._split(f"{at}.command", " ".join(words[2:]))
        if words and words not in _IDLE:
            key = "command" if command else "entrypoint"
            raise self.error(
                f"{at}.{key}", "the agent's container runs nothing of its own", "move it into a service beside it"
            )

    def _build(self, at: str, value: Any) -> Build:
        if isinstance(value, str):
            value = {"context": value}
        table = self._table(at, value)
        for key in table:
            if key not in _OF_BUILD:
                raise self._ignored(at, key, _OF_BUILD)
        context_name = self._text(f"{at}.context", table.get("context")) or "."
        if _URL.match(context_name):
            raise self.error(
                f"{at}.context",
                f"{context_name}: URL contexts are not supported",
                "put its files beside the compose file",
            )
        context = self._path(f"{at}.context", self._file.parent, context_name)
        dockerfile = self._text(f"{at}.dockerfile", table.get("dockerfile")) or "Dockerfile"
        return Build(
            context=context,
            dockerfile=self._path(f"{at}.dockerfile", context, dockerfile),
            args=self._environment(f"{at}.args", table.get("args")),
            target=self._text(f"{at}.target", table.get("target")) or "",
        )

    def _path(self, at: str, base: Path, value: str) -> Path:
        path = base / value
        if not path.resolve().is_relative_to(self._file.parent.resolve()):
            raise self.error(at, f"{value} lies outside the task's environment")
        return path

    def _environment(self, at: str, value: Any) -> dict[str, str]:
        if isinstance(value, list):
            pairs = [self._word(at, item).partition("=") for item in value]
            if missing := [name for name, equals, _ in pairs if not equals]:
                raise self.error(f"{at}.{missing[0]}", "asks for a variable of the host, which never enters a sandbox")
            return {name: self._interpolate(f"{at}.{name}", text) for name, _, text in pairs}
        found = {}
        for name, text in self._table(at, value).items():
            if text is None:
                raise self.error(f"{at}.{name}", "asks for a variable of the host, which never enters a sandbox")
            found[str(name)] = self._text(f"{at}.{name}", text) or ""
        return found

    def _depends(self, at: str, value: Any) -> dict[str, str]:
        if isinstance(value, list):
            return {self._word(at, name): "service_started" for name in value}
        found = {}
        for name, form in self._table(at, value).items():
            form = self._table(f"{at}.{name}", form)
            condition = form.get("condition", "service_started")
            if condition not in ("service_started", "service_healthy", "service_completed_successfully"):
                raise self.error(f"{at}.{name}.condition", f"{_shown(condition)} is not a condition")
            self._check_only(f"{at}.{name}", form, {"condition", "required", "restart"})
            found[str(name)] = condition
        return found

    def _healthcheck(self, at: str, value: Any) -> Check | None:
        table = self._table(at, value)
        self._check_only(at, table, {"test", "interval", "timeout", "retries", "start_period", "disable"})
        if self._flag(f"{at}.disable", table.get("disable")) or not table:
            return None
        test = table.get("test")
        if isinstance(test, str):
            words = ["CMD-SHELL", self._interpolate(f"{at}.test", test)]
        elif isinstance(test, list) and test and test[0] in ("NONE", "CMD", "CMD-SHELL"):
            words = [self._interpolate(f"{at}.test", self._word(f"{at}.test", word)) for word in test]
        else:
            raise self.error(f"{at}.test", "must be a string, or a list that begins with CMD, CMD-SHELL or NONE")
        if words[0] == "NONE":
            return None
        seconds = {
            key: self._seconds(f"{at}.{key}", table[key])
            for key in ("interval", "timeout", "start_period")
            if key in table
        }
        retries = table.get("retries", 3)
        if isinstance(retries, bool) or not isinstance(retries, int) or not 1 <= retries <= _MOST_RETRIES:
            raise self.error(f"{at}.retries", f"must be a number from 1 to {_MOST_RETRIES}")
        return Check(test=tuple(words), retries=retries, **seconds)

    def _seconds(self, at: str, value: Any) -> float:
        found = _DURATION.fullmatch(self._word(at, value))
        if not found or not any(found.groups()):
            raise self.error(at, f"{_shown(value)} is not a duration such as 1m30s")
        hours, minutes, seconds, milliseconds = (float(part or 0) for part in found.groups())
        total = hours * 3600 + minutes * 60 + seconds + milliseconds / 1000
        if total > _LONGEST:
            raise self.error(at, "is longer than a year")
        return total

    def _words(self, at: str, value: Any) -> tuple[str, ...] | None:
        if value is None:
            return None
        if isinstance(value, list):
            return tuple(self._interpolate(at, self._word(at, word)) for word in value)
        return tuple(self._split(at, self._text(at, value) or ""))

    def _split(self, at: str, text: str) -> list[str]:
        try:
            return shlex.split(text)
        except ValueError as error:
            raise self.error(at, f"{_shown(text)}: {error}") from None

    def _names(self, at: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, dict):
            for name, form in value.items():
                if form:
                    raise self.error(f"{at}.{name}", "takes no settings here")
            return tuple(str(name) for name in value)
        if value is not None and not isinstance(value, list):
            raise self.error(at, "must be a list of names")
        return tuple(self._word(at, name) for name in value or ())

    def _text(self, at: str, value: Any) -> str | None:
        return None if value is None else self._interpolate(at, self._word(at, value))

    def _word(self, at: str, value: Any) -> str:
        if isinstance(value, bool):
            return "true" if value else "false"
        if not isinstance(value, str | int | float):
            raise self.error(at, f"must be a string, not {_shown(value)}")
        if "\0" in str(value):
            raise self.error(at, f"{_shown(value)} has a NUL character, which no system takes")
        return str(value)

    def _flag(self, at: str, value: Any) -> bool:
        if value is not None and not isinstance(value, bool):
            raise self.error(at, f"must be true or false, not {_shown(value)}")
        return bool(value)

    def _check_only(self, at: str, table: Mapping[Any, Any], known: set[str]) -> None:
        for key in table:
            if key not in known:
                raise self._ignored(at, key, known)

    def _ignored(self, at: str, key: Any, known: Iterable[str]) -> TaskError:
        near = difflib.get_close_matches(str(key), list(known), n=1)
        remedy = f"did you mean {near[0]!r}?" if near else None
        return self.error(f"{at}.{key}", "is not supported, and would be ignored", remedy)

    def _interpolate(self, at: str, text: str) -> str:
        def replace(match: re.Match[str]) -> str:
            dollar, name, default, bare = match.groups()
            if dollar:
                return "$"
            if name and default is not None:
                return str(default)
            if name or bare:
                raise self.error(
                    at,
                    f"{match[0]} asks for a variable of the host, which never enters a sandbox",
                    remedy="write the value itself, or $$ for a dollar sign",
                )
            return match[0]

        return _VARIABLE.sub(replace, text)

    def _table(self, at: str, value: Any) -> dict[Any, Any]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(at, f"must be a table, not {_shown(value)}")
        return value

    def _ordered(self, services: Mapping[str, Service]) -> tuple[Service, ...]:
        order = graphlib.TopologicalSorter({name: list(service.depends_on) for name, service in services.items()})
        try:
            return tuple(services[name] for name in order.static_order())
        except graphlib.CycleError as error:
            name = error.args[1][0]
            raise self.error(f"services.{name}.depends_on", "depends on itself by way of others") from None


def _shown(value: Any) -> str:
    """Bounded: a few lines of YAML that refer to each other stand for more than memory holds."""
    return reprlib.repr(value)
