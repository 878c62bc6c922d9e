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
from rl_harness.sandboxes.resident.relay import Relay, Target

log = logging.getLogger("rl_harness.sandboxes.resident")

#: A lost helper is started again this often, with pauses that double; one that lasted restores the budget.
RESTARTS = 12
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 5.0
LASTED_SECONDS = 60.0
#: What a command waits for a helper that is being started, before it takes the provider's own way.
COMMAND_WAIT = 10.0
#: What a new relay waits for a helper that is being started.
RELAY_WAIT = 30.0
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
        self._error: SandboxError | None = None
        self._budget = RESTARTS
        self._pause = True
        #: How often a helper was started after the first.
        self.restarts = 0

    @classmethod
    async def start(cls, sandbox: Sandbox, *, commands: bool = True, wait: bool = True) -> Resident:
        """Start a helper; ``commands`` False for relays alone.

        Raises ``HelperUnavailable`` (a ``SandboxError``) where the sandbox has nothing to run one, with the remedy.
        Without ``wait`` it comes up meanwhile, and if it cannot, commands take the provider's own way.
        """
        resident = cls(sandbox, commands=commands)
        resident._in_background(resident._supervise())
        if wait:
            try:
                await resident._current(None)
            except BaseException:
                await resident.close()
                raise
        return resident

    @property
    def failed(self) -> str | None:
        """Why there will be no helper any more; None while there may be one."""
        return self._error.message if self._error is not None else None

    async def relay(self, target: Target, port: int = 0) -> Relay:
        """A loopback port in the sandbox (``port``, or any that is free) whose connections ``target`` answers, through
        every later helper too."""
        link = await self._current(RELAY_WAIT)
        relay = Relay(target)
        self._relays.append(relay)
        try:
            relay.port = await link.listen(self._relays.index(relay), port)
        except OSError as error:
            raise HelperUnavailable(f"sandbox {self.sandbox.id}: {error}") from None
        return relay

    def _opened(self, link: Link, stream: int, number: int) -> None:
        if number < len(self._relays):
            self._relays[number].accept(link, stream)
        else:
            link.send(wire.RESET, stream)

    # Keeping it alive

    def _running(self) -> Link | None:
        link = self._link
        return None if link is None or link.ended.done() or self._closed else link

    async def _current(self, seconds: float | None) -> Link:
        """The running helper, waited for while it is started. Raises ``HelperUnavailable`` when none will come."""
        try:
            async with asyncio.timeout(seconds):
                while (link := self._running()) is None:
                    if self._error is not None:
                        raise self._error
                    if self._closed:
                        raise HelperUnavailable(f"sandbox {self.sandbox.id}: the helper is closed")
                    self._changed.clear()
                    await self._changed.wait()
                return link
        except TimeoutError:
            raise HelperUnavailable(f"sandbox {self.sandbox.id}: the helper is not back after {seconds:g} s") from None

    async def _supervise(self) -> None:
        try:
            self._link = await self._launch()
            self._changed.set()
            while True:
                await self._watch(self._link)
                self._link = await self._launch_again()
                self.restarts += 1
                self._changed.set()
        except SandboxError as error:
            log.debug("sandbox %s: %s", self.sandbox.id, error)
            self._give_up(error)
        except Exception as error:  # a provider's mistake, or a machine without descriptors: nobody may wait for ever
            log.exception("the helper in sandbox %s", self.sandbox.id)
            what = f"{type(error).__name__}: {error}"
            self._give_up(HelperUnavailable(f"sandbox {self.sandbox.id}: the helper cannot be kept running: {what}"))

    def _give_up(self, error: SandboxError) -> None:
        self._error = error
        self._changed.set()

    async def _launch(self) -> Link:
        """Start a helper that listens on the relays' ports."""
        async with self._starting:
            link = await Link.start(self.sandbox, commands=self._commands, opened=self._opened)
            try:
                for number, relay in enumerate(self._relays):
                    if relay.port:
                        await link.listen(number, relay.port)
            except BaseException:
                await link.close()
                raise
            return link

    async def _watch(self, link: Link) -> None:
        """Return when it is lost; renews the budget if it lasted, or if it was we who ended it."""
        started = time.monotonic()
        reason = await asyncio.shield(link.ended)
        await link.close()
        log.debug("sandbox %s: the helper is lost: %s", self.sandbox.id, reason)
        if reason == _KILLED or time.monotonic() - started > LASTED_SECONDS:
            self._budget = RESTARTS
        self._pause = reason != _KILLED

    async def _launch_again(self) -> Link:
        """Raises ``HelperUnavailable`` once the budget is spent or the sandbox is dead."""
        error: Exception = HelperUnavailable(f"sandbox {self.sandbox.id}: the helper ended too often")
        while self._budget and await self._sandbox_alive():
            if self._pause:
                await asyncio.sleep(min(FIRST_PAUSE * 2 ** (RESTARTS - self._budget), LONGEST_PAUSE))
            self._pause = True
            self._budget -= 1
            try:
                return await self._launch()
            except Exception as failure:
                error = failure
        raise HelperUnavailable(f"sandbox {self.sandbox.id}: the helper is lost for good: {error}")

    async def _sandbox_alive(self) -> bool:
        try:
            return await self.sandbox.alive()
        except Exception as error:
            log.debug("sandbox %s: %s", self.sandbox.id, error)
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
        """The helper; None when the provider itself must run the command, which is slower but never wrong. One that
        is being started is waited for: that takes less than a few commands of the provider's."""
        try:
            link = await self._current(COMMAND_WAIT)
        except SandboxError:
            return None
        if not link.commands or (user is not None and link.uid != 0):
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
                self._link.end(_KILLED)
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
        self._closed = True
        self._changed.set()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for relay in self._relays:
            relay.close()
        if self._link is not None:
            await self._link.close()


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    with contextlib.suppress(SandboxError):
        await work
