"""The command router of the machines: starting commands, their input and output, snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from grpclib import GRPCError, Status
from modal_proto import task_command_router_pb2 as tcr
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from modal_standin.faults import Faults
from modal_standin.fleet import Exec, Fleet, Machine, environment
from modal_standin.fs_tools import FsTool
from modal_standin.images import Images
from modal_standin.services import complete

STREAMS = {
    tcr.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT: "stdout",
    tcr.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDERR: "stderr",
}


class Router(complete(TaskCommandRouterBase)):  # type: ignore[misc]
    def __init__(self, fleet: Fleet, images: Images, faults: Faults) -> None:
        self._fleet = fleet
        self._images = images
        self._faults = faults

    def _machine(self, request: Any, metadata: Mapping[str, Any]) -> Machine:
        if not str(metadata.get("authorization", "")).startswith("Bearer "):
            raise GRPCError(Status.UNAUTHENTICATED, "no token for the router")
        return self._fleet.running(task_id=request.task_id)

    def _exec(self, request: Any, metadata: Mapping[str, Any]) -> Exec | FsTool:
        machine = self._machine(request, metadata)
        if request.exec_id not in machine.execs:
            raise GRPCError(Status.NOT_FOUND, f"no command {request.exec_id}")
        return machine.execs[request.exec_id]

    async def TaskExecStart(self, stream: Any) -> None:
        request = await stream.recv_message()
        machine = self._machine(request, stream.metadata)
        command = await machine.start(request.exec_id, request.command_args, request.workdir, environment(request))
        if request.timeout_secs:
            asyncio.get_running_loop().call_later(request.timeout_secs, command.kill_soon)
        await stream.send_message(tcr.TaskExecStartResponse())

    async def TaskExecStdioRead(self, stream: Any) -> None:
        request = await stream.recv_message()
        command = self._exec(request, stream.metadata)
        cut = self._faults.take("TaskExecStdioRead", cuts=True)
        left = cut.cut_after if cut is not None else None
        async for data in command.outputs[STREAMS[request.file_descriptor]].read(request.offset):
            if left is None:
                await stream.send_message(tcr.TaskExecStdioReadResponse(data=data))
                continue
            if data[:left]:
                await stream.send_message(tcr.TaskExecStdioReadResponse(data=data[:left]))
            left -= len(data[:left])
            if left == 0:
                await stream.cancel()
                return

    async def TaskExecStdinWrite(self, stream: Any) -> None:
        request = await stream.recv_message()
        command = self._exec(request, stream.metadata)
        await command.write(request.offset, request.data, eof=request.eof)
        await stream.send_message(tcr.TaskExecStdinWriteResponse())

    async def TaskExecStdinWriteStream(self, stream: Any) -> None:
        start = (await stream.recv_message()).start
        command = self._exec(start, stream.metadata)
        offset, ended = start.offset, False
        while not ended:
            request = await stream.recv_message()
            ended = request is None or request.HasField("end")
            data = b"" if ended else request.data
            await command.write(offset, data, eof=ended)
            offset += len(data)
        await stream.send_message(tcr.TaskExecStdinWriteStreamResponse())

    async def TaskExecWait(self, stream: Any) -> None:
        request = await stream.recv_message()
        command = self._exec(request, stream.metadata)
        await stream.send_message(tcr.TaskExecWaitResponse(code=await asyncio.shield(command.code)))

    async def TaskExecPoll(self, stream: Any) -> None:
        request = await stream.recv_message()
        command = self._exec(request, stream.metadata)
        code = await command.code if command.code.done() else None
        await stream.send_message(tcr.TaskExecPollResponse(code=code))

    async def TaskSnapshotFilesystem(self, stream: Any) -> None:
        request = await stream.recv_message()
        machine = self._machine(request, stream.metadata)
        if request.snapshot_id not in machine.snapshots:
            image = await self._images.snapshot(machine.box, machine.image, request.ttl_seconds)
            machine.snapshots[request.snapshot_id] = image
        await stream.send_message(tcr.TaskSnapshotFilesystemResponse(image_id=machine.snapshots[request.snapshot_id]))
