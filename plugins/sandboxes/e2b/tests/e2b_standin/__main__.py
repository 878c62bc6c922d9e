"""Starts the stand-in and serves its control lines."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import uvicorn
from e2b.envd.client_shared import ENVD_JSON_CODEC
from e2b.envd.filesystem.filesystem_connect import FilesystemASGIApplication
from e2b.envd.process.process_connect import ProcessASGIApplication
from rl_harness.testing import serve_requests
from starlette.applications import Starlette

from e2b_standin.api import Api
from e2b_standin.control import Control
from e2b_standin.envd import Edge, Files, Processes
from e2b_standin.faults import Faults
from e2b_standin.machines import Fleet
from e2b_standin.templates import Templates


def application(fleet: Fleet, api: Api) -> Any:
    """One address for everything, as the SDK's E2B_API_URL and E2B_SANDBOX_URL allow."""
    rest = Starlette(routes=api.routes())
    settings = {"codecs": [ENVD_JSON_CODEC], "read_max_bytes": None}
    processes = Edge(fleet, ProcessASGIApplication(Processes(fleet), **settings))  # type: ignore[arg-type]
    files = Edge(fleet, FilesystemASGIApplication(Files(fleet), **settings))  # type: ignore[arg-type]

    async def route(scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if path.startswith("/process.Process/"):
            await processes(scope, receive, send)
        elif path.startswith("/filesystem.Filesystem/") or path in ("/health", "/files"):
            await files(scope, receive, send)
        else:
            await rest(scope, receive, send)

    return route


async def main(state: Path) -> None:
    fleet = Fleet(state)
    templates = Templates(fleet)
    api = Api(fleet, templates)
    faults = Faults(application(fleet, api))
    config = uvicorn.Config(faults, host="127.0.0.1", port=0, log_level=100, lifespan="off", timeout_keep_alive=600)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 -- uvicorn sets no event
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    api.url = f"http://127.0.0.1:{port}"
    control = Control(fleet, templates, api, faults)
    try:
        await serve_requests({"port": port, "hosts": fleet.wires.hosts}, control.answer)
    finally:
        await fleet.close()
        server.should_exit = server.force_exit = True
        await serving


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
