"""Starts the stand-in and serves its control lines."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from grpclib.server import Server
from modal._utils.grpc_utils import custom_detail_codec
from rl_harness.testing import serve_requests

from modal_standin.control import Control
from modal_standin.control_plane import ControlPlane
from modal_standin.faults import Faults
from modal_standin.fleet import Fleet
from modal_standin.images import Images
from modal_standin.router import Router
from modal_standin.services import guarded


async def main(state: Path) -> None:
    faults = Faults()
    fleet = Fleet(state)
    images = Images(fleet)
    plane = ControlPlane(fleet, images)
    services = [guarded(plane, faults, plane.authorize), guarded(Router(fleet, images, faults), faults, None)]
    server = Server(services, status_details_codec=custom_detail_codec)
    await server.start("127.0.0.1", 0)
    port = server._server.sockets[0].getsockname()[1]
    plane.url = f"http://127.0.0.1:{port}"
    control = Control(fleet, plane, faults)
    try:
        await serve_requests({"port": port, "hosts": fleet.wires.hosts}, control.answer)
    finally:
        server.close()
        await fleet.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
