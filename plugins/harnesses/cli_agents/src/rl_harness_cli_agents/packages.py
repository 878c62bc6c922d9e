"""Where an agent's program comes from and how it is started: npm, PyPI, or not from here at all.

A package knows the commands that install it below a folder, on this machine or in a sandbox, and nothing of who runs
them.
"""

from __future__ import annotations

import abc
import functools
import hashlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rl_harness.errors import Unavailable

#: Where programs of this machine lie that a sandbox made of its system directories sees.
_SEEN_INSIDE = ("/usr/local/bin", "/usr/bin")
_NPM_INSTALL = "npm install --no-audit --no-fund --no-update-notifier --loglevel=error"
_OWN_NODE = "node_modules/node/bin/node"
_IN_A_NETWORK = "-o harness.install=sandbox in a sandbox with a network installs it there"
#: What is downloaded would only make the snapshot larger.
_OF_NO_USE_TWICE = """\
umask 022
downloads="$(mktemp -d)"
trap 'rm -rf "$downloads"' EXIT
export npm_config_cache="$downloads" PIP_NO_CACHE_DIR=1
"""
#: What an image without Node.js or Python gets them with, as far as its own package manager has them.
_BY_THE_SYSTEM = """\
provide() {
    if command -v apt-get >/dev/null; then
        apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends \\
            ca-certificates "$@"
    elif command -v apk >/dev/null; then apk add --no-cache "$@"
    elif command -v dnf >/dev/null; then dnf install -y "$@"
    fi
}
"""


@dataclass(frozen=True, kw_only=True)
class Package(abc.ABC):
    """A program and the version of it that was tried."""

    installable: ClassVar[bool] = True
    version: str
    program: str

    @abc.abstractmethod
    def host_script(self, version: str) -> str:
        """Shell commands that install it below ``$PREFIX`` on this machine. Raises ``Unavailable``."""

    @abc.abstractmethod
    def sandbox_script(self, version: str, prefix: str) -> str:
        """The same in a sandbox, as its root, with what it needs before."""

    @abc.abstractmethod
    def command(self, prefix: str) -> list[str]:
        """How the program is started where ``prefix`` is what was installed."""

    @abc.abstractmethod
    def check(self, prefix: str) -> str:
        """A shell condition: whether :meth:`command` can be started."""

    @abc.abstractmethod
    def preflight(self) -> None:
        """Raises ``Unavailable`` for what :meth:`host_script` would miss on this machine."""

    @abc.abstractmethod
    def facts(self) -> object:
        """What an installation on this machine depends on beside the version. Raises ``Unavailable``."""

    def identity(self) -> str:
        """Tells installations of one version apart."""
        return hashlib.sha256(repr(self.facts()).encode()).hexdigest()[:8]


@dataclass(frozen=True, kw_only=True)
class Npm(Package):
    """A package of npm. Needs a Node.js of at least version ``node``; where there is only an older one, npm gives it
    one of its own. ``native``: its program is none of Node.js's."""

    package: str
    node: tuple[int, int] = (20, 0)
    own_node: str = "24"
    native: bool = False

    def _brings_node(self) -> bool:
        node = node_inside()
        return not self.native and (node is None or node < self.node)

    def host_script(self, version: str) -> str:
        own = f"{self._own_node('$PREFIX')}\n" if self._brings_node() else ""
        return f"{own}{self._install(version, '$PREFIX')}\n"

    def sandbox_script(self, version: str, prefix: str) -> str:
        lines = ["set -eu", _OF_NO_USE_TWICE, _BY_THE_SYSTEM, "command -v npm >/dev/null || provide nodejs npm"]
        if not self.native:
            major, minor = self.node
            enough = (
                f"const [a, b] = process.versions.node.split('.'); process.exit(a > {major} || a == {major} && b >= "
            )
            lines.append(f'node -e "{enough}{minor} ? 0 : 1)" || {self._own_node(prefix)}')
        return "\n".join([*lines, self._install(version, prefix), ""])

    def _own_node(self, prefix: str) -> str:
        return f'{_NPM_INSTALL} --prefix "{prefix}" node@{self.own_node}'

    def _install(self, version: str, prefix: str) -> str:
        # With a node of its own in front, if it was given one: some packages refuse to be installed by an older.
        path = f'PATH="{prefix}/{_OWN_NODE.rpartition("/")[0]}:$PATH"'
        return f'{path} {_NPM_INSTALL} --prefix "{prefix}" {shlex.quote(f"{self.package}@{version}")}'

    def command(self, prefix: str) -> list[str]:
        program = f"{prefix}/node_modules/.bin/{self.program}"
        if self.native:
            return [program]
        # Whether it was given a node of its own shows where it runs.
        node = f'node={prefix}/{_OWN_NODE}; [ -x "$node" ] || node=node; exec "$node" "$0" "$@"'
        return ["/bin/sh", "-c", node, program]

    def check(self, prefix: str) -> str:
        program = f"[ -e {prefix}/node_modules/.bin/{self.program} ]"
        return program if self.native else f"{program} && {{ [ -x {prefix}/{_OWN_NODE} ] || command -v node; }}"

    def facts(self) -> object:
        return self.package, self.own_node if self._brings_node() else None

    def preflight(self) -> None:
        if shutil.which("npm") is None:
            raise Unavailable(
                f"{self.package} comes from npm, and this machine has no npm",
                remedy=f"install Node.js {self.node[0]} or newer with npm; or {_IN_A_NETWORK}",
            )


