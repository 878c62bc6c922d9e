"""The machines behind the stand-in's sandboxes: each one a sandbox of the local provider, with real processes, a root
of its own, and real copies of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpclib import GRPCError, Status
from modal_proto import api_pb2
from modal_proto import task_command_router_pb2 as tcr
from rl_harness.contracts.sandbox import EnvironmentSpec, Limits, Process, Sandbox, SandboxSpec
from rl_harness.errors import SandboxError
from rl_harness.sandboxes.local import LocalProvider
from rl_harness.testing import Wires
from rl_harness.testing.wires import EVERYTHING

from modal_standin import fs_tools
from modal_standin.images import BuiltImage
from modal_standin.outputs import Output

if TYPE_CHECKING:
    from modal_standin.fs_tools import FsTool

Request = api_pb2.SandboxCreateRequest | api_pb2.SandboxCreateV2Request

MIB = 1 << 20
METADATA = ("169.254.0.0/16", "100.100.100.200/32")


class Exec:
    """A command in a machine, with its output, its input counted in bytes, and its exit code once it has one."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.outputs = {"stdout": Output(), "stderr": Output()}
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._written = 0
        self._writing = asyncio.Lock()
        self._tasks = [asyncio.create_task(self._pump()), asyncio.create_task(self._wait())]

    async def _pump(self) -> None:
        try:
            async for name, chunk in self._process.output():
                self.outputs[name].append(chunk)
        finally:
            for output in self.outputs.values():
                output.end()

    async def _wait(self) -> None:
        try:
            self.code.set_result(await self._process.wait())
        except SandboxError as error:
            self.code.set_exception(GRPCError(Status.NOT_FOUND, str(error)))
            self.code.exception()

    async def write(self, offset: int, data: bytes, *, eof: bool) -> None:
        async with self._writing:
            if offset > self._written:
                raise GRPCError(Status.OUT_OF_RANGE, f"offset {offset} after {self._written} bytes")
            fresh = data[self._written - offset :]
            if fresh:
                await self._process.write(fresh)
                self._written += len(fresh)
            if eof:
                await self._process.close_stdin()

    def kill_soon(self) -> None:
        """At the end of the time that the client gave the command; one that has exited is left alone."""
        if not self.code.done():
            self._tasks.append(asyncio.create_task(self._process.kill()))


