"""The listening socket: what its connections inherit."""

from __future__ import annotations

import asyncio
import socket

from rl_harness.gateway.listening import listen


async def test_answers_do_not_wait_for_acknowledgements():
    """A response is written in two parts; with Nagle's algorithm the second waits for a delayed acknowledgement."""
    accepted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    class Server(asyncio.Protocol):
        def connection_made(self, transport):
            connection = transport.get_extra_info("socket")
            accepted.set_result(bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            transport.close()

    listening = listen("127.0.0.1", 0)
    server = await asyncio.get_running_loop().create_server(Server, sock=listening)
    async with server:
        _, writer = await asyncio.open_connection(*listening.getsockname())
        assert await accepted
        writer.close()
