"""Calls from the main process into a worker process that owns the model, so that computing never stalls the event
loop. Both ends of the protocol live here: :class:`Worker` for the caller, :class:`Channel` for the worker.

A worker is ``python -m MODULE`` whose ``main`` is one line::

    def main() -> None:
        serve(Trainer())    # Trainer's public methods are called one at a time in the main thread;
                            # one that is a generator answers with a stream

and its caller writes::

    worker = await Worker.start("rl_harness_torch.trainer_worker", name="trainer", env=environment(threads))
    result = await worker.call("train_step", samples, loss, returns=StepResult)
    async for item in worker.stream("watch", yields=SomeRecord): ...
    await worker.close()

Arguments and results are records, numpy ``int32``/``float32`` arrays, and lists or mappings of them; the worker's
method annotations and ``returns``/``yields`` say what they are decoded into. There is no pickle. Errors of
:mod:`rl_harness.errors` arrive as the class they were raised as; any other exception arrives as the worker's
``failure`` class and its traceback is in the log. The worker ends when its parent does, however that happens.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import enum
import functools
import inspect
import itertools
import logging
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import typing
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from rl_harness import errors
from rl_harness.errors import EngineError, RlHarnessError
from rl_harness.records import decode, encode

T = TypeVar("T")

_HEADER = struct.Struct("<Q")
_ENV = "RL_HARNESS_WORKER"  # "socket fd:parent pid", set by Worker.start, read by Channel.inherited


class Kind(enum.IntEnum):
    CALL = 0
    CANCEL = 1
    ITEM = 2
    RETURN = 3
    ERROR = 4


class Message(msgspec.Struct, frozen=True, array_like=True):
    """``name`` is the method of a CALL and the class of an ERROR; ``body`` is an encoded value."""

    kind: Kind
    id: int
    name: str = ""
    body: bytes = b""


class _Failure(msgspec.Struct, frozen=True):
    message: str
    remedy: str | None = None


_frame_decoder = msgspec.msgpack.Decoder(list[Message])
_frame_encoder = msgspec.msgpack.Encoder()


def _frame(messages: Sequence[Message]) -> bytes:
    payload = _frame_encoder.encode(messages)
    return _HEADER.pack(len(payload)) + payload


# ---------------------------------------------------------------------------------------------- the worker's end


class Call:
    """One call that arrived in the worker. ``cancelled`` becomes true when the caller no longer waits."""

    def __init__(self, channel: Channel, message: Message) -> None:
        self.id = message.id
        self.method = message.name
        self.cancelled = False
        self._channel = channel
        self._body = message.body

    def arguments(self, types: Sequence[Any]) -> tuple[Any, ...]:
        kind: Any = tuple[tuple(types)]  # type: ignore[misc]  # a tuple type made at run time
        return tuple(decode(kind, self._body))

    def item(self, value: object) -> Message:
        """A streamed item; send it with :meth:`Channel.send`."""
        return Message(Kind.ITEM, self.id, "", encode(value))

    def result(self, value: object = None) -> Message:
        """The last message of a call; a streamed call ends with ``result()``."""
        self._channel.forget(self.id)
        return Message(Kind.RETURN, self.id, "", encode(value))

    def failure(self, error: BaseException) -> Message:
        """The error as the caller will see it; an unexpected one is logged with its traceback."""
        self._channel.forget(self.id)
        if isinstance(error, RlHarnessError):
            return Message(Kind.ERROR, self.id, type(error).__name__, encode(_Failure(error.message, error.remedy)))
        print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
        text = str(error) or "no message"
        return Message(Kind.ERROR, self.id, "", encode(_Failure(f"{type(error).__name__}: {text.splitlines()[0]}")))


class Channel:
    """The worker's side of the socket. A thread reads; everything else belongs to the main thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._open: dict[int, Call] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="rpc-reader", daemon=True).start()

    @classmethod
    def inherited(cls) -> Channel:
        """The channel to the process that started this one with :meth:`Worker.start`."""
        descriptor, parent = (int(part) for part in os.environ.pop(_ENV).split(":"))
        _die_with(parent)
        # Ctrl-C reaches the whole terminal group; what it means is the main process's decision.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return cls(socket.socket(fileno=descriptor))

    def receive(self, *, block: bool = True) -> Call | None:
        """The next call. Without ``block``, None when there is none yet."""
        try:
            return self._calls.get(block)
        except queue.Empty:
            return None

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages as one frame; replies to calls nobody waits for are dropped by the caller."""
        if messages:
            with self._lock:
                self._socket.sendall(_frame(messages))

    def dispatch(self, call: Call, target: object) -> None:
        """Run the method of ``target`` that ``call`` names and send its result, items or error."""
        try:
            function = None if call.method.startswith("_") else getattr(target, call.method, None)
            if function is None:
                raise AttributeError(f"the worker has no method {call.method!r}")
            result = function(*call.arguments(_parameter_types(function.__func__)))
            if inspect.isgenerator(result):
                with contextlib.closing(result):
                    for value in result:
                        if call.cancelled:
                            break
                        self.send([call.item(value)])
                result = None
            self.send([call.result(result)])
        except Exception as error:
            self.send([call.failure(error)])

    def forget(self, call_id: int) -> None:
        self._open.pop(call_id, None)

    def _read(self) -> None:
        with self._socket.makefile("rb") as stream:
            while True:
                header = stream.read(_HEADER.size)
                if len(header) < _HEADER.size:
                    os._exit(0)  # the parent is gone or has closed us; nobody wants what is being computed
                for message in _frame_decoder.decode(stream.read(_HEADER.unpack(header)[0])):
                    if message.kind == Kind.CALL:
                        call = Call(self, message)
                        self._open[call.id] = call
                        self._calls.put(call)
                    elif (cancelled := self._open.get(message.id)) is not None:
                        cancelled.cancelled = True


@functools.cache
def _parameter_types(function: Any) -> tuple[Any, ...]:
    hints = typing.get_type_hints(function)
    return tuple(hints[name] for name in itertools.islice(inspect.signature(function).parameters, 1, None))


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies (Linux; elsewhere the closed socket tells us)."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def serve(target: object) -> None:
    """Answer calls to ``target``'s public methods, one at a time, until the parent closes the channel."""
    channel = Channel.inherited()
    while (call := channel.receive()) is not None:
        if call.cancelled:
            channel.forget(call.id)
        else:
            channel.dispatch(call, target)


