"""Several engines serving one policy: who answers which request, going on with what one engine left off, and new
weights to all of them or to none that serves."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple, cast

import msgspec
import numpy as np

from rl_harness.contracts.backend import WeightSource
from rl_harness.contracts.engine import EngineCapabilities, GenerateRequest, TokenChunk, TokenEngine
from rl_harness.errors import EngineError, RequestRefused
from rl_harness.records.arrays import IdArray, ids, logps
from rl_harness.records.seeds import derive_seed

log = logging.getLogger("rl_harness.inference")

#: A replica that has a conversation's prefix cached is preferred while it has at most this many requests more
#: than the least busy one.
STICKINESS = 4

#: Pause before asking again for a completion that was interrupted before it got a single token.
_NO_PROGRESS_SECONDS = 0.01
#: Before the first further attempt at a request that every engine failed, doubled each time; at most.
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
#: Statuses below 500 of a server that may answer the same request a moment later.
_PASSING = frozenset({408, 409, 425, 429})


class _Replica:
    """``fenced``: it holds other weights than the policy's and serves nobody until an update succeeds on it."""

    def __init__(self, engine: TokenEngine) -> None:
        self.engine = engine
        self.running = 0
        self.failures = 0  # in a row
        self.fenced = False


class _Patience:
    """How long one request is still worth another attempt."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._clock = asyncio.get_running_loop().time
        self.renew()

    def renew(self) -> None:
        """The request got on."""
        self._since = self._clock()
        self._pause = _FIRST_PAUSE

    async def wait(self, error: EngineError) -> None:
        """Pause before another attempt; raises ``error`` when there is to be none."""
        if error.status is not None and error.status < 500 and error.status not in _PASSING:
            raise error  # a wrong key or address stays wrong
        if self._clock() + self._pause > self._since + self._seconds:
            raise error
        log.warning("every engine failed a request, which is tried again in %.1f s: %s", self._pause, error)
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


class UpdateSeconds(NamedTuple):
    """How long the slowest replica took to receive new weights beside the serving ones, and to switch to them."""

    prepare: float
    commit: float


_Action = Callable[[_Replica], Awaitable[None]]


class Replicas:
    """Engines that serve the same weights. Itself usable wherever one engine's ``generate`` is.

    A request that every engine failed is tried again for as long after its last token as their capabilities say.
    """

    def __init__(self, engines: Sequence[TokenEngine]) -> None:
        if not engines:
            raise ValueError("a policy needs at least one engine")
        self._replicas = [_Replica(engine) for engine in engines]
        self._updating = asyncio.Lock()

    @property
    def engines(self) -> list[TokenEngine]:
        return [replica.engine for replica in self._replicas]

    @property
    def capabilities(self) -> EngineCapabilities:
        """What every replica can do."""
        all_of = [replica.engine.capabilities for replica in self._replicas]
        first = all_of[0]
        lengths = [one.context_length for one in all_of if one.context_length is not None]
        return EngineCapabilities(
            trainable=all(one.trainable for one in all_of),
            weight_transports=tuple(
                transport
                for transport in first.weight_transports
                if all(transport in o.weight_transports for o in all_of)
            ),
            context_length=min(lengths, default=None),
            top_logprobs=min(one.top_logprobs for one in all_of),
            json_schema=all(one.json_schema for one in all_of),
            patience=max(one.patience for one in all_of),
        )

    def version(self) -> int:
        """The policy version that serves new tokens."""
        return max((replica.engine.version() for replica in self._serving()), default=0)

    async def stats(self) -> dict[str, float]:
        """Sums over the replicas, and how many of them serve."""
        sums: dict[str, float] = {}
        for replica in self._replicas:
            own: Mapping[str, float] = await replica.engine.stats()
            for name, value in own.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums | {"replicas": float(len(self._replicas)), "replicas_serving": float(len(self._serving()))}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        """One completion, whichever engines it takes: where one is interrupted, fails or is fenced, another goes on
        from the ids there are. Raises ``EngineError`` when all that serve have failed it, for longer than is waited."""
        patience = _Patience(max(one.engine.capabilities.patience for one in self._replicas))
        done: list[IdArray] = []
        count = 0
        tried: set[_Replica] = set()
        cached = 0
        while True:
            try:
                replica = self._choose(request.cache_key, tried)
            except EngineError as error:
                await patience.wait(error)
                continue
            part = _rest_of(request, done, count)
            if part is None:
                yield _length_chunk(replica.engine.version())
                return
            replica.running += 1
            failure: EngineError | None = None
            try:
                stream = cast("AsyncGenerator[TokenChunk]", replica.engine.generate(part))
                async with aclosing(stream):
                    async for chunk in stream:
                        if replica.fenced:
                            break  # this chunk may come from half-changed weights
                        replica.failures = 0
                        if count == 0:
                            cached = chunk.cached_tokens
                        if len(chunk.ids):
                            done.append(chunk.ids)
                            count += len(chunk.ids)
                            patience.renew()
                        if chunk.finish_reason == "interrupted":
                            if len(chunk.ids):
                                yield msgspec.structs.replace(chunk, finish_reason=None, cached_tokens=cached)
                            break
                        yield msgspec.structs.replace(chunk, cached_tokens=cached)
                        if chunk.finish_reason is not None:
                            return
                    else:
                        raise EngineError("the engine ended a completion without a finish reason")
            except RequestRefused:
                raise
            except EngineError as error:
                replica.failures += 1
                tried.add(replica)
                failure = error
                if [one for one in self._serving() if one not in tried]:
                    log.warning("an engine failed a request, which another one continues: %s", error)
            finally:
                replica.running -= 1
            if failure is not None and not [one for one in self._serving() if one not in tried]:
                await patience.wait(failure)
                tried.clear()
            if len(part.prompt) == len(request.prompt) + count:
                await asyncio.sleep(_NO_PROGRESS_SECONDS)

    def _serving(self) -> list[_Replica]:
        return [replica for replica in self._replicas if not replica.fenced]

    def _choose(self, cache_key: str | None, tried: set[_Replica]) -> _Replica:
        serving = self._serving()
        if not serving:
            raise EngineError("no engine serves this policy: every one failed to take its latest weights")
        candidates = [replica for replica in serving if replica not in tried] or serving
        best = min(candidates, key=lambda replica: (replica.failures, replica.running))
        if cache_key is not None:
            place = int.from_bytes(hashlib.blake2b(cache_key.encode(), digest_size=4).digest(), "big")
            home = candidates[place % len(candidates)]
            if home.failures <= best.failures and home.running <= best.running + STICKINESS:
                return home
        return best

    async def update(self, source: WeightSource, version: int) -> UpdateSeconds:
        """Give every replica new weights: all prepare beside the serving ones, then all commit.

        A replica that fails either is fenced, until a later update succeeds on it. Raises ``EngineError`` when
        none takes the weights; if that was in preparation, those that serve go on with what they have.
        """
        async with self._updating:
            began = time.perf_counter()
            prepared = await self._each(self._replicas, lambda replica: replica.engine.prepare(source))
            if not prepared:
                raise EngineError(f"no engine could take the weights of version {version}")
            for replica in self._replicas:
                replica.fenced = replica.fenced or replica not in prepared
            halfway = time.perf_counter()
            committed = await self._each(prepared, lambda replica: replica.engine.commit(version))
            for replica in prepared:
                replica.fenced = replica not in committed
            if not committed:
                raise EngineError(f"no engine could switch to the weights of version {version}")
            return UpdateSeconds(prepare=halfway - began, commit=time.perf_counter() - halfway)

    @staticmethod
    async def _each(replicas: Sequence[_Replica], action: _Action) -> list[_Replica]:
        """Do something to all at once; those on which it succeeded."""
        results = await asyncio.gather(*(action(replica) for replica in replicas), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, Exception):
                raise result
            if isinstance(result, Exception):
                log.error("an engine did not take new weights", exc_info=result)
        return [replica for replica, result in zip(replicas, results, strict=True) if result is None]

    async def close(self) -> None:
        """Close every engine."""
        await asyncio.gather(*(replica.engine.close() for replica in self._replicas))


def _rest_of(request: GenerateRequest, done: Sequence[IdArray], count: int) -> GenerateRequest | None:
    """What is left of a request of which ``count`` tokens are there; None if nothing is."""
    if not count:
        return request
    sampling = request.sampling
    limit = None if sampling.max_tokens is None else sampling.max_tokens - count
    if limit is not None and limit <= 0:
        return None
    # The same seed would draw the same noise as the first tokens had.
    seed = None if sampling.seed is None else derive_seed(sampling.seed, count)
    return msgspec.structs.replace(
        request,
        id=f"{request.id}+{count}",
        prompt=ids(np.concatenate([request.prompt, *done])),
        sampling=msgspec.structs.replace(sampling, max_tokens=limit, seed=seed),
        begun=count,
    )


def _length_chunk(version: int) -> TokenChunk:
    empty = np.zeros(0)
    return TokenChunk(ids=ids(empty), logps=logps(empty), version=version, finish_reason="length")
