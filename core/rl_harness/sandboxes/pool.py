"""Keeps sandboxes ready ahead of the episodes that will need them, so that starting one costs an episode nothing.

Invariants: what was handed out never comes back; nothing is held while a sandbox is made, so a slow environment delays
nobody else; a caller never waits longer than making a sandbox of its own would have taken from the time it asked; no
sandbox outlives :meth:`Pool.close`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

import msgspec

from rl_harness.contracts.sandbox import EnvironmentSpec, Sandbox, SandboxCapabilities, SandboxSource, SandboxSpec
from rl_harness.errors import RlHarnessError, SandboxError
from rl_harness.sandboxes.environments import environment_key
from rl_harness.sandboxes.flights import finished

_log = logging.getLogger(__name__)

#: Leases over which consumption is measured, and how many of them it takes before the measurement is believed.
_WINDOW, _ENOUGH = 64, 8
#: The weight of the newest start in the moving average of start times.
_NEWEST = 0.2


class PoolCounts(msgspec.Struct, kw_only=True):
    """What the pool did. Every lease of an expected spec is a ``hit`` (one was ready), ``late`` (one was under way and
    waited for) or a ``miss`` (made on the spot); ``wait_seconds`` is what all of them waited. ``unplanned`` leases were
    of no expected spec. Of the ``started``, ``unused`` were never handed out (``dead`` when asked, too old, or not
    needed after all) and ``failed`` never came to be. ``idle_seconds``: how long ready ones stood, used or not.
    """

    hits: int = 0
    late: int = 0
    misses: int = 0
    unplanned: int = 0
    wait_seconds: float = 0.0
    started: int = 0
    unused: int = 0
    dead: int = 0
    failed: int = 0
    idle_seconds: float = 0.0


class _Ready(msgspec.Struct):
    sandbox: Sandbox
    since: float
    until: float


class _Start:
    """A sandbox under way. ``claimed``: a caller waits for it."""

    def __init__(self) -> None:
        self.claimed = False
        self.task: asyncio.Task[_Ready]


class _Kind:
    """Interchangeable sandboxes: one environment, one set of limits, one network. ``paused`` until one is leased: the
    last could not be made, or stood for too long."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.ready: deque[_Ready] = deque()
        self.starts: list[_Start] = []
        self.paused = False

    @property
    def memory(self) -> int:
        return self.spec.limits.memory or 0

    def ahead(self) -> int:
        return len(self.ready) + sum(not start.claimed for start in self.starts)