class Machine:
    """A sandbox: its definition as Modal's client sent it, and what runs it."""

    def __init__(self, fleet: Fleet, request: Request, image: BuiltImage, env: Mapping[str, str], box: Sandbox) -> None:
        first = isinstance(request, api_pb2.SandboxCreateRequest)
        # The client tells the two versions of sandboxes apart by these forms.
        suffix = secrets.token_hex(11 if first else 13)
        self.id = f"sb-{suffix}"
        self.task_id = f"ta-{suffix}" if first else f"ta-{suffix}V"
        self.app_id = request.app_id
        self.definition = request.definition
        self.tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        self.created_at = next(fleet.clock)
        self.image = image
        self.box = box
        self.execs: dict[str, Exec | FsTool] = {}
        self.snapshots: dict[str, str] = {}
        self.result = api_pb2.GenericResult()
        self.ended = asyncio.Event()
        self._fleet = fleet
        self._env = {**image.env, **env}
        self._workdir = request.definition.workdir or image.workdir
        self._ending: asyncio.Task[None] | None = None
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._expire())]

    async def _run(self) -> None:
        """The entry point's end is the sandbox's, and so is the end of what the sandbox runs on."""
        entrypoint = await self.box.spawn(
            list(self.definition.entrypoint_args) or ["sleep", "172800"], cwd=self._workdir, env=self._env
        )
        died = asyncio.create_task(self.box.died())
        ends = asyncio.create_task(_drained(entrypoint))
        await asyncio.wait([died, ends], return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        try:
            code = await ends if ends.done() else 137
        except SandboxError:
            code = 137
        ends.cancel()
        status = "GENERIC_STATUS_SUCCESS" if code == 0 else "GENERIC_STATUS_FAILURE"
        self.end(status, exitcode=code)

    async def _expire(self) -> None:
        await asyncio.sleep(self.definition.timeout_secs)
        self.end("GENERIC_STATUS_TIMEOUT")

    def end(self, status: str, *, exitcode: int = 0, exception: str = "") -> None:
        if self._ending is None:
            value = api_pb2.GenericResult.GenericStatus.Value(status)
            self.result = api_pb2.GenericResult(status=value, exitcode=exitcode, exception=exception)
            self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        self.ended.set()
        await self.box.close()
        self._fleet.names.pop((self.app_id, self.definition.name), None)

    @property
    def running(self) -> bool:
        return self._ending is None

    async def close(self) -> None:
        self.end("GENERIC_STATUS_TERMINATED")
        assert self._ending is not None
        await asyncio.shield(self._ending)  # a client that is killed meanwhile cancels its request

    async def start(self, exec_id: str, command: Sequence[str], workdir: str, env: Mapping[str, str]) -> Exec | FsTool:
        if exec_id not in self.execs and command[0] == fs_tools.PATH:
            self.execs[exec_id] = fs_tools.FsTool(self.box, command[1])
        if exec_id not in self.execs:
            process = await self.box.spawn(list(command), cwd=workdir or self._workdir, env={**self._env, **env})
            self.execs[exec_id] = Exec(process)
        return self.execs[exec_id]


async def _drained(process: Process) -> int:
    async for _ in process.output():
        pass
    return await process.wait()


def environment(request: Any) -> dict[str, str]:
    """The variables in a request itself, as earlier clients send them and as later ones do."""
    earlier = request.env if isinstance(request, tcr.TaskExecStartRequest) else request.ephemeral_secrets.contents
    later = {name: value for source in request.secret_sources for name, value in source.env.contents.items()}
    return {**earlier, **later}


class Fleet:
    """Every machine, running or ended."""

    def __init__(self, state: Path) -> None:
        self.provider = LocalProvider(LocalProvider.Options(state_dir=state))
        self.wires = Wires(state)
        self.machines: dict[str, Machine] = {}
        self.names: dict[tuple[str, str], str] = {}
        self.quota = 10_000
        self.disk: int | None = None
        self._starting: dict[str, asyncio.Future[Machine]] = {}
        self.clock = (time.time() + tick * 1e-6 for tick in itertools.count())  # no two sandboxes of the same age

    async def create(self, request: Request, image: BuiltImage, env: Mapping[str, str], key: str) -> Machine:
        """A new machine; for a ``key`` of idempotency seen before, the one it made."""
        if key not in self._starting:
            self._starting[key] = asyncio.ensure_future(self._create(request, image, env))
        return await asyncio.shield(self._starting[key])

    async def _create(self, request: Request, image: BuiltImage, env: Mapping[str, str]) -> Machine:
        definition = request.definition
        if sum(machine.running for machine in self.machines.values()) >= self.quota:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, f"workspace is limited to {self.quota} concurrent sandboxes")
        if definition.name:
            name = (request.app_id, definition.name)
            if name in self.names:
                raise GRPCError(Status.ALREADY_EXISTS, f"sandbox name {definition.name!r} is taken")
            self.names[name] = ""
        box = await self.provider.create(self.spec(definition, image))
        await self.wires.connect(box, reached(definition.network_access), METADATA)
        machine = Machine(self, request, image, env, box)
        self.machines[machine.id] = machine
        if definition.name:
            self.names[name] = machine.id
        return machine

    def spec(self, definition: api_pb2.Sandbox, image: BuiltImage) -> SandboxSpec:
        enforced = self.provider.capabilities.limits
        resources = definition.resources
        memory = resources.memory_mb_max * MIB if "memory" in enforced else 0
        cpus = resources.milli_cpu_max / 1000 if "cpus" in enforced else 0
        return SandboxSpec(
            environment=EnvironmentSpec(workdir=definition.workdir or image.workdir),
            limits=Limits(memory=memory or None, cpus=cpus or None, disk=self.disk),
            labels={"run": "modal-standin"},
            lifetime=definition.timeout_secs + 60.0,
            snapshot=image.content,
        )

    def running(self, sandbox_id: str = "", task_id: str = "") -> Machine:
        for machine in self.machines.values():
            if sandbox_id == machine.id or task_id == machine.task_id:
                if machine.running:
                    return machine
                raise GRPCError(Status.NOT_FOUND, f"sandbox {machine.id} has already finished")
        raise GRPCError(Status.NOT_FOUND, f"no sandbox {sandbox_id or task_id}")

    async def close(self) -> None:
        with contextlib.suppress(SandboxError):
            await asyncio.gather(*(machine.close() for machine in self.machines.values()))
        for snapshot in await self.provider.snapshots():
            await self.provider.delete_snapshot(snapshot.id)
        await self.provider.close()
        self.wires.close()


def reached(access: api_pb2.NetworkAccess) -> list[str]:
    """The ranges of addresses that a machine reaches. Names are known and not resolved."""
    if access.network_access_type == api_pb2.NetworkAccess.BLOCKED:
        return []
    if access.network_access_type == api_pb2.NetworkAccess.ALLOWLIST:
        return list(access.allowed_cidrs)
    return [EVERYTHING]


def summary(machine: Machine) -> dict[str, Any]:
    """What a test may ask about a machine."""
    definition = machine.definition
    access = definition.network_access
    return {
        "id": machine.id,
        "running": machine.running,
        "status": api_pb2.GenericResult.GenericStatus.Name(machine.result.status),
        "tags": machine.tags,
        "name": definition.name,
        "timeout": definition.timeout_secs,
        "idle_timeout": definition.idle_timeout_secs if definition.HasField("idle_timeout_secs") else None,
        "workdir": definition.workdir,
        "memory": [definition.resources.memory_mb, definition.resources.memory_mb_max],
        "milli_cpu": [definition.resources.milli_cpu, definition.resources.milli_cpu_max],
        "gpu": definition.resources.gpu_config.gpu_type,
        "network": api_pb2.NetworkAccess.NetworkAccessType.Name(access.network_access_type),
        "cidrs": list(access.allowed_cidrs),
        "domains": list(access.allowed_domains),
        "image": definition.image_id,
        "snapshots": list(machine.snapshots.values()),
    }
