"""Files of a machine through envd's own interface, which needs none of the machine's programs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from connectrpc.errors import ConnectError
from e2b import AsyncSandbox, NotEnoughSpaceException, NotFoundException
from e2b.envd.filesystem import filesystem_pb
from e2b.envd.rpc import handle_rpc_exception
from e2b.envd.utils import authentication_header
from rl_harness.errors import SandboxError, UnsafeFiles
from rl_harness.sandboxes.remote import Entry

from rl_harness_e2b.service import FAILURES, Gone, failure, words

T = TypeVar("T")

_REQUEST_SECONDS = 30.0
_KINDS = {
    filesystem_pb.FileType.FILE: "file",
    filesystem_pb.FileType.DIRECTORY: "directory",
    filesystem_pb.FileType.SYMLINK: "link",
}


class E2BFiles:
    """See :class:`rl_harness.sandboxes.remote.FileService`. ``explained`` makes of an error that of a machine which is
    gone, if it is."""

    def __init__(
        self, rpc: Any, handle: AsyncSandbox, explained: Callable[[SandboxError], Awaitable[SandboxError]]
    ) -> None:
        self._rpc = rpc
        self._handle = handle
        self._explained = explained
        self._options: dict[str, Any] = {
            "headers": authentication_header(handle._envd_version, "root"),
            "timeout_ms": round(1000 * _REQUEST_SECONDS),
        }

    async def _asked(self, path: str, call: Awaitable[T]) -> T:
        try:
            return await call
        except FAILURES as error:
            raise await self._failed(path, error) from None

    async def _failed(self, path: str, error: BaseException) -> Exception:
        if isinstance(error, ConnectError):
            error = handle_rpc_exception(error)
        if isinstance(error, NotEnoughSpaceException):
            return UnsafeFiles(f"{path}: {words(error)}", full=True)
        if not isinstance(error, NotFoundException):
            return await self._explained(failure(f"the file {path}", error))
        explained = await self._explained(SandboxError(f"{path}: no such file"))
        return explained if isinstance(explained, Gone) else FileNotFoundError(explained.message)

    async def stat(self, path: str) -> Entry:
        answer = await self._asked(path, self._rpc.stat(filesystem_pb.StatRequest(path=path), **self._options))
        return _entry(answer.entry or filesystem_pb.EntryInfo())

    async def entries(self, path: str) -> Sequence[Entry]:
        request = filesystem_pb.ListDirRequest(path=path, depth=1)
        answer = await self._asked(path, self._rpc.list_dir(request, **self._options))
        return [_entry(entry) for entry in answer.entries]

    async def content(self, path: str) -> AsyncGenerator[bytes]:
        stream = await self._asked(path, self._handle.files.read(path, format="stream", user="root"))
        try:
            async for chunk in stream:
                yield chunk
        except FAILURES as error:
            raise await self._failed(path, error) from None
        finally:
            await stream.aclose()

    async def write(self, path: str, data: bytes) -> None:
        """Over what is there, whose mode stays."""
        writing = self._handle.files.write(
            path, data, user="root", use_octet_stream=True, request_timeout=_REQUEST_SECONDS
        )
        await self._asked(path, writing)


def _entry(entry: filesystem_pb.EntryInfo) -> Entry:
    # Later versions of envd tell the kind of what a link leads to, and that it is a link beside that.
    kind = "link" if entry.is_symlink else _KINDS.get(entry.type, "other")
    return Entry(name=entry.name, kind=kind, size=entry.size, mode=entry.mode, target=entry.symlink_target)
