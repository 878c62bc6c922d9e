"""The least a gateway can be: aiohttp, whose server forwards what its client gets.

python passthrough.py ENGINE     prints its port
"""

from __future__ import annotations

import asyncio
import sys

import aiohttp
from aiohttp import web


async def main(engine: str) -> None:
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def forward(request: web.Request) -> web.StreamResponse:
        data = await request.read()
        async with session.post(engine + request.path, data=data) as upstream:
            if upstream.content_type != "text/event-stream":
                return web.Response(body=await upstream.read(), content_type=upstream.content_type)
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            async for piece in upstream.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    application = web.Application()
    application.router.add_post("/{path:.*}", forward)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1000)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
