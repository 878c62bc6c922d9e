"""E2B's REST interface, as far as the SDK's sandboxes, snapshots and templates use it."""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from rl_harness.errors import SandboxError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from e2b_standin.machines import ApiError, Fleet, Machine, stamp
from e2b_standin.templates import Build, Template, Templates

ENVD_VERSION = "0.6.4"
KEY = "e2b_standin"
T = TypeVar("T")

Handler = Callable[[Request], Awaitable[Response]]


class Api:
    def __init__(self, fleet: Fleet, templates: Templates) -> None:
        self._fleet = fleet
        self._templates = templates
        self.url = ""
        self.refused = ""
        self.page = 100

    def routes(self) -> list[Route]:
        table: list[tuple[str, str, Handler]] = [
            ("POST", "/v2/sandboxes", self.create),
            ("GET", "/v2/sandboxes", self.list),
            ("GET", "/sandboxes/{id}", self.show),
            ("DELETE", "/sandboxes/{id}", self.kill),
            ("POST", "/sandboxes/{id}/timeout", self.timeout),
            ("POST", "/sandboxes/{id}/pause", self.pause),
            ("POST", "/v2/sandboxes/{id}/connect", self.connect),
            ("POST", "/sandboxes/{id}/fork", self.fork),
            ("POST", "/sandboxes/{id}/snapshots", self.snapshot),
            ("GET", "/snapshots", self.snapshots),
            ("POST", "/v3/templates", self.request_build),
            ("GET", "/templates/{id:path}/files/{hash}", self.file_link),
            ("POST", "/v2/templates/{id:path}/builds/{build}", self.start_build),
            ("GET", "/templates/{id:path}/builds/{build}/status", self.build_status),
            ("GET", "/templates/{id:path}", self.template),
            ("DELETE", "/templates/{id:path}", self.delete_template),
        ]
        routes = [Route(path, self._guarded(handler), methods=[method]) for method, path, handler in table]
        return [*routes, Route("/uploads/{hash}", self.upload, methods=["PUT"])]

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            try:
                if self.refused:
                    raise ApiError(401, self.refused)
                if request.headers.get("x-api-key") != KEY:
                    raise ApiError(
                        401, "Invalid API key, please visit https://e2b.dev/docs/api-key for more information."
                    )
                # What was begun is carried out, also for a client that has gone away.
                return await asyncio.shield(asyncio.ensure_future(handler(request)))
            except ApiError as error:
                body = {"code": error.status, "message": error.message}
                return JSONResponse(body | ({"error_code": error.code} if error.code else {}), error.status)
            except SandboxError as error:
                return JSONResponse({"code": 500, "message": f"Internal: {error}"}, 500)

        return guarded

    def _page(self, request: Request, items: list[T]) -> tuple[list[T], dict[str, str]]:
        start = int(request.query_params.get("nextToken", 0))
        size = min(self.page, int(request.query_params.get("limit", 100)))
        more = {"x-next-token": str(start + size)} if start + size < len(items) else {}
        return items[start : start + size], more

    # -------------------------------------------------------------------------------------------------- sandboxes

    async def create(self, request: Request) -> Response:
        body = await request.json()
        template, content = self._templates.content(body["templateID"])
        machine = await self._fleet.create(body, content, template.id, request.headers.get("idempotency-key"))
        return JSONResponse(_made(machine), 201)

    async def list(self, request: Request) -> Response:
        wanted = {
            urllib.parse.unquote(name): urllib.parse.unquote(value)
            for name, value in urllib.parse.parse_qsl(request.query_params.get("metadata", ""), keep_blank_values=True)
        }
        found = [
            machine
            for machine in self._fleet.machines.values()
            if machine.state != "ended" and wanted.items() <= machine.metadata.items()
        ]
        found.sort(key=lambda machine: machine.started_at, reverse=True)
        page, more = self._page(request, found)
        return JSONResponse([_shown(machine) for machine in page], headers=more)

    async def show(self, request: Request) -> Response:
        return JSONResponse(_shown(self._machine(request)))

    def _machine(self, request: Request) -> Machine:
        return self._fleet.get(request.path_params["id"])

    async def kill(self, request: Request) -> Response:
        await self._machine(request).end()
        return Response(status_code=204)

    async def timeout(self, request: Request) -> Response:
        machine = self._machine(request)
        if machine.state != "running":
            raise ApiError(409, f"Sandbox '{machine.id}' is {machine.state}")
        machine.keep((await request.json())["timeout"])
        return Response(status_code=204)

    async def pause(self, request: Request) -> Response:
        body = await _optional(request)
        await self._machine(request).pause(memory=body.get("memory", True))
        return Response(status_code=204)

    async def connect(self, request: Request) -> Response:
        timeout = self._fleet.check_timeout((await _optional(request)).get("timeout", 300))
        machine = self._machine(request)
        await machine.resume(timeout)
        return JSONResponse(_made(machine), 200)

    async def fork(self, request: Request) -> Response:
        body = await _optional(request)
        machine = self._machine(request)
        if machine.state != "running":
            raise ApiError(409, f"Sandbox '{machine.id}' is paused and cannot be forked; resume it first")
        files = await machine.freeze()
        content = type(machine.content)(**{**vars(machine.content), "files": files})
        wanted = {**machine.request, "metadata": machine.metadata, "timeout": body.get("timeout", 300)}
        made = [self._fleet.create(wanted, content, machine.base, None) for _ in range(body.get("count", 1))]
        outcomes = await asyncio.gather(*made, return_exceptions=True)
        return JSONResponse([_outcome(outcome) for outcome in outcomes], 201)

    # -------------------------------------------------------------------------------------------------- snapshots

    async def snapshot(self, request: Request) -> Response:
        body = await request.json()
        sandbox = request.path_params["id"]
        made = await self._templates.snapshot(sandbox, body.get("name"), memory=body.get("memory", True))
        return JSONResponse(_snapshot(made), 201)

    async def snapshots(self, request: Request) -> Response:
        page, more = self._page(request, self._templates.snapshots())
        return JSONResponse([_snapshot(template) for template in page], headers=more)

    # -------------------------------------------------------------------------------------------------- templates

    async def request_build(self, request: Request) -> Response:
        body = await request.json()
        template, build = self._templates.request(body["name"], body.get("cpuCount"), body.get("memoryMB"))
        return JSONResponse(
            {
                "templateID": template.id,
                "buildID": build.id,
                "public": False,
                "names": [template.name],
                "tags": ["default"],
                "aliases": [template.name],
            },
            202,
        )

    async def file_link(self, request: Request) -> Response:
        digest = request.path_params["hash"]
        present = digest in self._templates.uploads
        return JSONResponse({"present": present, "url": f"{self.url}/uploads/{digest}"}, 201)

    async def upload(self, request: Request) -> Response:
        self._templates.uploads[request.path_params["hash"]] = await request.body()
        return Response(status_code=200)

    async def start_build(self, request: Request) -> Response:
        path = request.path_params
        self._templates.start(path["id"], path["build"], await request.json())
        return Response(status_code=202)

    async def build_status(self, request: Request) -> Response:
        path = request.path_params
        template, build = self._templates.build(path["id"], path["build"])
        offset = int(request.query_params.get("logsOffset", 0))
        body: dict[str, Any] = {
            "templateID": template.id,
            "buildID": build.id,
            "status": build.status,
            "logs": [],
            "logEntries": [
                {"timestamp": stamp(build.created_at), "level": "info", "message": line}
                for line in build.log[offset : offset + 100]
            ],
        }
        if build.reason:
            body["reason"] = {"message": build.reason, "step": str(build.step)}
        return JSONResponse(body)

    async def template(self, request: Request) -> Response:
        return JSONResponse(_template(self._templates.find(request.path_params["id"])))

    async def delete_template(self, request: Request) -> Response:
        self._templates.delete(request.path_params["id"])
        return Response(status_code=204)


