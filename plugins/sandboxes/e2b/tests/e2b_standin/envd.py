"""What runs inside each of E2B's machines, envd: processes and a watched directory over its RPC, health."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.filesystem import filesystem_connect, filesystem_pb
from e2b.envd.process import process_connect, process_pb
from protobuf import Oneof
from rl_harness.errors import SandboxError

from e2b_standin.faults import App, Cut, Receive, Scope, Send, answer, hang_up
from e2b_standin.machines import ApiError, Command, Fleet, Machine

KEEPALIVE_SECONDS = 50.0
STREAMS = ("/process.Process/Start", "/process.Process/Connect", "/filesystem.Filesystem/WatchDir")


def machine_of(fleet: Fleet, ctx: Any) -> Machine:
    machine: Machine = fleet.get(ctx.request_headers["e2b-sandbox-id"])
    kind, _, value = ctx.request_headers.get("authorization", "").partition(" ")
    user = base64.b64decode(value).decode().rstrip(":") if kind == "Basic" else "user"
    if user != "root":
        raise ConnectError(Code.UNAUTHENTICATED, f"invalid username: '{user}'")
    return machine


def event(kind: str, value: Any) -> Any:
    return process_pb.ProcessEvent(event=Oneof(kind, value))  # type: ignore[arg-type]


class Processes(process_connect.Process):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def _command(self, machine: Machine, selector: Any) -> Command:
        pid = selector.selector.value
        found = machine.command(pid)
        if found is None:
            raise ConnectError(Code.NOT_FOUND, f"process with pid {pid} not found")
        return found

    async def start(self, request: Any, ctx: Any) -> AsyncIterator[Any]:
        machine = machine_of(self._fleet, ctx)
        config = request.process
        try:
            command = await machine.start(config.cmd, list(config.args), config.cwd, dict(config.envs))
        except SandboxError as error:
            raise ConnectError(Code.INVALID_ARGUMENT, str(error)) from None
        with command.listening() as queue:
            command.begin()
            async for item in self._events(command, queue):
                yield process_pb.StartResponse(event=item)

    async def connect(self, request: Any, ctx: Any) -> AsyncIterator[Any]:
        command = self._command(machine_of(self._fleet, ctx), request.process)
        with command.listening() as queue:
            async for item in self._events(command, queue):
                yield process_pb.ConnectResponse(event=item)

    async def _events(self, command: Command, queue: asyncio.Queue[Any]) -> AsyncIterator[Any]:
        yield event("start", process_pb.ProcessEvent.StartEvent(pid=command.pid))
        ended = command.end is not None and queue.empty()
        while not ended:
            try:
                async with asyncio.timeout(KEEPALIVE_SECONDS):
                    kind, value = await queue.get()
            except TimeoutError:
                yield event("keepalive", process_pb.ProcessEvent.KeepAlive())
                continue
            ended = kind == "end"
            if not ended:
                yield event("data", process_pb.ProcessEvent.DataEvent(output=Oneof(kind, value)))
        assert command.end is not None
        yield event("end", process_pb.ProcessEvent.EndEvent(**command.end))

    async def send_input(self, request: Any, ctx: Any) -> Any:
        command = self._command(machine_of(self._fleet, ctx), request.process)
        if command.end is not None:
            raise ConnectError(Code.NOT_FOUND, f"process with pid {command.pid} not found")
        try:
            await command.write(request.input.input.value)
        except (SandboxError, OSError) as error:
            raise ConnectError(Code.INTERNAL, f"error writing to stdin: {error}") from None
        return process_pb.SendInputResponse()

    async def close_stdin(self, request: Any, ctx: Any) -> Any:
        command = self._command(machine_of(self._fleet, ctx), request.process)
        await command.close_stdin()
        return process_pb.CloseStdinResponse()

    async def send_signal(self, request: Any, ctx: Any) -> Any:
        machine = machine_of(self._fleet, ctx)
        command = self._command(machine, request.process)
        assert machine.box is not None
        await machine.box.exec(["kill", f"-{request.signal.value}", str(command.pid)])
        if command.end is None:
            command.killed()
        return process_pb.SendSignalResponse()


class Files(filesystem_connect.Filesystem):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def watch_dir(self, request: Any, ctx: Any) -> AsyncIterator[Any]:
        machine_of(self._fleet, ctx)
        start = filesystem_pb.WatchDirResponse.StartEvent()
        yield filesystem_pb.WatchDirResponse(event=Oneof("start", start))
        while True:
            await asyncio.sleep(KEEPALIVE_SECONDS)
            alive = filesystem_pb.WatchDirResponse.KeepAlive()
            yield filesystem_pb.WatchDirResponse(event=Oneof("keepalive", alive))


class Edge:
    """The proxy in front of the machines: finds the one that is asked, and breaks off when that one stands still."""

    def __init__(self, fleet: Fleet, app: App) -> None:
        self._fleet = fleet
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode().lower(): value.decode() for name, value in scope["headers"]}
        try:
            machine = self._fleet.get(headers.get("e2b-sandbox-id", ""))
        except ApiError:
            machine = None
        if machine is None or machine.state != "running":
            await answer(send, 502, "The sandbox was not found")
            return
        if headers.get("x-access-token") != machine.token:
            await answer(send, 401, "invalid access token")
            return
        if scope["path"] == "/health":
            await answer(send, 200, "")
            return
        await self._until_cut(machine, scope, receive, send)

    async def _until_cut(self, machine: Machine, scope: Scope, receive: Receive, send: Send) -> None:
        """What asks for a stream is heard in full first, so that its going away is noticed."""
        cut = asyncio.create_task(machine.cut.wait())
        gone = asyncio.create_task(asyncio.Event().wait())
        if scope["path"] in STREAMS:
            body = b""
            more = True
            while more:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
            gone.cancel()
            gone = asyncio.create_task(_disconnected(receive))
            receive = _replayed(body)
        serving = asyncio.create_task(self._app(scope, receive, send))  # type: ignore[arg-type]
        try:
            await asyncio.wait({serving, cut, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                hang_up(send)
                raise Cut
            serving.result()
        finally:
            for task in (serving, cut, gone):
                task.cancel()
            await asyncio.gather(serving, cut, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> bool:
    while True:
        if (await receive())["type"] == "http.disconnect":
            return True


def _replayed(body: bytes) -> Receive:
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    return receive
