"""The base of all agents: a program that is installed, configured and started inside the sandbox, once for a task.

A subclass says four things: which package it is, its environment variables, its configuration files and its command.
How the attempt is graded is the task's business alone; the program's exit code is a detail of the record.
"""

from __future__ import annotations

import abc
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field
from rl_harness.contracts import (
    API,
    ExecResult,
    Harness,
    HarnessCapabilities,
    HarnessContext,
    HarnessResult,
    HostMount,
    Options,
    Sandbox,
    SandboxCapabilities,
    SetupStep,
)
from rl_harness.errors import ConfigError, HarnessError, PluginError, Unsupported
from rl_harness.records import Termination

from rl_harness_cli_agents.cache import agents_folder, install
from rl_harness_cli_agents.packages import Package

#: The agent's own state: outside of every working directory, so that none of it is taken for the task's result. Not in
#: /tmp, where Codex keeps no programs of its own.
HOME = "/var/tmp/rl-harness-home"
_PREFIX = "/opt/rl-harness"
#: Linux refuses a single argument of 128 KiB or more.
_LONGEST_ARGUMENT = 120_000
_OUTPUT_LIMIT = 4 << 20
_ANSWER_CHARS = 100_000
_DETAIL_CHARS = 1_000
_INSTALL_SECONDS = 900.0
_PREPARE_SECONDS = 60.0


