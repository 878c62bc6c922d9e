"""What runs inside each of E2B's machines, envd: processes, files and a watched directory over its RPC, health."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import posixpath
from collections.abc import AsyncIterator, Iterator
from typing import Any

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.filesystem import filesystem_connect, filesystem_pb
from e2b.envd.process import process_connect, process_pb
from protobuf import Oneof
from rl_harness.errors import SandboxError, UnsafeFiles
from rl_harness.sandboxes.remote import Entry
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

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


KINDS = {"file": filesystem_pb.FileType.FILE, "directory": filesystem_pb.FileType.DIRECTORY}


class Files(filesystem_connect.Filesystem):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def stat(self, request: Any, ctx: Any) -> Any:
        files = machine_of(self._fleet, ctx).files()
        with answered(request.path):
            return filesystem_pb.StatResponse(entry=told(request.path, await files.stat(request.path)))

    async def list_dir(self, request: Any, ctx: Any) -> Any:
        files = machine_of(self._fleet, ctx).files()
        with answered(request.path):
            found = await files.entries(request.path)
        entries = [told(f"{request.path.rstrip('/')}/{entry.name}", entry) for entry in found]
        return filesystem_pb.ListDirResponse(entries=entries)

    async def watch_dir(self, request: Any, ctx: Any) -> AsyncIterator[Any]:
        machine_of(self._fleet, ctx)
        start = filesystem_pb.WatchDirResponse.StartEvent()
        yield filesystem_pb.WatchDirResponse(event=Oneof("start", start))
        while True:
            await asyncio.sleep(KEEPALIVE_SECONDS)
            alive = filesystem_pb.WatchDirResponse.KeepAlive()
            yield filesystem_pb.WatchDirResponse(event=Oneof("keepalive", alive))


@contextlib.contextmanager
def answered(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise ConnectError(Code.NOT_FOUND, f"path not found: {path}") from None
    except NotADirectoryError:
        raise ConnectError(Code.INVALID_ARGUMENT, f"path is not a directory: {path}") from None


def told(path: str, entry: Entry) -> Any:
    """As envd does: of a link, where it leads in the end."""
    fields: dict[str, Any] = {"name": entry.name, "path": path, "size": entry.size, "mode": entry.mode}
    if entry.kind == "link":
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), entry.target))
        return filesystem_pb.EntryInfo(**fields, is_symlink=True, symlink_target=target)
    return filesystem_pb.EntryInfo(**fields, type=KINDS.get(entry.kind, filesystem_pb.FileType.UNSPECIFIED))


async def content(machine: Machine, scope: Scope, receive: Receive, send: Send) -> None:
    """One file's bytes in or out, in one request. A file that is there keeps its mode."""
    request = Request(scope, receive)
    path = request.query_params["path"]
    if request.query_params.get("username") != "root":
        await answer(send, 401, "no such user")
        return
    try:
        if request.method == "GET":
            data = b"".join([chunk async for chunk in machine.files().content(path)])
            await Response(data)(scope, receive, send)
            return
        await machine.files().write(path, await request.body())
        written = [{"path": path, "name": posixpath.basename(path), "type": "file"}]
        await JSONResponse(written)(scope, receive, send)
    except FileNotFoundError:
        await answer(send, 404, f"path '{path}' does not exist")
    except UnsafeFiles as error:
        await answer(send, 507 if error.full else 500, str(error))


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
        if scope["path"] == "/files":
            await content(machine, scope, receive, send)
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