@dataclass(frozen=True, kw_only=True)
class Pip(Package):
    """A distribution of PyPI in a virtual environment of its own, for a Python from ``python`` up to before ``below``.
    ``extra``: further requirements."""

    package: str
    python: tuple[int, int] = (3, 11)
    below: tuple[int, int] = (4, 0)
    extra: tuple[str, ...] = ()

    def _wanted(self, version: str) -> str:
        return shlex.join([f"{self.package}=={version}", *self.extra])

    def host_script(self, version: str) -> str:
        python = self._python()
        return (
            f'{python} -m venv --without-pip "$PREFIX"\n'
            f'{_pip(python)} --python "$PREFIX/bin/python" install --quiet --no-warn-script-location '
            f"{self._wanted(version)}\n"
        )

    def sandbox_script(self, version: str, prefix: str) -> str:
        target = shlex.quote(prefix)
        wanted = shlex.quote(f"import sys; sys.exit(not {self.python} <= sys.version_info < {self.below})")
        return (
            f"set -eu\n{_OF_NO_USE_TWICE}{_BY_THE_SYSTEM}"
            "python3 -c 'import ensurepip, venv' 2>/dev/null || provide python3 python3-venv\n"
            f"python3 -c {wanted} || {{\n"
            f'    echo "{self.package} needs {self._range()} and the sandbox has $(python3 --version)" >&2\n'
            "    exit 1\n}\n"
            f"python3 -m venv {target}\n"
            f"{target}/bin/python -m pip install --quiet --disable-pip-version-check {self._wanted(version)}\n"
        )

    def command(self, prefix: str) -> list[str]:
        # By its interpreter: the first line of the script names where the environment was made.
        return [f"{prefix}/bin/python", f"{prefix}/bin/{self.program}"]

    def check(self, prefix: str) -> str:
        return f"[ -x {prefix}/bin/python ] && [ -e {prefix}/bin/{self.program} ]"

    def facts(self) -> object:
        python = self._python()
        return self.package, self.extra, python, pythons_inside()[python]

    def preflight(self) -> None:
        _pip(self._python())

    def _python(self) -> str:
        for path, version in pythons_inside().items():
            if self.python <= version < self.below:
                return path
        raise Unavailable(
            f"{self.package} needs {self._range()} in {' or '.join(_SEEN_INSIDE)}, where the sandbox sees it",
            remedy=f"install one with the system's package manager; or {_IN_A_NETWORK}",
        )

    def _range(self) -> str:
        end = f" and older than {_dotted(self.below)}" if self.below < (4, 0) else ""
        return f"Python {_dotted(self.python)} or newer{end},"


@dataclass(frozen=True, kw_only=True)
class Unpackaged(Package):
    """A program that no registry used here has: it must be in the sandbox already. ``how`` tells its user."""

    installable: ClassVar[bool] = False
    how: str

    def host_script(self, version: str) -> str:
        raise self._unavailable()

    def sandbox_script(self, version: str, prefix: str) -> str:
        raise self._unavailable()

    def command(self, prefix: str) -> list[str]:
        raise self._unavailable()

    def check(self, prefix: str) -> str:
        raise self._unavailable()

    def facts(self) -> object:
        raise self._unavailable()

    def preflight(self) -> None:
        raise self._unavailable()

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"{self.program} is not installed by rl-harness", remedy=self.how)


@functools.cache
def node_inside() -> tuple[int, int] | None:
    """The version of the Node.js that a sandbox made of this machine's system directories has."""
    for folder in _SEEN_INSIDE:
        said = _said([f"{folder}/node", "--version"])
        if found := re.match(r"v(\d+)\.(\d+)", said):
            return int(found[1]), int(found[2])
    return None


@functools.cache
def pythons_inside() -> dict[str, tuple[int, int]]:
    """Interpreters that a sandbox made of this machine's system directories has, with their versions."""
    found = {}
    for folder in _SEEN_INSIDE:
        for path in sorted(Path(folder).glob("python3*"), key=lambda path: (len(path.name), path.name)):
            if re.fullmatch(r"python3(\.\d+)?", path.name):
                said = _said([str(path), "-c", "import sys, venv; print(*sys.version_info[:2])"])
                if len(said.split()) == 2:
                    major, minor = said.split()
                    found[str(path)] = (int(major), int(minor))
    return found


@functools.cache
def _pip(python: str) -> str:
    """A pip that can install into another environment: this run's own, or that of ``python``."""
    for candidate in (sys.executable, python):
        if re.match(r"pip (2[2-9]|[3-9]\d)\.", _said([candidate, "-m", "pip", "--version"])):
            return shlex.join([candidate, "-m", "pip", "--disable-pip-version-check"])
    raise Unavailable(
        f"neither {sys.executable} nor {python} has a pip of version 22.3 or newer",
        remedy=f"python -m ensurepip, or install pip with the system's package manager; or {_IN_A_NETWORK}",
    )


def _said(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
