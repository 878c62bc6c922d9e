"""The machines behind the stand-in's sandboxes: each one a sandbox of the local provider, with real processes, a root
of its own, and real copies of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import itertools
import math
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_harness.contracts.sandbox import EnvironmentSpec, Limits, Process, Sandbox, SandboxSpec
from rl_harness.errors import SandboxError
from rl_harness.sandboxes.local import LocalProvider
from rl_harness.sandboxes.remote import list_processes, signal_processes
from rl_harness.testing import SandboxFiles, Wires
from rl_harness.testing.wires import EVERYTHING

CHUNK = 32 << 10
QUEUE = 64
RETAINED_SECONDS = 30.0
MIB = 1 << 20
TEAM = "standin-team"

# Processes that stand still already, as list_processes() names them.
STOPPED = """
for stat in /proc/[0-9]*/stat; do
  { read -r line < "$stat"; } 2>/dev/null || continue
  pid=${line%% *}; set -- ${line##*) }
  [ "$1" != T ] || echo "$pid:${20}"
done
"""


class ApiError(Exception):
    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


@dataclasses.dataclass
class Content:
    """What a sandbox starts from. ``files``: a snapshot of the local provider, None for this machine's own system."""

    files: str | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    workdir: str = "/home/user"
    cpus: int = 2
    memory: int = 512
    limited: bool = False


class Command:
    """A process in a machine. As in envd, output goes to whoever listens and is lost if nobody does, and the end is
    told once all output was closed."""

    def __init__(self, process: Process, pid: int, first: Sequence[tuple[str, bytes]]) -> None:
        self.pid = pid
        self.end: dict[str, Any] | None = None
        self.ended_at = math.inf
        self._process = process
        self._first = first
        self._listeners: set[asyncio.Queue[Any]] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        self._tasks.append(asyncio.create_task(self._run()))

    async def _run(self) -> None:
        try:
            for name, chunk in self._first:
                await self._say(name, chunk)
            async for name, chunk in self._process.output():
                await self._say(name, chunk)
            await self._finish()
        except SandboxError:
            return  # the machine is gone, and with it every stream

    async def _say(self, name: str, chunk: bytes) -> None:
        for start in range(0, len(chunk), CHUNK):
            await self._tell((name, chunk[start : start + CHUNK]))

    async def _finish(self) -> None:
        code = await self._process.wait()
        self.end = {"exit_code": code, "exited": True, "status": f"exit status {code}"}
        self.ended_at = time.monotonic()
        await self._tell(("end", self.end))

    async def _tell(self, item: Any) -> None:
        for listener in list(self._listeners):
            while listener in self._listeners:
                try:
                    listener.put_nowait(item)
                    break
                except asyncio.QueueFull:
                    await asyncio.sleep(0.001)

    @contextlib.contextmanager
    def listening(self) -> Any:
        queue: asyncio.Queue[Any] = asyncio.Queue(QUEUE)
        self._listeners.add(queue)
        try:
            yield queue
        finally:
            self._listeners.discard(queue)

    async def write(self, data: bytes) -> None:
        await self._process.write(data)

    async def close_stdin(self) -> None:
        await self._process.close_stdin()

    def killed(self) -> None:
        """envd lets go of the output of what it kills, whoever holds it."""
        self._tasks.append(asyncio.create_task(self._finish()))


class Machine:
    """A sandbox: the request that made it, and what runs it."""

    def __init__(self, fleet: Fleet, request: Mapping[str, Any], content: Content, base: str) -> None:
        self.id = "i" + secrets.token_hex(10)
        self.token = secrets.token_hex(16)
        self.base = base
        self.content = content
        self.metadata: dict[str, str] = dict(request.get("metadata") or {})
        self.env = {**content.env, **(request.get("envVars") or {})}
        self.request = request
        self.started_at = next(fleet.clock)
        self.ends_at = 0.0
        self.state = "running"
        self.commands: dict[int, Command] = {}
        self.box: Sandbox | None = None
        self.cut = asyncio.Event()
        self._fleet = fleet
        self._files: str | None = None
        self._own: list[str] = []
        self._spared: list[str] = []
        self._expiry: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()

    async def boot(self, files: str | None, timeout: float) -> None:
        """Start anew from files."""
        spec = SandboxSpec(
            environment=EnvironmentSpec(workdir="/"),
            limits=self._fleet.limits(self.content),
            labels={"run": "e2b-standin"},
            lifetime=2 * 86_400.0,
            snapshot=files,
        )
        self.box = await self._fleet.provider.create(spec)
        await self._fleet.wires.connect(self.box, *reached(self.request))
        listed = await self.box.exec(list_processes(), cwd="/")
        self._own = listed.stdout.decode().split()
        self.state = "running"
        self._watch = asyncio.create_task(self._died(self.box))
        self.keep(timeout)

    async def _died(self, box: Sandbox) -> None:
        await box.died()
        await self.end()

    def keep(self, timeout: float) -> None:
        """End, or pause, after this many seconds from now."""
        longest = self.started_at + 3600 * self._fleet.hours
        self.ends_at = min(time.time() + timeout, longest)
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.create_task(self._expire())

    async def _expire(self) -> None:
        await asyncio.sleep(self.ends_at - time.time())
        self._expiry = None
        if self.request.get("autoPause"):
            await self.pause(memory=self.request.get("autoPauseMemory", True))
        else:
            await self.end()

    def interrupt(self) -> None:
        """Every stream from the machine breaks off."""
        self.cut.set()
        self.cut = asyncio.Event()

    async def end(self) -> None:
        if self.state == "ended":
            return
        self.state = "ended"
        self.interrupt()
        for task in (self._expiry, self._watch):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        if self.box is not None:
            await asyncio.shield(asyncio.ensure_future(self.box.close()))

    async def pause(self, *, memory: bool) -> None:
        async with self._changing:
            if self.state != "running":
                raise ApiError(409, f"Error pausing sandbox - sandbox '{self.id}' is already paused")
            self.state = "paused"
            self.interrupt()
            if self._expiry is not None:
                self._expiry.cancel()
            assert self.box is not None
            if memory:
                stopped = await self.box.exec(["/bin/sh", "-c", STOPPED], cwd="/", timeout=30)
                self._spared = [*self._own, *stopped.stdout.decode().split()]
                await self.box.exec(signal_processes("STOP", self._spared), cwd="/", timeout=30)
                return
            self._files = await self.box.snapshot(labels={"run": "e2b-standin"})
            box, self.box = self.box, None
            if self._watch is not None:
                self._watch.cancel()
            await box.close()
            self.commands.clear()

    async def resume(self, timeout: float) -> None:
        async with self._changing:
            if self.state == "running":
                self.keep(max(timeout, self.ends_at - time.time()))
                return
            self.started_at = time.time()
            if self.box is None:
                await self.boot(self._files, timeout)
                return
            self.state = "running"
            await self.box.exec(signal_processes("CONT", self._spared), cwd="/", timeout=30)
            self.keep(timeout)

    async def freeze(self) -> str:
        """A real copy of its files. Streams are cut, as when a machine stands still for a moment."""
        async with self._changing:
            assert self.box is not None
            self.interrupt()
            return await self.box.snapshot(labels={"run": "e2b-standin"})

    async def start(self, command: str, arguments: list[str], cwd: str, env: Mapping[str, str]) -> Command:
        assert self.box is not None
        # Not the shell that a task may break: envd tells the number itself.
        wrapper = ["/bin/bash", "-c", 'echo "$$"; exec "$@"', "bash", command, *arguments]
        identity = {"HOME": "/root", "USER": "root", "LOGNAME": "root"}
        process = await self.box.spawn(wrapper, cwd=cwd or "/", env={**identity, **self.env, **env})
        output = process.output()
        seen = {"stdout": b"", "stderr": b""}  # the streams are independent: either may be the first to get here
        async for name, chunk in output:
            seen[name] += chunk
            if b"\n" in seen["stdout"]:
                break
        line, _, seen["stdout"] = seen["stdout"].partition(b"\n")
        number = int(line) if line else next(self._fleet.unnumbered)  # killed before it could say
        started = Command(_Continued(process, output), number, [*seen.items()])
        self.commands[started.pid] = started
        return started

    def files(self) -> SandboxFiles:
        assert self.box is not None
        return SandboxFiles(self.box)

    def command(self, pid: int) -> Command | None:
        found = self.commands.get(pid)
        if found is not None and found.ended_at < time.monotonic() - RETAINED_SECONDS:
            return None
        return found


class _Continued(Process):
    """A process part of whose output was read."""

    def __init__(self, process: Process, output: AsyncIterator[tuple[str, bytes]]) -> None:
        self._process = process
        self._output = output

    def output(self) -> AsyncIterator[tuple[str, bytes]]:
        return self._output

    async def write(self, data: bytes) -> None:
        await self._process.write(data)

    async def close_stdin(self) -> None:
        await self._process.close_stdin()

    async def wait(self) -> int:
        return await self._process.wait()

    async def kill(self) -> None:
        await self._process.kill()


class Fleet:
    """Every machine. ``hours``: how long the team's sandboxes may live; ``quota``: how many may at a time."""

    def __init__(self, state: Path) -> None:
        self.provider = LocalProvider(LocalProvider.Options(state_dir=state))
        self.wires = Wires(state)
        self.machines: dict[str, Machine] = {}
        self.quota = 10_000
        self.disk: int | None = None
        self.hours = 24
        self.clock = (time.time() + tick * 1e-6 for tick in itertools.count())  # no two of the same age
        self.unnumbered = itertools.count(1 << 22)  # above every real process
        self._starting: dict[str, asyncio.Future[Machine]] = {}

    def limits(self, content: Content) -> Limits:
        enforced = self.provider.capabilities.limits
        if not content.limited:
            return Limits(disk=self.disk)
        return Limits(
            memory=content.memory * MIB if "memory" in enforced else None,
            cpus=float(content.cpus) if "cpus" in enforced else None,
            disk=self.disk,
        )

    def check_timeout(self, timeout: float) -> float:
        if timeout > self.hours * 3600:
            raise ApiError(400, f"Timeout cannot be greater than {self.hours} hours")
        return timeout

    def running(self) -> list[Machine]:
        return [machine for machine in self.machines.values() if machine.state == "running"]

    def get(self, sandbox: str) -> Machine:
        machine = self.machines.get(sandbox)
        if machine is None or machine.state == "ended":
            raise ApiError(404, f"Sandbox '{sandbox}' not found")
        return machine

    async def create(self, request: Mapping[str, Any], content: Content, base: str, key: str | None) -> Machine:
        """A new machine; for a ``key`` of idempotency seen before, the one it made."""
        if key is None or key not in self._starting:
            starting = asyncio.ensure_future(self._create(request, content, base))
            if key is not None:
                self._starting[key] = starting
        else:
            starting = self._starting[key]
        try:
            return await asyncio.shield(starting)
        except ApiError:
            if key is not None:
                self._starting.pop(key, None)
            raise

    async def _create(self, request: Mapping[str, Any], content: Content, base: str) -> Machine:
        timeout = self.check_timeout(request.get("timeout", 300))
        if len(self.running()) >= self.quota:
            raise ApiError(
                429,
                f"you have reached the maximum number of concurrent E2B sandboxes ({self.quota}). If you need more, "
                "please contact support",
            )
        machine = Machine(self, request, content, base)
        self.machines[machine.id] = machine
        try:
            await machine.boot(content.files, timeout)
        except BaseException:
            machine.state = "ended"
            raise
        return machine

    async def close(self) -> None:
        with contextlib.suppress(SandboxError):
            await asyncio.gather(*(machine.end() for machine in self.machines.values()))
        await self.provider.close()
        self.wires.close()


def reached(request: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The ranges of addresses that a machine reaches, and those among them that it does not. What is allowed goes
    before what is denied; names are known and not resolved."""
    network = request.get("network") or {}
    allowed = [host for host in network.get("allowOut") or () if host[0].isdigit()]
    denied = list(network.get("denyOut") or ())
    if EVERYTHING in denied or request.get("allow_internet_access") is False:
        return allowed, []
    return [EVERYTHING], denied


def stamp(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
