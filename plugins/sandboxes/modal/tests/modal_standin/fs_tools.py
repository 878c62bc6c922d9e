"""Modal's program for files, which is mounted in every machine: what the SDK's ``filesystem`` runs there."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from rl_harness.contracts.sandbox import Sandbox
from rl_harness.errors import SandboxError, UnsafeFiles
from rl_harness.sandboxes.remote import Entry
from rl_harness.testing import SandboxFiles

from modal_standin.outputs import Output

PATH = "/__modal/.bin/modal-sandbox-fs-tools"


class FsTool:
    """One run of it, as :class:`~modal_standin.fleet.Exec` is of a command. Its one argument says what to do."""

    def __init__(self, box: Sandbox, argument: str) -> None:
        self.outputs = {"stdout": Output(), "stderr": Output()}
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._files = SandboxFiles(box)
        self._input = bytearray()
        self._complete = asyncio.Event()
        [(name, fields)] = json.loads(argument).items()
        self._task = asyncio.create_task(self._run(name, fields))

    async def write(self, offset: int, data: bytes, *, eof: bool) -> None:
        self._input[offset:] = data
        if eof:
            self._complete.set()

    def kill_soon(self) -> None:
        self._task.cancel()

    async def _run(self, name: str, fields: dict[str, Any]) -> None:
        code = 0
        try:
            self.outputs["stdout"].append(await self._done(name, fields["path"]))
        except (FileNotFoundError, NotADirectoryError, SandboxError) as error:
            kinds = {FileNotFoundError: "NotFound", NotADirectoryError: "NotDirectory"}
            told = {"error_kind": kinds.get(type(error), "Other"), "message": str(error)}
            if isinstance(error, UnsafeFiles) and error.full:
                told["message"] = "No space left on device (os error 28)"
            self.outputs["stderr"].append(json.dumps(told).encode())
            code = 1
        for output in self.outputs.values():
            output.end()
        self.code.set_result(code)

    async def _done(self, name: str, path: str) -> bytes:
        if name == "Stat":
            return json.dumps(_told(path, await self._files.stat(path))).encode()
        if name == "ListFiles":
            return json.dumps([_told(f"{path}/{one.name}", one) for one in await self._files.entries(path)]).encode()
        if name == "ReadFile":
            return b"".join([chunk async for chunk in self._files.content(path)])
        assert name == "WriteFile", name
        await self._complete.wait()
        await self._files.write(path, bytes(self._input))
        return b""


def _told(path: str, entry: Entry) -> dict[str, Any]:
    kind = {"link": "symlink", "other": "file"}.get(entry.kind, entry.kind)
    told = {"name": entry.name, "path": path, "type": kind, "size": entry.size, "mode": entry.mode}
    told |= {"permissions": "", "owner": "root", "group": "root", "modified_time": 0.0}
    return told | ({"symlink_target": entry.target} if entry.kind == "link" else {})