async def _optional(request: Request) -> dict[str, Any]:
    body = await request.body()
    return (await request.json()) if body else {}


def _made(machine: Machine) -> dict[str, Any]:
    return {
        "templateID": machine.base,
        "sandboxID": machine.id,
        "clientID": "standin",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": machine.token,
    }


def _shown(machine: Machine) -> dict[str, Any]:
    return {
        "templateID": machine.base,
        "sandboxID": machine.id,
        "clientID": "standin",
        "startedAt": stamp(machine.started_at),
        "endAt": stamp(machine.ends_at),
        "cpuCount": machine.content.cpus,
        "memoryMB": machine.content.memory,
        "diskSizeMB": 1024,
        "state": machine.state,
        "envdVersion": ENVD_VERSION,
        "metadata": machine.metadata,
    }


def _outcome(outcome: Machine | BaseException) -> dict[str, Any]:
    if isinstance(outcome, Machine):
        return {"sandbox": _made(outcome)}
    status = outcome.status if isinstance(outcome, ApiError) else 500
    return {"error": {"code": status, "message": str(outcome)}}


def _snapshot(template: Template) -> dict[str, Any]:
    return {"snapshotID": template.reference, "names": [template.reference.partition(":")[0]] if template.name else []}


def _template(template: Template) -> dict[str, Any]:
    return {
        "templateID": template.id,
        "buildID": template.builds[-1].id if template.builds else "",
        "cpuCount": 2,
        "memoryMB": 512,
        "diskSizeMB": 1024,
        "public": False,
        "aliases": [template.name],
        "names": [template.name],
        "createdAt": stamp(template.created_at),
        "updatedAt": stamp(template.created_at),
        "createdBy": None,
        "lastSpawnedAt": None,
        "spawnCount": 0,
        "buildCount": len(template.builds),
        "envdVersion": ENVD_VERSION,
        "buildStatus": template.builds[-1].status if template.builds else "ready",
        "builds": [_build(build) for build in template.builds],
    }


def _build(build: Build) -> dict[str, Any]:
    return {
        "buildID": build.id,
        "status": build.status,
        "createdAt": stamp(build.created_at),
        "updatedAt": stamp(build.created_at),
        "cpuCount": build.cpus,
        "memoryMB": build.memory,
    }
