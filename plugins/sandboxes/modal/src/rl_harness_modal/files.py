"""Files of a machine through Modal's own interface: a program of Modal's that is mounted there does it, so that none of
the image's is needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import modal
from modal import exception
from modal.types import FileInfo
from rl_harness.errors import SandboxError, UnsafeFiles
from rl_harness.sandboxes.remote import Entry, no_room

from rl_harness_modal.service import FAILURES

_REQUEST_SECONDS = 30.0
#: The SDK holds a whole file in memory.
_LARGEST = 256 << 20


class ModalFiles:
    """See :class:`rl_harness.sandboxes.remote.FileService`. ``patiently`` repeats what Modal refuses for now;
    ``failed`` makes the error to raise of one of the SDK's."""

    def __init__(
        self,
        handle: modal.Sandbox,
        patiently: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]],
        failed: Callable[[str, BaseException], Awaitable[SandboxError]],
    ) -> None:
        self._handle = handle
        self._patiently = patiently
        self._failed = failed

    async def _asked(self, path: str, operation: Callable[[], Awaitable[Any]]) -> Any:
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):  # the SDK waits for ever for a program that does not end
                return await self._patiently(operation)
        except exception.SandboxFilesystemNotFoundError:
            raise FileNotFoundError(f"{path}: no such file") from None
        except exception.SandboxFilesystemError as error:
            if no_room(str(error)):
                raise UnsafeFiles(f"{path}: {error}", full=True) from None
            raise await self._failed(f"handle the file {path}", error) from None
        except FAILURES as error:
            raise await self._failed(f"handle the file {path}", error) from None

    async def stat(self, path: str) -> Entry:
        return _entry(await self._asked(path, lambda: self._handle.filesystem.stat.aio(path)))

    async def entries(self, path: str) -> Sequence[Entry]:
        found = await self._asked(path, lambda: self._handle.filesystem.list_files.aio(path))
        return [_entry(info) for info in found]

    async def content(self, path: str) -> AsyncGenerator[bytes]:
        if (await self.stat(path)).size > _LARGEST:
            raise UnsafeFiles(f"{path}: more than {_LARGEST} bytes, and the sandbox's own programs do not work")
        yield await self._asked(path, lambda: self._handle.filesystem.read_bytes.aio(path))

    async def write(self, path: str, data: bytes) -> None:
        """Over what is there, whose mode stays."""
        await self._asked(path, lambda: self._handle.filesystem.write_bytes.aio(data, path))


def _entry(info: FileInfo) -> Entry:
    kinds = {modal.types.FileType.FILE: "file", modal.types.FileType.DIRECTORY: "directory"}
    kind = "link" if info.is_symlink() else kinds.get(info.type, "other")
    return Entry(name=info.name, kind=kind, size=info.size, mode=info.mode, target=info.symlink_target or "")
