"""Modal's control plane, as far as sandboxes need it: tokens, apps, images, and sandboxes by id, name and tag."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

from google.protobuf import empty_pb2
from grpclib import GRPCError, Status
from modal_proto import api_pb2
from modal_proto.api_grpc import ModalClientBase

from modal_standin.fleet import Fleet, Machine, environment
from modal_standin.images import BuildFailed, Images
from modal_standin.services import complete

TOKEN = {"x-modal-token-id": "ak-standin", "x-modal-token-secret": "as-standin"}
BUILDER_VERSION = "2026.10"


def jwt(**claims: object) -> str:
    """A token whose expiry the client can read; nobody verifies it."""
    parts = [{"alg": "none"}, {"exp": time.time() + 3600, **claims}]
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts]
    return ".".join([*encoded, "signature"])


class ControlPlane(complete(ModalClientBase)):  # type: ignore[misc]
    def __init__(self, fleet: Fleet, images: Images) -> None:
        self._fleet = fleet
        self._images = images
        self.url = ""
        self.refused = ""
        self.page = 100
        self._apps: dict[str, str] = {}
        self._secrets: dict[str, dict[str, str]] = {}

    def authorize(self, method: str, metadata: Mapping[str, Any]) -> None:
        if self.refused:
            raise GRPCError(Status.UNAUTHENTICATED, self.refused)
        if any(metadata.get(name) != value for name, value in TOKEN.items()):
            raise GRPCError(Status.UNAUTHENTICATED, f"Token validation failed ({metadata.get('x-modal-token-id')})")
        if method.endswith("V2") and "x-modal-auth-token" not in metadata:
            raise GRPCError(Status.UNAUTHENTICATED, f"{method} without an auth token")

    async def ClientHello(self, stream: Any) -> None:
        await stream.recv_message()
        await stream.send_message(api_pb2.ClientHelloResponse(image_builder_version=BUILDER_VERSION))

    async def AuthTokenGet(self, stream: Any) -> None:
        await stream.recv_message()
        await stream.send_message(api_pb2.AuthTokenGetResponse(token=jwt()))

    async def EnvironmentGetOrCreate(self, stream: Any) -> None:
        await stream.recv_message()
        settings = api_pb2.EnvironmentSettings(image_builder_version=BUILDER_VERSION)
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        await stream.send_message(api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-main", metadata=metadata))

    async def AppGetOrCreate(self, stream: Any) -> None:
        request = await stream.recv_message()
        if request.app_name not in self._apps:
            if request.object_creation_type != api_pb2.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
                raise GRPCError(Status.NOT_FOUND, f"App {request.app_name!r} not found")
            self._apps[request.app_name] = f"ap-{secrets.token_hex(11)}"
        await stream.send_message(api_pb2.AppGetOrCreateResponse(app_id=self._apps[request.app_name]))

    # ------------------------------------------------------------------------------------------------------ images

    async def MountBatchedCheckExistence(self, stream: Any) -> None:
        request = await stream.recv_message()
        missing = [digest for digest in request.sha256_hex_hashes if digest not in self._images.files]
        await stream.send_message(api_pb2.MountBatchedCheckExistenceResponse(missing_sha256_hex_hashes=missing))

    async def MountPutFile(self, stream: Any) -> None:
        request = await stream.recv_message()
        if request.WhichOneof("data_oneof") == "data":
            assert hashlib.sha256(request.data).hexdigest() == request.sha256_hex
            self._images.files[request.sha256_hex] = request.data
        await stream.send_message(api_pb2.MountPutFileResponse(exists=request.sha256_hex in self._images.files))

    async def MountGetOrCreate(self, stream: Any) -> None:
        request = await stream.recv_message()
        files = {file.filename: (file.sha256_hex, file.mode) for file in request.files}
        # The client sends the files in the order in which it happened to read them.
        digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:22]
        mount_id = f"mo-{digest}"
        self._images.mounts[mount_id] = files
        metadata = api_pb2.MountHandleMetadata(content_checksum_sha256_hex=digest)
        await stream.send_message(api_pb2.MountGetOrCreateResponse(mount_id=mount_id, handle_metadata=metadata))

    async def ImageGetOrCreate(self, stream: Any) -> None:
        request = await stream.recv_message()
        shared = request.namespace == api_pb2.DEPLOYMENT_NAMESPACE_GLOBAL
        image_id = self._images.build(request.image, shared=shared, force=request.force_build)
        build = self._images.builds[image_id]
        response = api_pb2.ImageGetOrCreateResponse(image_id=image_id)
        if build.done.done() and build.done.exception() is None:
            response.result.status = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS
        await stream.send_message(response)

    async def ImageJoinStreaming(self, stream: Any) -> None:
        request = await stream.recv_message()
        build = self._images.builds[request.image_id]
        await asyncio.wait([build.done])
        logs = [api_pb2.TaskLogs(data=line, file_descriptor=api_pb2.FILE_DESCRIPTOR_STDOUT) for line in build.log]
        error = build.done.exception()
        if error is None:
            result = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
        elif isinstance(error, BuildFailed):
            result = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_FAILURE, exception=str(error))
        else:
            raise error
        await stream.send_message(
            api_pb2.ImageJoinStreamingResponse(entry_id="1", task_logs=logs, result=result, eof=True)
        )

    async def ImageBuildChainGet(self, stream: Any) -> None:
        request = await stream.recv_message()
        step = api_pb2.ImageBuildStep(image_id=request.image_id, builder_app_id="ap-builder")
        step.builder_task_id = request.image_id
        step.started_at.FromSeconds(int(time.time()) - 60)
        step.finished_at.FromSeconds(int(time.time()) + 1)
        await stream.send_message(api_pb2.ImageBuildChainGetResponse(build_steps=[step]))

    async def AppFetchLogs(self, stream: Any) -> None:
        request = await stream.recv_message()
        lines = self._images.builds[request.task_id].log
        items = [
            api_pb2.TaskLogs(
                data=line, file_descriptor=api_pb2.FILE_DESCRIPTOR_STDOUT, timestamp=time.time(), timestamp_ns=number
            )
            for number, line in enumerate(lines, 1)
        ]
        batch = api_pb2.TaskLogsBatch(task_id=request.task_id, items=items)
        await stream.send_message(api_pb2.AppFetchLogsResponse(batches=[batch]))

    async def ImageFromId(self, stream: Any) -> None:
        request = await stream.recv_message()
        image = self._images.get(request.image_id)
        await stream.send_message(api_pb2.ImageFromIdResponse(image_id=image.id))

    async def ImageDelete(self, stream: Any) -> None:
        await self._images.delete((await stream.recv_message()).image_id)
        await stream.send_message(empty_pb2.Empty())

    # --------------------------------------------------------------------------------------------------- sandboxes

    async def SandboxCreateV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        image = self._images.get(request.definition.image_id)
        key = stream.metadata["x-idempotency-key"]
        machine = await self._fleet.create(request, image, environment(request), key)
        access = api_pb2.CommandRouterAccess(url=self.url, jwt=jwt(task=machine.task_id))
        await stream.send_message(
            api_pb2.SandboxCreateV2Response(
                sandbox_id=machine.id,
                task_id=machine.task_id,
                metadata=api_pb2.SandboxHandleMetadata(app_id=machine.app_id),
                command_router_access=access,
            )
        )

    async def SandboxGetTaskIdV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        machine = self._machine(request.sandbox_id)
        if machine.running:
            await stream.send_message(api_pb2.SandboxGetTaskIdResponse(task_id=machine.task_id))
        else:
            await stream.send_message(api_pb2.SandboxGetTaskIdResponse(task_result=machine.result))

    async def SandboxGetCommandRouterAccess(self, stream: Any) -> None:
        request = await stream.recv_message()
        machine = self._fleet.running(request.sandbox_id, request.task_id)
        await stream.send_message(
            api_pb2.SandboxGetCommandRouterAccessResponse(url=self.url, jwt=jwt(task=machine.task_id))
        )

    async def SandboxWaitV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        machine = self._machine(request.sandbox_id)
        if machine.running and request.timeout:
            waiting = asyncio.ensure_future(machine.ended.wait())
            await asyncio.wait([waiting], timeout=request.timeout)
            waiting.cancel()
        metadata = api_pb2.SandboxHandleMetadata(app_id=machine.app_id)
        await stream.send_message(api_pb2.SandboxWaitResponse(result=machine.result, metadata=metadata))

    async def SandboxTerminateV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        machine = self._machine(request.sandbox_id)
        existing = None if machine.running else machine.result
        await machine.close()
        await stream.send_message(api_pb2.SandboxTerminateResponse(existing_result=existing))

    async def SandboxListV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        wanted = {tag.tag_name: tag.tag_value for tag in request.tags}.items()
        before = request.before_timestamp or float("inf")
        found = [
            machine
            for machine in self._fleet.machines.values()
            if machine.running
            and machine.app_id == request.app_id
            and machine.created_at < before
            and wanted <= machine.tags.items()
        ]
        newest = sorted(found, key=lambda machine: -machine.created_at)[: self.page]
        await stream.send_message(api_pb2.SandboxListResponse(sandboxes=[_info(machine) for machine in newest]))

    async def SandboxGetFromNameV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        sandbox_id = self._fleet.names.get((self._apps.get(request.app_name, ""), request.sandbox_name))
        if not sandbox_id:
            raise GRPCError(Status.NOT_FOUND, f"no running sandbox named {request.sandbox_name!r}")
        machine = self._fleet.machines[sandbox_id]
        metadata = api_pb2.SandboxHandleMetadata(app_id=machine.app_id)
        await stream.send_message(api_pb2.SandboxGetFromNameResponse(sandbox_id=machine.id, metadata=metadata))

    async def SandboxTagsGetV2(self, stream: Any) -> None:
        machine = self._machine((await stream.recv_message()).sandbox_id)
        await stream.send_message(api_pb2.SandboxTagsGetResponse(tags=_tags(machine)))

    async def SandboxTagsSetV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        machine = self._machine(request.sandbox_id)
        machine.tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        await stream.send_message(empty_pb2.Empty())

    # ------------------------------------------------------------------- the first version, which GPUs still need

    async def SecretGetOrCreate(self, stream: Any) -> None:
        request = await stream.recv_message()
        secret_id = f"st-{secrets.token_hex(11)}"
        self._secrets[secret_id] = dict(request.env_dict)
        await stream.send_message(api_pb2.SecretGetOrCreateResponse(secret_id=secret_id))

    async def SandboxCreate(self, stream: Any) -> None:
        request = await stream.recv_message()
        image = self._images.get(request.definition.image_id)
        env = {name: value for secret in request.definition.secret_ids for name, value in self._secrets[secret].items()}
        machine = await self._fleet.create(request, image, env, stream.metadata["x-idempotency-key"])
        metadata = api_pb2.SandboxHandleMetadata(app_id=machine.app_id)
        await stream.send_message(api_pb2.SandboxCreateResponse(sandbox_id=machine.id, metadata=metadata))

    async def TaskGetCommandRouterAccess(self, stream: Any) -> None:
        machine = self._fleet.running(task_id=(await stream.recv_message()).task_id)
        token = jwt(task=machine.task_id)
        await stream.send_message(api_pb2.TaskGetCommandRouterAccessResponse(url=self.url, jwt=token))

    SandboxGetTaskId = SandboxGetTaskIdV2
    SandboxGetFromName = SandboxGetFromNameV2
    SandboxTagsGet = SandboxTagsGetV2
    SandboxTerminate = SandboxTerminateV2
    SandboxWait = SandboxWaitV2

    def _machine(self, sandbox_id: str) -> Machine:
        try:
            return self._fleet.machines[sandbox_id]
        except KeyError:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {sandbox_id!r} not found") from None


def _tags(machine: Machine) -> list[api_pb2.SandboxTag]:
    return [api_pb2.SandboxTag(tag_name=name, tag_value=value) for name, value in machine.tags.items()]


def _info(machine: Machine) -> api_pb2.SandboxInfo:
    return api_pb2.SandboxInfo(
        id=machine.id,
        created_at=machine.created_at,
        app_id=machine.app_id,
        tags=_tags(machine),
        name=machine.definition.name,
        image_id=machine.definition.image_id,
    )