# ---------------------------------------------------------------------------------------------- the caller's end

_END = object()


def _spawn(command: list[str], env: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Not in a helper thread: Linux kills the child when the *thread* that started it ends."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            command,
            env={**os.environ, **env, _ENV: f"{theirs.fileno()}:{os.getpid()}"},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    return process, ours


class Worker:
    """A worker process. Used from one event loop; any number of calls may be under way at once."""

    def __init__(
        self, process: subprocess.Popen[bytes], connection: socket.socket, name: str, failure: type[RlHarnessError]
    ) -> None:
        self.name = name
        self._process = process
        self._connection = connection
        self._failure = failure
        self._log = logging.getLogger(f"rl_harness.worker.{name}")
        self._last_lines: collections.deque[str] = collections.deque(maxlen=30)
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[bytes] | asyncio.Queue[Any]] = {}
        self._dead: RlHarnessError | None = None
        self._closing = False
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._logging = threading.Thread(target=self._forward_log, name=f"{name}-log", daemon=True)

    @classmethod
    async def start(
        cls,
        module: str,
        *,
        name: str,
        env: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        failure: type[RlHarnessError] = EngineError,
    ) -> Worker:
        """Start ``python -m module`` and connect to it. ``env`` is added to this process's environment.

        ``failure`` is the class of errors that are not the user's: a crash, an unexpected exception.
        """
        process, ours = _spawn([sys.executable, "-m", module, *arguments], env or {})
        worker = cls(process, ours, name, failure)
        reader, worker._writer = await asyncio.open_connection(sock=ours)
        worker._reading = asyncio.create_task(worker._read(reader), name=f"{name}-rpc")
        worker._logging.start()
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._dead is None and not self._closing

    async def call(self, method: str, *arguments: object, returns: type[T]) -> T:
        """Call a method and decode its result. Cancelling the awaiting task tells the worker."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        call_id = self._send_call(method, arguments, future)
        try:
            return decode(returns, await future)
        finally:
            self._drop(call_id)

    async def stream(self, method: str, *arguments: object, yields: type[T]) -> AsyncGenerator[T, None]:
        """Call a method that answers with a stream. Closing the iterator cancels the call in the worker."""
        items: asyncio.Queue[Any] = asyncio.Queue()
        call_id = self._send_call(method, arguments, items)
        try:
            while (item := await items.get()) is not _END:
                if isinstance(item, RlHarnessError):
                    raise item
                yield decode(yields, item)
        finally:
            self._drop(call_id)

    async def close(self) -> None:
        """End the worker: at once if it is idle, by force if it does not go within five seconds."""
        self._closing = True
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        await asyncio.to_thread(self._reap)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._fail_all(self._failure(f"the {self.name} worker was closed"))

    def _send_call(self, method: str, arguments: Sequence[object], slot: Any) -> int:
        if self._dead is not None:
            raise self._dead
        if self._closing or self._writer is None:
            raise self._failure(f"the {self.name} worker is closed")
        body = encode(arguments)
        call_id = next(self._ids)
        self._pending[call_id] = slot
        self._writer.write(_frame([Message(Kind.CALL, call_id, method, body)]))
        return call_id

    def _drop(self, call_id: int) -> None:
        if self._pending.pop(call_id, None) is not None and self.alive and self._writer is not None:
            self._writer.write(_frame([Message(Kind.CANCEL, call_id)]))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
                self._receive(_frame_decoder.decode(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, OSError):
            pass
        if not self._closing:
            await asyncio.to_thread(self._reap)
            self._dead = self._cause_of_death()
            self._fail_all(self._dead)
            if self._writer is not None:
                self._writer.close()

    def _receive(self, messages: Iterable[Message]) -> None:
        for message in messages:
            slot = self._pending.get(message.id)
            if slot is None:
                continue  # the caller went away
            if message.kind == Kind.ITEM:
                if isinstance(slot, asyncio.Queue):
                    slot.put_nowait(message.body)
                continue
            del self._pending[message.id]
            error = self._error(message) if message.kind == Kind.ERROR else None
            if isinstance(slot, asyncio.Queue):
                slot.put_nowait(error or _END)
            elif not slot.done():
                slot.set_exception(error) if error else slot.set_result(message.body)

    def _error(self, message: Message) -> RlHarnessError:
        failure = decode(_Failure, message.body)
        kind = getattr(errors, message.name, None) if message.name else None
        if isinstance(kind, type) and issubclass(kind, RlHarnessError):
            return kind(failure.message, remedy=failure.remedy)
        return self._failure(f"the {self.name} worker failed: {failure.message}", remedy=failure.remedy)

    def _fail_all(self, error: RlHarnessError) -> None:
        pending, self._pending = self._pending, {}
        for slot in pending.values():
            if isinstance(slot, asyncio.Queue):
                slot.put_nowait(error)
            elif not slot.done():
                slot.set_exception(error)

    def _reap(self) -> None:
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._logging.is_alive():
            self._logging.join(5)

    def _cause_of_death(self) -> RlHarnessError:
        code = self._process.returncode
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            remedy = (
                "the machine probably ran out of memory; use a smaller model, batch or context" if code == -9 else None
            )
        else:
            how, remedy = f"exited with code {code}", None
        last = f": {self._last_lines[-1]}" if self._last_lines else ""
        return self._failure(f"the {self.name} worker (pid {self.pid}) {how}{last}", remedy=remedy)

    def _forward_log(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for raw in stream:
                line = raw.decode("utf-8", "replace").rstrip()
                if line:
                    self._last_lines.append(line)
                    self._log.info(line)
