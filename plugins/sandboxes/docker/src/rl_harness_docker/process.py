"""A command in a container: an exec instance of the engine with its streams."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from rl_harness.contracts.sandbox import Process
from rl_harness.errors import SandboxError

from rl_harness_docker.engine import Connection, Engine, EngineError
from rl_harness_docker.watch import ASK_EVERY, Watch

_STREAMS = {1: "stdout", 2: "stderr"}
_HEADER = struct.Struct(">BxxxL")
_CHUNK = 1 << 18
#: How long after the end of its streams the news of a command's end may take before the engine is asked.
_NEWS = 0.05


class DockerProcess(Process):
    """See :class:`rl_harness.contracts.Process`. The engine kills no command of its own: ``kill`` lets go of it, and
    the sandbox sees to its processes."""

    def __init__(self, engine: Engine, watch: Watch, identity: str, connection: Connection) -> None:
        self._engine = engine
        self._watch = watch
        self._identity = identity
        self._connection = connection
        self._exit: asyncio.Future[Any] = watch.command(identity)
        self._ended = asyncio.Event()
        self._code: int | None = None

    @classmethod
    async def start(
        cls,
        engine: Engine,
        watch: Watch,
        container: str,
        argv: Sequence[str],
        *,
        cwd: str | None,
        env: Mapping[str, str],
        user: str,
    ) -> DockerProcess:
        watch.start()
        body = {
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "Cmd": [*argv],
            "Env": [f"{key}={value}" for key, value in env.items()],
            "User": user,
            "WorkingDir": cwd or "",
        }
        made = await engine.request("POST", f"/containers/{container}/exec", body=body)
        connection = await engine.hijack(f"/exec/{made['Id']}/start", body={"Detach": False, "Tty": False})
        return cls(engine, watch, made["Id"], connection)

    async def output(self) -> AsyncIterator[tuple[str, bytes]]:
        reader = self._connection.reader
        first = True
        try:
            while True:
                header = await reader.readexactly(_HEADER.size)
                kind, left = _HEADER.unpack(header)
                stream = _STREAMS.get(kind, "stderr")
                while left:
                    chunk = await reader.read(min(left, _CHUNK))
                    if not chunk:
                        return
                    left -= len(chunk)
                    # So the engine says that it could not start the command; but others end their lines so, too.
                    if first and stream == "stdout" and not left and chunk.endswith(b"\r\n"):
                        stream = "stderr" if await self._never_started() else stream
                    first = False
                    yield stream, chunk
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._ended.set()
            self._connection.discard()  # of a background process, which must not be held up

    async def _never_started(self) -> bool:
        state = await self._state()
        return not state.get("Running") and not state.get("Pid")

    async def _state(self) -> dict:  # type: ignore[type-arg]  # JSON
        try:
            state = await self._engine.request("GET", f"/exec/{self._identity}/json")
        except EngineError as error:
            if error.status == 404:
                return {"Running": False, "ExitCode": None}
            raise
        return dict(state)

    async def write(self, data: bytes) -> None:
        try:
            await self._connection.write(data)
        except OSError as error:
            raise SandboxError(f"the command's input is closed: {error}") from None

    async def close_stdin(self) -> None:
        self._connection.write_eof()

    async def wait(self) -> int:
        while self._code is None:
            ended: asyncio.Future[Any] = asyncio.ensure_future(self._ended.wait())
            try:
                await asyncio.wait({self._exit, ended}, timeout=ASK_EVERY, return_when=asyncio.FIRST_COMPLETED)
                if not self._exit.done() and ended.done():
                    await asyncio.wait({self._exit}, timeout=_NEWS)
            finally:
                ended.cancel()
            if self._exit.done():
                self._code = self._exit.result()
                break
            state = await self._state()
            if not state.get("Running"):
                code = state.get("ExitCode")
                self._code = 137 if code is None else int(code)  # the container went, and with it the record
        self._watch.forget(self._identity)
        return self._code

    def unblock(self) -> None:
        """Throw away what is still to come of the output, if it is not read: the engine would wait for that before it
        ends the container."""
        self._connection.unblock()

    async def kill(self) -> None:
        self._connection.close()
        self._ended.set()