class CliAgentOptions(Options):
    install: Literal["auto", "host", "sandbox", "present"] = Field(
        "auto",
        description="host: once on this machine, shown read-only in the sandbox; sandbox: by a set-up step in it; "
        "present: the sandbox has it; auto: host where the sandbox can be shown directories, else sandbox",
    )
    version: str | None = Field(
        None, pattern=r"^[0-9A-Za-z][0-9A-Za-z.+-]*$", description="version to install, instead of the one tried here"
    )
    install_env: dict[str, str] = Field(
        {},
        description="variables for the installation, wherever it is made: of a proxy, or of a registry of your own",
    )
    args: tuple[str, ...] = Field((), description="further arguments for the agent's command line")
    env: dict[str, str] = Field({}, description="further environment variables of the agent")
    output_limit: int = Field(16_000, ge=100, description="characters of what the agent prints that the episode keeps")
    context_length: int = Field(131_072, ge=1024, description="tokens of context that the agent believes its model has")
    max_tokens: int = Field(8192, ge=1, description="tokens of a reply that the agent asks for")


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where an agent sits for one task: what its pieces may refer to. ``base_url`` ends in ``/v1``, ``address`` does
    not. ``home`` is a fresh folder of its own."""

    instruction: str
    workdir: str
    home: str
    base_url: str
    address: str
    api_key: str
    model: str
    max_turns: int
    context_length: int
    max_tokens: int


class CliAgent(Harness):
    """One command-line agent. Ends with ``answer`` (what it printed) when its program exits with 0, else with
    ``agent_error``, ``time_limit``, or ``turn_limit`` where the gateway refused it a further call."""

    api = API
    Options = CliAgentOptions

    #: The harness's name; folders are called by it.
    name: ClassVar[str]
    package: ClassVar[Package]
    protocols: ClassVar[frozenset[str]] = frozenset({"chat"})
    calls_tools: ClassVar[bool] = True
    #: Of the options ``context_length`` and ``max_tokens`` those that its program has no setting for.
    untold: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, options: CliAgentOptions) -> None:
        super().__init__(options)
        for name in sorted(self.untold & options.model_fields_set):
            raise ConfigError(f"harness.{name}: {self.name} has no setting for that")
        self.options = options
        self._place: Literal["host", "sandbox", "present"] = "host" if options.install == "auto" else options.install

    # -- the pieces of an agent ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def environment(self, seat: Seat) -> Mapping[str, str]:
        """Variables that point the agent at its model and keep it quiet."""

    def files(self, seat: Seat) -> Mapping[str, str]:
        """Configuration files by absolute path, all of them below ``seat.home``."""
        return {}

    @abc.abstractmethod
    def arguments(self, seat: Seat) -> Sequence[str]:
        """What follows the program on its command line."""

    def stdin(self, seat: Seat) -> str:
        """What the program reads."""
        return ""

    # -- what the core is told -----------------------------------------------------------------------------------

    @property
    def capabilities(self) -> HarnessCapabilities:
        return HarnessCapabilities(protocols=self.protocols, calls_tools=self.calls_tools, inside=True)

    @property
    def version(self) -> str:
        return self.options.version or self.package.version

    def adapt(self, sandbox: SandboxCapabilities) -> None:
        if not sandbox.isolated:
            raise Unsupported(
                f"harness {self.name!r} gives a whole agent all rights in its sandbox, and this one isolates nothing",
                remedy="choose --sandbox local or another that isolates",
            )
        if not self.package.installable:
            if self.options.install not in ("auto", "present"):
                self.package.preflight()
            self._place = "present"
        elif self.options.install == "auto":
            self._place = "host" if sandbox.mounts else "sandbox"
        elif self.options.install == "host" and not sandbox.mounts:
            raise Unsupported(
                f"harness {self.name!r} is to be installed on this machine, which the sandbox cannot be shown",
                remedy="-o harness.install=sandbox",
            )
        if self._place == "present":
            for name in sorted({"version", "install_env"} & self.options.model_fields_set):
                raise ConfigError(f"harness.{name}: {self.name} is in the sandbox already and is not installed")

    @property
    def setup(self) -> tuple[SetupStep, ...]:  # type: ignore[override]  # the contract allows a property
        if self._place != "sandbox":
            return ()
        script = self.package.sandbox_script(self.version, self._prefix)
        step = SetupStep(
            name=f"{self.name} {self.version}",
            script=script,
            env=self.options.install_env,
            timeout=_INSTALL_SECONDS,
        )
        return (step,)

    @property
    def mounts(self) -> tuple[HostMount, ...]:  # type: ignore[override]  # the contract allows a property
        if self._place != "host":
            return ()
        folder = agents_folder() / f"{self.name}-{self.version}-{self.package.identity()}"
        return (HostMount(source=folder, target=self._prefix),)

    @property
    def _prefix(self) -> str:
        return f"{_PREFIX}/{self.name}"

    async def preflight(self) -> None:
        if self._place == "host" and not self.mounts[0].source.is_dir():
            self.package.preflight()

    async def start(self) -> None:
        for mount in self.mounts:
            await install(mount.source, self.package.host_script(self.version), self.options.install_env)

    # -- one attempt ---------------------------------------------------------------------------------------------

    async def run(self, context: HarnessContext) -> HarnessResult:
        sandbox, endpoint = context.sandbox, context.endpoint
        if sandbox is None or endpoint is None:
            raise PluginError(f"harness {self.name!r} needs a sandbox and a model, and the run gave it none")
        seat = Seat(
            instruction=context.task.instruction,
            workdir=context.task.workdir,
            home=HOME,
            base_url=endpoint.base_url,
            address=endpoint.base_url.removesuffix("/v1"),
            api_key=endpoint.api_key,
            model=endpoint.model,
            max_turns=context.task.max_turns,
            context_length=self.options.context_length,
            max_tokens=self.options.max_tokens,
        )
        command = self._command(seat)
        await self._prepare(sandbox, seat)
        left = context.seconds_left()
        if left <= 0:
            return HarnessResult(termination=Termination.TIME_LIMIT, detail="the deadline passed before it was started")
        done = await sandbox.exec(
            command,
            env=self._variables(seat),
            stdin=self.stdin(seat).encode(),
            timeout=left,
            output_limit=_OUTPUT_LIMIT,
        )
        context.on_event("agent", self._event(done))
        return _result(done)

    def _command(self, seat: Seat) -> list[str]:
        present = self._place == "present"
        start = [self.package.program] if present else self.package.command(self._prefix)
        command = [*start, *self.arguments(seat)]
        for argument in command:
            if len(argument.encode("utf-8", "replace")) > _LONGEST_ARGUMENT or "\0" in argument:
                raise HarnessError(
                    f"harness {self.name!r} passes the instruction as an argument, and it is longer than "
                    f"{_LONGEST_ARGUMENT} bytes or contains a NUL character"
                )
        return command

    def _variables(self, seat: Seat) -> dict[str, str]:
        return {
            "HOME": seat.home,
            "XDG_CONFIG_HOME": f"{seat.home}/.config",
            "XDG_DATA_HOME": f"{seat.home}/.local/share",
            "XDG_STATE_HOME": f"{seat.home}/.local/state",
            "XDG_CACHE_HOME": f"{seat.home}/.cache",
            "CI": "1",
            "NO_COLOR": "1",
            **self.environment(seat),
            **self.options.env,
        }

    async def _prepare(self, sandbox: Sandbox, seat: Seat) -> None:
        """Make the home with its files, as the user that the agent runs as, and look whether the program is there."""
        script = [f"set -eu\nrm -rf {seat.home}\numask 077\nmkdir -p {seat.home}"]
        for path, text in self.files(seat).items():
            end = f"END-{secrets.token_hex(8)}"
            quoted = shlex.quote(path)
            script.append(f"mkdir -p \"$(dirname {quoted})\"\ncat > {quoted} <<'{end}'\n{text}\n{end}")
        present = f"command -v {self.package.program}"
        check = present if self._place == "present" else self.package.check(self._prefix)
        script.append(f"{{ {check}; }} >/dev/null || exit 127\n")
        done = await sandbox.exec(["/bin/sh", "-s"], stdin="\n".join(script).encode(), timeout=_PREPARE_SECONDS)
        if done.exit_code == 127:
            raise HarnessError(
                f"{self.package.program}, or what it runs on, is not in the sandbox",
                remedy=f"let it be installed (-o harness.install=auto), or use an image that has {self.name}",
            )
        if not done.ok:
            raise HarnessError(f"{self.name} cannot be made ready in the sandbox: {_text(done)[-_DETAIL_CHARS:]}")

    def _event(self, done: ExecResult) -> dict[str, Any]:
        return {
            "program": f"{self.name} {self.version if self._place != 'present' else '(as found in the sandbox)'}",
            "exit_code": done.exit_code,
            "timed_out": done.timed_out,
            "truncated": done.stdout_truncated or done.stderr_truncated,
            "seconds": round(done.seconds, 3),
            "output": _ends(_text(done), self.options.output_limit),
        }


def _result(done: ExecResult) -> HarnessResult:
    detail = f"exit code {done.exit_code}: {_text(done)[-_DETAIL_CHARS:]}"
    if done.timed_out:
        return HarnessResult(termination=Termination.TIME_LIMIT, detail=f"stopped at the deadline; {detail}")
    answer = done.stdout.decode("utf-8", "replace").strip()[-_ANSWER_CHARS:]
    termination = Termination.AGENT_ERROR if done.exit_code else Termination.ANSWER
    return HarnessResult(termination=termination, answer=answer, detail=detail)


def _text(done: ExecResult) -> str:
    streams = (stream.decode("utf-8", "replace").strip() for stream in (done.stdout, done.stderr))
    return "\n".join(filter(None, streams))


def _ends(text: str, limit: int) -> str:
    """The beginning and the end of a text."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[...]\n{text[-(limit // 2) :]}"
