"""A sandbox without a network whose commands find a proxy of the host at a port of its own loopback."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path

from rl_harness.contracts.sandbox import DEFAULT_OUTPUT_LIMIT, Command, ExecResult, Process, Sandbox
from rl_harness.errors import SandboxError
from rl_harness.sandboxes.allowlist.hosts import AllowedHosts
from rl_harness.sandboxes.allowlist.proxy import Dialer, Proxy
from rl_harness.sandboxes.flights import finished
from rl_harness.sandboxes.resident import HelperUnavailable, Resident

log = logging.getLogger("rl_harness.sandboxes.allowlist")

#: Where the proxy is inside; above the ports that systems give to clients.
PORT = 62128
#: Never by way of the proxy: what is inside, the way to the model included.
_INSIDE = ("localhost", "127.0.0.1", "::1")
#: What a command waits for a helper that is being started; it may be the agent's doing that none comes.
HELPER_WAIT = 8.0


def proxy_variables(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` with the variables by which programs find a proxy; what it says itself stays."""
    found: dict[str, str] = {}
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        found[name] = found[name.lower()] = f"http://127.0.0.1:{PORT}"
    found["NODE_USE_ENV_PROXY"] = "1"
    more = ",".join(env.get(name, "") for name in ("NO_PROXY", "no_proxy")).split(",")
    bypass = ",".join(dict.fromkeys([*_INSIDE, *(host.strip() for host in more if host.strip())]))
    return {**found, **env, "NO_PROXY": bypass, "no_proxy": bypass}


class AllowListSandbox(Sandbox):
    """``inner``, which has no network, with a way to ``hosts``: a helper inside that is started again when it is lost,
    and after a kill for the next command."""

    def __init__(self, inner: Sandbox, hosts: AllowedHosts, dialer: Dialer) -> None:
        self.id = inner.id
        self.inner = inner
        self._hosts = hosts
        self._dialer = dialer
        self._proxy = Proxy(hosts, dialer)
        self._starting: asyncio.Task[Resident] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Wait for the way out. Raises ``HelperUnavailable`` where there is nothing to make it of."""
        await asyncio.shield(self._way_out())

    def _way_out(self) -> asyncio.Task[Resident]:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(_retrieved)
        return self._starting

    async def _start(self) -> Resident:
        resident = await Resident.start(self.inner, commands=False)
        try:
            await resident.relay(self._proxy.target, port=PORT)
        except BaseException:
            await resident.close()
            raise
        return resident

    async def _stop(self) -> None:
        starting, self._starting = self._starting, None
        if starting is None:
            return
        starting.cancel()
        await asyncio.wait([starting])
        if not starting.cancelled() and starting.exception() is None:
            await starting.result().close()

    async def _before_command(self) -> None:
        """A command that finds no way out runs nevertheless: an agent that takes away what makes it has taken its own
        network, and must not escape its grade by that."""
        if self._closing is not None:
            return
        way_out = self._way_out()
        if not way_out.done():
            await asyncio.wait([way_out], timeout=HELPER_WAIT)

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
        await self._before_command()
        return await self.inner.exec(
            command, cwd=cwd, env=env, user=user, stdin=stdin, timeout=timeout, output_limit=output_limit
        )

    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Process:
        await self._before_command()
        return await self.inner.spawn(command, cwd=cwd, env=env, user=user)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self.inner.write_file(path, data, mode=mode)

    async def read_file(self, path: str, *, limit: int | None = None) -> bytes:
        return await self.inner.read_file(path, limit=limit)

    async def upload(self, source: Path, target: str) -> None:
        await self.inner.upload(source, target)

    async def download(
        self, source: str, target: Path, *, limit: int | None = None, skip_unsafe: bool = False
    ) -> list[str]:
        return await self.inner.download(source, target, limit=limit, skip_unsafe=skip_unsafe)

    async def kill_processes(self) -> None:
        """The helper is among them, and stays dead until the next command: nothing runs meanwhile."""
        await finished(self._stop())
        await self.inner.kill_processes()

    def native_path(self, path: str) -> str:
        return self.inner.native_path(path)

    async def changes(self) -> list[str]:
        return await self.inner.changes()

    async def snapshot(self, *, key: str = "", labels: Mapping[str, str] | None = None) -> str:
        return await self.inner.snapshot(key=key, labels=labels)

    async def fork(self, count: int) -> list[Sandbox]:
        """Each has a way of its own to the same hosts."""
        return [AllowListSandbox(fork, self._hosts, self._dialer) for fork in await self.inner.fork(count)]

    async def pause(self) -> None:
        await self.inner.pause()

    async def resume(self) -> None:
        await self.inner.resume()
        if self._starting is not None and self._starting.done() and _of_no_use(self._starting):
            await finished(self._stop())

    async def died(self) -> str:
        return await self.inner.died()

    async def alive(self) -> bool:
        return await self.inner.alive()

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        # Side by side: the helper of a sandbox that stands still cannot be told to end.
        ending = asyncio.create_task(self._end())
        try:
            await self.inner.close()
        finally:
            await finished(ending)

    async def _end(self) -> None:
        with contextlib.suppress(SandboxError):
            await self._stop()
        await self._proxy.close()


def _of_no_use(way_out: asyncio.Task[Resident]) -> bool:
    return way_out.cancelled() or way_out.exception() is not None or way_out.result().failed is not None


def _retrieved(way_out: asyncio.Task[Resident]) -> None:
    if not way_out.cancelled() and (error := way_out.exception()) is not None:
        level = logging.DEBUG if isinstance(error, HelperUnavailable | SandboxError) else logging.ERROR
        log.log(level, "there is no way to the allowed hosts: %s", error, exc_info=level == logging.ERROR)
