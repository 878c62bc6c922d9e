"""The connection to E2B: asking again when it is busy, and its failures in the harness's words."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ClassVar, TypeVar

import httpx
import pyqwest
from connectrpc.errors import ConnectError
from e2b import (
    AsyncSandbox,
    AuthenticationException,
    BuildException,
    ConnectionConfig,
    NotFoundException,
    RateLimitException,
    SandboxException,
    SandboxNotRunningException,
    ServiceBusyException,
)
from e2b.api import client_async
from rl_harness.errors import SandboxError, Unavailable

T = TypeVar("T")

#: What the SDK makes of an answer that is not E2B's, as from a proxy in between.
MANGLED = (LookupError, TypeError, ValueError, AttributeError, RecursionError)

#: Everything by which the SDK says that something went wrong.
FAILURES = (
    SandboxException,
    AuthenticationException,
    ServiceBusyException,
    BuildException,
    ConnectError,
    httpx.HTTPError,
    pyqwest.ReadError,
    pyqwest.WriteError,
    pyqwest.StreamError,
    OSError,
    *MANGLED,
)

_FIRST_WAIT, _LONGEST_WAIT = 0.5, 20.0
_REST_SECONDS, _LOOK_SECONDS, _QUIET_LOOKS = 2.0, 0.002, 10
_SERVER_ERROR = 500
_MANY = 10_000  # the SDK repeats what E2B asks to repeat, within the time that a request has
_KEY_REMEDY = "set E2B_API_KEY to a key of your team (e2b.dev/dashboard, API Keys)"


class Gone(SandboxError):
    """E2B does not have what was asked for."""


def words(error: BaseException) -> str:
    """What the SDK says, or the name of what it raised without a word."""
    if isinstance(error, MANGLED):
        return f"an answer that is not E2B's ({type(error).__name__}: {str(error)[:200]})"
    return str(error).strip() or type(error).__name__


def failure(what: str, error: BaseException) -> SandboxError:
    """The contract's error with E2B's own words."""
    if isinstance(error, NotFoundException | SandboxNotRunningException):
        return Gone(f"E2B: {what}: {words(error)}")
    remedy = None
    if isinstance(error, AuthenticationException):
        remedy = _KEY_REMEDY
    elif isinstance(error, RateLimitException):
        remedy = "run fewer episodes at once, or raise the limits of your team at E2B"
    return SandboxError(f"E2B: {what}: {words(error)}", remedy=remedy)


def refused(error: BaseException) -> bool:
    """Whether E2B turned a request down for now, without having done any of it."""
    return isinstance(error, RateLimitException | ServiceBusyException)


def passing(error: BaseException) -> bool:
    """Whether the same request may succeed later. It may have been carried out, its answer lost."""
    if isinstance(error, SandboxException) and (error.status_code or 0) >= _SERVER_ERROR:
        return True
    return refused(error) or isinstance(error, (httpx.TransportError, OSError, *MANGLED))


class Service:
    """Requests of one team. ``patience``: the seconds for which one is repeated while E2B is busy or out of reach."""

    _open: ClassVar[set[Service]] = set()

    def __init__(self, patience: float) -> None:
        self.patience = patience

    @classmethod
    async def open(cls, patience: float, timeout: float) -> Service:
        """Raises :class:`~rl_harness.errors.Unavailable` without a key, or if E2B refuses it or is out of reach."""
        if ConnectionConfig().debug:  # the SDK then neither makes nor ends anything
            raise Unavailable("E2B_DEBUG is set, with which the SDK makes no sandboxes", remedy="unset E2B_DEBUG")
        if not ConnectionConfig().api_key:
            raise Unavailable("E2B needs an API key, and E2B_API_KEY is not set", remedy=_KEY_REMEDY)
        try:
            async with asyncio.timeout(timeout):
                await AsyncSandbox.list(limit=1).next_items(request_timeout=timeout, retries=0)
        except AuthenticationException as error:
            raise Unavailable(f"E2B refuses the API key: {words(error)}", remedy=_KEY_REMEDY) from None
        except TimeoutError:
            raise Unavailable(
                f"E2B did not answer within {timeout:g} s", remedy="check the network, and status.e2b.dev"
            ) from None
        except FAILURES as error:
            raise Unavailable(
                f"E2B cannot be reached: {words(error)}", remedy="check the network, and status.e2b.dev"
            ) from None
        service = cls(patience)
        cls._open.add(service)
        return service

    async def close(self) -> None:
        """With the last service of this process, close the SDK's connections, which it keeps for the whole process."""
        self._open.discard(self)
        if self._open:
            return
        with client_async._transport_lock:
            pools = [*client_async._pools.values()]
            for cache in (client_async._pools, client_async._transports, client_async._httpx_transports):
                cache.clear()
        await asyncio.gather(*(pool.aclose() for pool in pools), return_exceptions=True)
        await _threads_at_rest()

    async def call(
        self,
        what: str,
        operation: Callable[[dict[str, Any]], Awaitable[T]],
        *,
        once: bool = False,
        timeout: float | None = None,
    ) -> T:
        """The operation's result; it is given the SDK's connection options. Repeated with growing random pauses while
        its failure may pass; ``once``: only while E2B has surely not done it. ``timeout``: for a slow operation, how
        long one request may take in place of the patience."""
        deadline = time.monotonic() + self.patience
        wait = _FIRST_WAIT
        again = refused if once else passing
        while True:
            left = max(1.0, deadline - time.monotonic())
            options = {"request_timeout": timeout or left, "retries": 0 if once else _MANY}
            try:
                return await operation(options)
            except FAILURES as error:
                pause = wait * random.uniform(0.5, 1.5)
                if not again(error) or time.monotonic() + pause > deadline:
                    raise failure(what, error) from None
            await asyncio.sleep(pause)
            wait = min(2 * wait, _LONGEST_WAIT)


async def _threads_at_rest() -> None:
    """Wait until the threads of the SDK's runtime have left Python.

    What a request has brought, one of them hands over by a call into this loop, and it may be in the middle of that
    when whoever waited is done and ends the interpreter: a thread of Rust, which cannot be ended there, aborts it.
    """
    deadline = time.monotonic() + _REST_SECONDS
    looks = 0
    while looks < _QUIET_LOOKS and time.monotonic() < deadline:
        known = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
        looks = 0 if sys._current_frames().keys() - known else looks + 1
        await asyncio.sleep(_LOOK_SECONDS)  # the others have the interpreter meanwhile


async def next_event(events: Any) -> Any:
    """The next of a stream's events. A cancellation stays one: the RPC library makes an error of its own of it."""
    try:
        return await anext(events)
    except ConnectError as error:
        if isinstance(error.__cause__, asyncio.CancelledError):
            raise error.__cause__ from None
        raise


async def finished(operation: Coroutine[Any, Any, object]) -> None:
    """Carry an operation to its end, also when whoever waits for it is cancelled."""
    task = asyncio.ensure_future(operation)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