class Pool:
    """A :class:`~rl_harness.contracts.SandboxSource` with a stock, told by :meth:`expect` what will be asked for.

    How many are kept ready follows Little's law: with λ leases a second and S seconds to make one, λ·S are consumed
    while one is made. Kept are λ·S + √(λ·S) + 1 of the next in the schedule: the root covers a burst (consumption is
    about Poisson), the one a rate of nearly nothing. Until both are measured, ``size`` are.

    ``size`` bounds ready ones and those under way, ``memory`` the sum of their memory limits in bytes (a spec without
    one counts nothing), ``max_idle`` the seconds one may stand. A ready one whose remaining lifetime does not cover
    the spec's is dropped. All carry ``labels`` and no others: an episode's own cannot be put on afterwards.
    """

    def __init__(
        self,
        source: SandboxSource,
        *,
        size: int,
        memory: int | None = None,
        max_idle: float = 300.0,
        labels: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = PoolCounts()
        self._source = source
        self._size = size
        self._memory = memory
        self._max_idle = max_idle
        self._labels = dict(labels or {})
        self._clock = clock
        self._kinds: dict[bytes, _Kind] = {}
        self._contents: dict[bytes, str] = {}
        self._schedule: deque[tuple[_Kind, int]] = deque()
        self._leases: deque[float] = deque(maxlen=_WINDOW)
        self._start_seconds: float | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def capabilities(self) -> SandboxCapabilities:
        return self._source.capabilities

    # -- the schedule --------------------------------------------------------------------------------------------

    def expect(self, spec: SandboxSpec, count: int = 1) -> None:
        """``count`` more sandboxes like ``spec`` will be asked for, after what was expected before."""
        if count < 1:
            return
        key = self._key(spec)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(msgspec.structs.replace(spec, labels=self._labels))
        if spec.lifetime > kind.spec.lifetime:
            kind.spec = msgspec.structs.replace(kind.spec, lifetime=spec.lifetime)
        if self._schedule and self._schedule[-1][0] is kind:
            self._schedule[-1] = (kind, self._schedule[-1][1] + count)
        else:
            self._schedule.append((kind, count))

    def _key(self, spec: SandboxSpec) -> bytes:
        """Everything of a spec but its labels and its lifetime; of an environment what it holds, wherever it lies."""
        bare = msgspec.structs.replace(spec, environment=EnvironmentSpec(), labels={}, lifetime=0.0)
        return self._content(spec.environment).encode() + _encoded(bare)

    def _content(self, environment: EnvironmentSpec) -> str:
        """Its digest, read once a run: a task that changes while it runs is another run's business."""
        name = _encoded(environment)
        if name not in self._contents:
            try:
                self._contents[name] = environment_key(environment, "", {})
            except (OSError, RlHarnessError):  # said by whoever starts a sandbox of it
                self._contents[name] = name.hex()
        return self._contents[name]

    def start(self) -> None:
        """Begin to make what was expected. Leases do so too."""
        self._fill()

    def clear(self) -> None:
        """Expect nothing any more. Ready ones stay as long as ``max_idle`` says, in case they are expected again."""
        self._schedule.clear()
        self._leases.clear()  # what comes after a pause is measured anew
        self._kinds = {key: kind for key, kind in self._kinds.items() if kind.ready or kind.starts}

    def discard_unexpected(self) -> None:
        """Give up every ready sandbox for which the schedule has no use."""
        wanted: Counter[_Kind] = Counter()
        for kind, count in self._schedule:
            wanted[kind] += count
        for kind in self._kinds.values():
            while len(kind.ready) > wanted[kind]:
                self._give_up(kind.ready.pop())

    # -- leases --------------------------------------------------------------------------------------------------

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox no agent has been in: a ready one if there is one, else the next to come. The caller closes it."""
        if self._closed:
            raise SandboxError("the pool of sandboxes is closed")
        kind = self._kinds.get(self._key(spec))
        if kind is None:
            self.counts.unplanned += 1
            return await self._source.create(spec)
        asked = self._clock()
        self._leases.append(asked)
        self._consume(kind)
        kind.paused = False
        try:
            return await self._lease(kind, spec)
        finally:
            self.counts.wait_seconds += self._clock() - asked
            self._fill()

    async def _lease(self, kind: _Kind, spec: SandboxSpec) -> Sandbox:
        while kind.ready:
            ready = kind.ready.popleft()
            if await self._usable(ready, spec):
                self.counts.hits += 1
                self.counts.idle_seconds += self._clock() - ready.since
                return ready.sandbox
        start = next((start for start in kind.starts if not start.claimed), None)
        if start is not None:
            try:
                ready = await self._wait(kind, start)
            except Exception:
                # One of its own may succeed: it need not live as long, and what failed may have been mended.
                if self._closed:
                    raise
            else:
                if ready.until - self._clock() >= spec.lifetime:
                    self.counts.late += 1
                    return ready.sandbox
                self._give_up(ready)
        self.counts.misses += 1
        return await self._make(spec)

    async def _usable(self, ready: _Ready, spec: SandboxSpec) -> bool:
        if ready.until - self._clock() < spec.lifetime:
            self._give_up(ready)
            return False
        try:
            if await ready.sandbox.alive():
                return True
        except SandboxError:
            pass
        except BaseException:
            self._give_up(ready)
            raise
        self.counts.dead += 1
        self._give_up(ready)
        return False

    async def _wait(self, kind: _Kind, start: _Start) -> _Ready:
        start.claimed = True
        try:
            return await asyncio.shield(start.task)
        except asyncio.CancelledError:
            start.claimed = False
            if not start.task.done():
                raise
            caller = asyncio.current_task()
            if start.task.cancelled() and not (caller and caller.cancelling()):
                raise SandboxError("the pool of sandboxes is closed") from None
            if start.task.cancelled():
                raise
            if start.task.exception() is None:
                self._stock(kind, start.task.result())
            raise

    async def _make(self, spec: SandboxSpec) -> Sandbox:
        began = self._clock()
        sandbox = await self._source.create(spec)
        self._measure(self._clock() - began)
        return sandbox

    def _measure(self, seconds: float) -> None:
        before = self._start_seconds
        self._start_seconds = seconds if before is None else before + _NEWEST * (seconds - before)

    def _consume(self, kind: _Kind) -> None:
        for at, (expected, count) in enumerate(self._schedule):
            if expected is kind:
                if count > 1:
                    self._schedule[at] = (kind, count - 1)
                else:
                    del self._schedule[at]
                return

    # -- the stock -----------------------------------------------------------------------------------------------

    def target(self) -> int:
        """How many to keep ready or under way now."""
        if len(self._leases) < _ENOUGH or self._start_seconds is None:
            return self._size
        elapsed = max(self._clock() - self._leases[0], 1e-6)
        consumed = len(self._leases) / elapsed * self._start_seconds
        return min(math.ceil(consumed + math.sqrt(consumed)) + 1, self._size)

    def ready(self) -> int:
        """How many are ready now."""
        return sum(len(kind.ready) for kind in self._kinds.values())

    def _fill(self) -> None:
        if self._closed:
            return
        wanted: Counter[_Kind] = Counter()
        left = self.target()
        for kind, count in self._schedule:
            wanted[kind] += min(count, left)
            left -= min(count, left)
            if not left:
                break
        for kind, count in wanted.items():
            while not kind.paused and kind.ahead() < count and self._has_room(kind):
                self._begin(kind)

    def _has_room(self, kind: _Kind) -> bool:
        ahead = {other: other.ahead() for other in self._kinds.values()}
        if sum(ahead.values()) >= self._size:
            return False
        taken = sum(other.memory * number for other, number in ahead.items())
        return self._memory is None or taken + kind.memory <= self._memory

    def _begin(self, kind: _Kind) -> None:
        start = _Start()
        start.task = asyncio.create_task(self._bring_up(kind, start))
        kind.starts.append(start)

        def ended(task: asyncio.Task[_Ready]) -> None:
            kind.starts.remove(start)
            if task.cancelled():
                return
            error = task.exception()
            if error is not None:
                self.counts.failed += 1
                kind.paused = True
                if not start.claimed:
                    level = logging.INFO if isinstance(error, RlHarnessError) else logging.ERROR
                    _log.log(level, "a sandbox could not be made ready: %s", error, exc_info=level == logging.ERROR)
            elif not start.claimed:
                self._stock(kind, task.result())

        start.task.add_done_callback(ended)

    async def _bring_up(self, kind: _Kind, start: _Start) -> _Ready:
        began = self._clock()
        lifetime = kind.spec.lifetime + self._max_idle
        sandbox = await self._make(msgspec.structs.replace(kind.spec, lifetime=lifetime))
        self.counts.started += 1
        return _Ready(sandbox, self._clock(), began + lifetime)

    def _stock(self, kind: _Kind, ready: _Ready) -> None:
        if self._closed:
            self._give_up(ready)
            return
        kind.ready.append(ready)
        self._watch()

    def _give_up(self, ready: _Ready) -> None:
        self.counts.unused += 1
        self.counts.idle_seconds += self._clock() - ready.since
        task = asyncio.create_task(_end(ready.sandbox))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _watch(self) -> None:
        """Look again when the oldest ready one has stood for as long as it may."""
        if self._timer is None and not self._closed:
            oldest = min((kind.ready[0].since for kind in self._kinds.values() if kind.ready), default=None)
            if oldest is not None:
                delay = max(oldest + self._max_idle - self._clock(), 0.01)
                self._timer = asyncio.get_running_loop().call_later(delay, self._expire)

    def _expire(self) -> None:
        self._timer = None
        for kind in self._kinds.values():
            while kind.ready and self._clock() - kind.ready[0].since >= self._max_idle:
                kind.paused = True  # another would stand as long, until somebody leases again
                self._give_up(kind.ready.popleft())
        self._watch()

    async def close(self) -> None:
        """Stop making sandboxes and close every one that was not handed out. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        await finished(self._drain())

    async def _drain(self) -> None:
        starts = list(itertools.chain.from_iterable(kind.starts for kind in self._kinds.values()))
        for start in starts:
            start.task.cancel()
        if starts:
            await asyncio.wait([start.task for start in starts])
        await asyncio.sleep(0)  # what came to be nevertheless is being given up
        for kind in self._kinds.values():
            while kind.ready:
                self._give_up(kind.ready.popleft())
        while self._ending:
            await asyncio.wait(self._ending)


async def _end(sandbox: Sandbox) -> None:
    try:
        await sandbox.close()
    except Exception as error:
        _log.warning("a ready sandbox could not be closed: %s", error)  # its provider's reaper finds it


def _encoded(what: EnvironmentSpec | SandboxSpec) -> bytes:
    return msgspec.json.encode(what, order="deterministic", enc_hook=str)
