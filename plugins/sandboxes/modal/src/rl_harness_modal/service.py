"""The connection to Modal: opening it, asking again when Modal is busy, and its failures in the harness's words."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import modal
from grpclib import GRPCError
from grpclib.exceptions import StreamTerminatedError
from modal import exception
from modal.experimental import image_delete
from rl_harness.errors import SandboxError, Unavailable, Unsupported

T = TypeVar("T")

#: What the SDK makes of an answer that is not Modal's.
MANGLED = (LookupError, TypeError, ValueError, AttributeError, AssertionError, RecursionError)

#: Everything by which the SDK says that something went wrong.
FAILURES = (exception.Error, GRPCError, StreamTerminatedError, OSError, TimeoutError, *MANGLED)

#: Worth asking again: too many requests or machines for now, a service or a network in trouble.
_PASSING = (
    exception.ResourceExhaustedError,
    exception.ServiceError,
    exception.InternalError,
    exception.ConnectionError,
    exception.TimeoutError,
    StreamTerminatedError,
    ConnectionError,
    TimeoutError,
)

#: Modal turned a request down for now, without having done any of it.
REFUSED = (exception.ResourceExhaustedError,)

_FIRST_WAIT, _LONGEST_WAIT = 0.5, 20.0
_TOKEN_REMEDY = "run `modal token new`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"


def words(error: BaseException) -> str:
    """What the SDK says, or the name of what it raised without a word."""
    if isinstance(error, MANGLED):
        return f"an answer that is not Modal's ({type(error).__name__}: {str(error)[:200]})"
    return str(error).strip() or type(error).__name__


class Gone(SandboxError):
    """Modal does not have what was asked for."""


def failure(what: str, error: BaseException) -> SandboxError:
    """The contract's error with Modal's own words."""
    if isinstance(error, exception.NotFoundError):
        return Gone(f"Modal: {what}: {words(error)}")
    remedy = None
    if isinstance(error, exception.AuthError):
        remedy = _TOKEN_REMEDY
    elif isinstance(error, exception.ResourceExhaustedError):
        remedy = "run fewer episodes at once, or raise the limits of your workspace on Modal"
    return SandboxError(f"Modal: {what}: {words(error)}", remedy=remedy)


class Service:
    """A client of our own and the app that all sandboxes belong to.

    ``patience``: the seconds for which one request is repeated while Modal is busy or out of reach.
    """

    def __init__(
        self, client: modal.Client, app: modal.App, app_name: str, environment: str | None, patience: float
    ) -> None:
        self.client = client
        self.app = app
        self._app_name = app_name
        self._environment = environment
        self._patience = patience

    @classmethod
    async def open(cls, app_name: str, environment: str | None, patience: float) -> Service:
        """Raises :class:`~rl_harness.errors.Unavailable` without a token, or if Modal refuses it or is out of reach."""
        # The SDK waits for as long as Modal asks it to, without a bound of its own unless this is set.
        os.environ.setdefault("MODAL_MAX_THROTTLE_WAIT", str(max(1, round(patience))))
        try:
            client = await _client()
        except exception.AuthError as error:
            raise Unavailable(f"there is no token for Modal: {words(error)}", remedy=_TOKEN_REMEDY) from None
        except FAILURES as error:
            raise _unavailable(error) from None
        try:
            await client.hello.aio()
            app = await modal.App.lookup.aio(
                app_name, client=client, environment_name=environment, create_if_missing=True
            )
        except BaseException as error:
            await _close(client)
            if isinstance(error, FAILURES):
                raise _unavailable(error) from None
            raise
        return cls(client, app, app_name, environment, patience)

    async def call(self, what: str, operation: Callable[[], Awaitable[T]]) -> T:
        """The operation's result; repeated with growing random pauses while its failure may pass."""
        try:
            return await self.patiently(operation, _PASSING)
        except FAILURES as error:
            raise failure(what, error) from None

    async def patiently(
        self, operation: Callable[[], Awaitable[T]], passing: tuple[type[BaseException], ...] = REFUSED
    ) -> T:
        """The same for failures of these kinds, raising the SDK's own. It has waited for as long as Modal asked to."""
        deadline = time.monotonic() + self._patience
        wait = _FIRST_WAIT
        while True:
            try:
                return await operation()
            except passing:
                pause = wait * random.uniform(0.5, 1.5)
                if time.monotonic() + pause > deadline:
                    raise
            await asyncio.sleep(pause)
            wait = min(2 * wait, _LONGEST_WAIT)

    async def create(self, name: str, image: modal.Image, arguments: dict[str, Any]) -> modal.Sandbox:
        """A sandbox of this name. When an answer got lost, the one that it made is found by its name.

        After a failure there may still be one, for :meth:`discard`.
        """

        async def attempt() -> modal.Sandbox:
            try:
                return await modal.Sandbox.create.aio(
                    "sleep",
                    str(arguments["timeout"] + 60),  # the entry point's end would be the sandbox's
                    app=self.app,
                    client=self.client,
                    name=name,
                    image=image,
                    **arguments,
                )
            except exception.AlreadyExistsError:
                return await self.named(name)

        return await self.call("create a sandbox", attempt)

    async def named(self, name: str) -> modal.Sandbox:
        return await modal.Sandbox.from_name.aio(
            self._app_name, name, environment_name=self._environment, client=self.client
        )

    async def discard(self, name: str) -> None:
        """End the sandbox of this name if there is one after all."""

        async def end() -> None:
            sandbox = await self.named(name)
            await sandbox.terminate.aio()

        try:
            await self.call(f"end sandbox {name}", end)
        except SandboxError:
            return  # there is none, or it lives until the time that it was given

    async def image(self, image: modal.Image, timeout: float) -> str:
        """Build an image, or find that Modal has it; its id. A build that fails shows the end of its output."""
        try:
            async with asyncio.timeout(timeout):
                await self.call("build the image", lambda: self._build(image))
        except TimeoutError:
            raise SandboxError(f"Modal: the image was not built within {timeout:g} s") from None
        return str(image.object_id)

    async def _build(self, image: modal.Image) -> None:
        try:
            await image.build.aio(self.app)
        except exception.ImageBuildError as error:
            raise SandboxError(f"Modal: {words(error)}\n{await self._log(image)}".rstrip()) from None
        except exception.InvalidError as error:
            raise Unsupported(f"Modal: {words(error)}") from None

    async def _log(self, image: modal.Image) -> str:
        lines = []
        try:
            async for entry in image.logs.tail.aio(entries=40):
                lines.append(entry.message)
        except FAILURES:
            return ""
        return "".join(lines)

    async def find_image(self, image: str) -> None:
        """Raises :class:`Gone` when Modal does not have it."""
        known = modal.Image.from_id(image, client=self.client)
        await self.call(f"find image {image}", lambda: known.build.aio(self.app))

    async def delete_image(self, image: str) -> None:
        try:
            await self.call(f"delete image {image}", lambda: image_delete.aio(image, client=self.client))
        except Gone:
            return

    async def close(self) -> None:
        await _close(self.client)


async def _client() -> modal.Client:
    """A client of our own for a token; the process's shared one for the other ways to sign in."""
    token = modal.config.config.get("token_id"), modal.config.config.get("token_secret")
    if all(token):
        return await modal.Client.from_credentials.aio(*token)
    return await modal.Client.from_env.aio()


async def _close(client: modal.Client) -> None:
    """Close a client as leaving it as a context does: its ``close`` came with 1.6.4."""
    await client.__aexit__(None, None, None)


def _unavailable(error: BaseException) -> Unavailable:
    if isinstance(error, exception.AuthError):
        return Unavailable(f"Modal refuses the token: {words(error)}", remedy=_TOKEN_REMEDY)
    return Unavailable(f"Modal cannot be reached: {words(error)}", remedy="check the network, and status.modal.com")


async def finished(operation: Coroutine[Any, Any, object]) -> None:
    """Carry an operation to its end, also when whoever waits for it is cancelled."""
    task = asyncio.ensure_future(operation)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
