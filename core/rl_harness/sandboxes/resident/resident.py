"""A helper kept running in a sandbox: started, started again when it is lost, and asked for relays and commands.

It is for the agent's own use. A helper is among the agent's processes, so whatever it says may be the agent's
invention: verifiers, snapshots and kills go to the sandbox itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from rl_harness.contracts.sandbox import DEFAULT_OUTPUT_LIMIT, Command, ExecResult, Process, Sandbox
from rl_harness.errors import SandboxError
from rl_harness.sandboxes.processes import exit_code
from rl_harness.sandboxes.resident import helper as wire
from rl_harness.sandboxes.resident.commands import Collected, HelperProcess, Running, request
from rl_harness.sandboxes.resident.link import HelperUnavailable, Link
from rl_harness.sandboxes.resident.relay import Connect, Relay

log = logging.getLogger("rl_harness.sandboxes.resident")

#: A lost helper is started again this often, with pauses that double; one that lasted restores the budget.
RESTARTS = 12
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 5.0
LASTED_SECONDS = 60.0
#: What a command waits for a helper that is being started again before it takes the provider's own way.
COMMAND_WAIT = 10.0
#: What a helper has to kill a command, before the sandbox is asked to kill everything.
KILL_SECONDS = 15.0
_PROBE_SECONDS = 30.0
_KILLED = "every process was killed"


class Resident:
    """A helper in ``sandbox``. Made by :meth:`start`; closing it leaves the sandbox as it is."""

    def __init__(self, sandbox: Sandbox, *, commands: bool) -> None:
        self.sandbox = sandbox
        self._commands = commands
        self._link: Link | None = None
        self._changed = asyncio.Event()
        self._starting = asyncio.Lock()
        self._relays: list[Relay] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._supervisor: asyncio.Task[None] | None = None
        #: Why there will be no helper any more, once that is so.
        self.failed: str | None = None
        self.restarts = 0

    @classmethod
    async def start(cls, sandbox: Sandbox, *, commands: bool = True) -> Resident:
        """Start a helper; ``commands`` False for relays alone. Raises ``HelperUnavailable`` (a ``SandboxError``)
        where the sandbox has nothing to run one, with the remedy."""
        resident = cls(sandbox, commands=commands)
        resident._link = await Link.start(sandbox, commands=commands, opened=resident._opened)
        resident._supervisor = asyncio.create_task(resident._supervise())
        return resident

    async def relay(self, connect: Connect) -> Relay:
        """A loopback port in the sandbox whose connections ``connect`` answers, through every later helper too."""
        relay = Relay(connect)
        self._relays.append(relay)
        link = await self._current(COMMAND_WAIT)
        if link is None:
            raise HelperUnavailable(f"sandbox {self.sandbox.id}: {self.failed or 'the helper is not back yet'}")
        try:
            relay.port = await link.listen(self._relays.index(relay), relay.port)
        except OSError as error:
            raise HelperUnavailable(f"sandbox {self.sandbox.id}: {error}") from None
        return relay

    def _opened(self, link: Link, stream: int, number: int) -> None:
        if number < len(self._relays):
            self._relays[number].accept(link, stream)
        else:
            link.send(wire.RESET, stream)

    # Keeping it alive

    async def _current(self, seconds: float) -> Link | None:
        """The running helper, waited for while it is started again; None when there is none in time."""
        deadline = time.monotonic() + seconds
        while self._link is None or self._link.ended.done():
            left = deadline - time.monotonic()
            if self._closed or self.failed is not None or left <= 0:
                return None
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()
        return self._link

    async def _supervise(self) -> None:
        budget = RESTARTS
        while self._link is not None:
            started = time.monotonic()
            reason = await asyncio.shield(self._link.ended)
            await self._link.close()
            if reason == _KILLED or time.monotonic() - started > LASTED_SECONDS:
                budget = RESTARTS
            log.debug("sandbox %s: the helper is lost: %s", self.sandbox.id, reason)
            self._link = None
            while self._link is None and budget:
                if reason != _KILLED:
                    await asyncio.sleep(min(FIRST_PAUSE * 2 ** (RESTARTS - budget), LONGEST_PAUSE))
                budget -= 1
                async with self._starting:
                    reason = await self._restart() or reason
                if not await self._sandbox_alive():
                    budget = 0
            if self._link is None:
                self.failed = f"the helper is lost for good: {reason}"
            self._changed.set()

    async def _restart(self) -> str | None:
        """Start another helper on the same ports; why not, or None."""
        link = None
        try:
            link = await Link.start(self.sandbox, commands=self._commands, opened=self._opened)
            for number, relay in enumerate(self._relays):
                if relay.port:
                    await link.listen(number, relay.port)
        except (SandboxError, OSError) as error:
            if link is not None:
                await link.close()
            return str(error)
        self._link = link
        self.restarts += 1
        return None

    async def _sandbox_alive(self) -> bool:
        try:
            return await self.sandbox.alive()
        except SandboxError:
            return False

    # Commands

    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes = b"",
        timeout: float | None = None,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
    ) -> ExecResult:
        """See :meth:`Sandbox.exec`. A command whose helper is lost under it has exit code 137 and says so."""
        started = time.perf_counter()
        link = await self._for_command(user)
        if link is None:
            return await self.sandbox.exec(
                command, cwd=cwd, env=env, user=user, stdin=stdin, timeout=timeout, output_limit=output_limit
            )
        payload = request(command, cwd=self._native(cwd), env=env, user=user, limit=output_limit, stdin=bool(stdin))
        running = Collected(link, payload, output_limit)
        feeding = asyncio.create_task(running.feed(stdin)) if stdin else None
        timed_out = False
        try:
            try:
                async with asyncio.timeout(timeout):
                    await asyncio.shield(running.ended)
            except TimeoutError:
                timed_out = True
                await self._stop(running)
        except asyncio.CancelledError:
            running.ask_to_kill()
            self._in_background(self._stop(running))
            raise
        finally:
            if feeding is not None:
                feeding.cancel()
        ended = running.ended.result()
        stdout, stderr = running.output()
        if ended.lost:
            await self._confirm_alive()
            stderr += f"rl-harness: the end of this command is not known: {ended.lost}\n".encode()
        return ExecResult(
            exit_code=exit_code(ended.returncode),
            stdout=stdout,
            stderr=stderr,
            signal=-ended.returncode if ended.returncode < 0 else None,
            timed_out=timed_out,
            stdout_truncated=ended.stdout_truncated,
            stderr_truncated=ended.stderr_truncated,
            seconds=time.perf_counter() - started,
        )

    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Process:
        """See :meth:`Sandbox.spawn`."""
        link = await self._for_command(user)
        if link is None:
            return await self.sandbox.spawn(command, cwd=cwd, env=env, user=user)
        payload = request(command, cwd=self._native(cwd), env=env, user=user, limit=None, stdin=True)
        return HelperProcess(link, payload, self._stop)

    def _native(self, path: str | None) -> str | None:
        return path and self.sandbox.native_path(path)

    async def _for_command(self, user: str | None) -> Link | None:
        """The helper, unless the provider itself must run the command."""
        if self._closed:
            return None
        link = await self._current(COMMAND_WAIT)
        if link is None or not link.commands or (user is not None and link.uid != 0):
            return None
        return link

    async def _stop(self, running: Running) -> None:
        """Have a command killed with its descendants. A helper that does not see to it loses everything."""
        running.ask_to_kill()
        try:
            async with asyncio.timeout(KILL_SECONDS):
                await asyncio.shield(running.gone)
        except TimeoutError:
            await self.kill_processes()

    async def kill_processes(self) -> None:
        """Have the sandbox itself kill every process. The helper is among them; another follows."""
        async with self._starting:
            if self._link is not None:
                await self._link.close(_KILLED)
            await self.sandbox.kill_processes()

    async def _confirm_alive(self) -> None:
        """Raises ``SandboxError`` when not only the helper but the sandbox is gone."""
        await self.sandbox.exec(["true"], timeout=_PROBE_SECONDS)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End the helper and its connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._changed.set()
        for task in (*self._tasks, *([self._supervisor] if self._supervisor else [])):
            task.cancel()
        for relay in self._relays:
            relay.close()
        if self._link is not None:
            await self._link.close()


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    with contextlib.suppress(SandboxError):
        await work
