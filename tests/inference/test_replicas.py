"""Several engines, one policy: routing, going on after interruptions and failures, weights to all or fenced."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rl_harness.contracts import GenerateRequest, TokenEngine, WeightManifest, WeightSource
from rl_harness.errors import EngineError
from rl_harness.inference import Replicas
from rl_harness.records import SamplingParams, ids
from rl_harness.testing.engine import ScriptedEngine, ScriptedOptions
from rl_harness.testing.tokenizer import write_tokenizer

TEXT = "0123456789"


class Source(WeightSource):
    """Weights as far as a scripted engine looks at them."""

    transport = "file"

    def __init__(self, version: int) -> None:
        self.manifest = WeightManifest(version=version, kind="full", tensors=(), digest="")

    async def buckets(self) -> Any:
        for bucket in ():
            yield bucket


class Fragile(ScriptedEngine):
    """Goes on in the fixed text from where a prompt leaves it, and fails to take weights when told to."""

    bad_prepare = False
    bad_commit = False

    async def prepare(self, source: Any) -> None:
        if self.bad_prepare:
            raise RuntimeError("out of memory")
        await super().prepare(source)

    async def commit(self, version: int) -> None:
        if self.bad_commit:
            raise EngineError("torn")
        await super().commit(version)


@pytest.fixture
async def pair(tmp_path: Path) -> list[Fragile]:
    folder = write_tokenizer(tmp_path)
    engines = []
    for _ in range(2):
        engine = Fragile(ScriptedOptions(chunk=2))
        await engine.start(str(folder))
        engine.reply = lambda request, prompt: TEXT[len(prompt.partition("#")[2]) :]
        engines.append(engine)
    return engines


def request(**sampling: Any) -> GenerateRequest:
    # "#" and nothing after it: the reply is the whole text.
    return GenerateRequest(id="r", prompt=ids([2]), sampling=SamplingParams(**sampling), cache_key="k")


async def collect(replicas: Replicas, asked: GenerateRequest) -> tuple[list[int], list[int], str | None]:
    tokens: list[int] = []
    versions: list[int] = []
    finish = None
    async for chunk in replicas.generate(asked):
        assert finish is None
        assert chunk.finish_reason != "interrupted"
        tokens += chunk.ids.tolist()
        versions += [chunk.version] * len(chunk.ids)
        finish = chunk.finish_reason
    return tokens, versions, finish


def spelled(engine: ScriptedEngine, tokens: list[int]) -> str:
    assert engine._tokenizer is not None
    return str(engine._tokenizer.decode(tokens, skip_special_tokens=True))


async def test_one_engine_is_passed_through(pair: list[Fragile]) -> None:
    tokens, _, finish = await collect(Replicas(pair[:1]), request())
    assert (spelled(pair[0], tokens), finish) == (TEXT, "stop")


async def test_an_interrupted_turn_goes_on_from_its_ids(pair: list[Fragile]) -> None:
    replicas = Replicas(pair)
    for engine in pair:
        engine.faults = ["interrupted"]
    tokens, _, finish = await collect(replicas, request(max_tokens=50, seed=3))
    assert (spelled(pair[0], tokens), finish) == (TEXT, "stop")
    asked = sorted((one for engine in pair for one in engine.requests), key=lambda one: len(one.prompt))
    assert [one.sampling.max_tokens for one in asked] == [50, 48]
    assert asked[1].prompt.tolist() == [2, *tokens[:2]]
    assert asked[0].sampling.seed != asked[1].sampling.seed


async def test_versions_across_an_interruption(pair: list[Fragile]) -> None:
    """Fault 10: each token carries the version that sampled it."""
    replicas = Replicas(pair[:1])
    pair[0].faults = ["interrupted"]
    stream = replicas.generate(request())
    first = await anext(stream)
    await replicas.update(Source(5), 5)
    rest = [chunk async for chunk in stream]
    assert first.version == 0
    assert {chunk.version for chunk in rest} == {5}
    assert replicas.version() == 5


async def test_interrupted_with_nothing_left_is_a_length(pair: list[Fragile]) -> None:
    pair[0].faults = ["interrupted"]
    tokens, _, finish = await collect(Replicas(pair[:1]), request(max_tokens=2))
    assert (len(tokens), finish) == (2, "length")


async def test_a_failing_engine_is_left_for_another(pair: list[Fragile]) -> None:
    replicas = Replicas(pair)
    home = next(replica.engine for replica in replicas._replicas if replica is replicas._choose("k", set()))
    assert isinstance(home, Fragile)
    home.faults = [EngineError("gone")]
    tokens, _, finish = await collect(replicas, request())
    assert (spelled(pair[0], tokens), finish) == (TEXT, "stop")
    assert all(len(engine.requests) == 1 for engine in pair)


async def test_all_failing_is_an_error(pair: list[Fragile]) -> None:
    for engine in pair:
        engine.faults = [EngineError("gone")]
    with pytest.raises(EngineError, match="gone"):
        await collect(Replicas(pair), request())


async def test_a_conversation_stays_where_its_prefix_is(pair: list[Fragile]) -> None:
    replicas = Replicas(pair)
    for _ in range(4):
        await collect(replicas, request())
    assert sorted(len(engine.requests) for engine in pair) == [0, 4]


async def test_a_crowd_is_spread(pair: list[Fragile]) -> None:
    replicas = Replicas(pair)
    await asyncio.gather(*(collect(replicas, request()) for _ in range(20)))
    assert min(len(engine.requests) for engine in pair) >= 6


async def test_closing_the_stream_cancels_in_the_engine(pair: list[Fragile]) -> None:
    replicas = Replicas(pair)
    stream = replicas.generate(request())
    await anext(stream)
    assert sum(engine.running for engine in pair) == 1
    await stream.aclose()
    assert sum(engine.running for engine in pair) == 0
    assert [replica.running for replica in replicas._replicas] == [0, 0]


@pytest.mark.parametrize("stage", ["bad_prepare", "bad_commit"])
async def test_a_replica_that_fails_an_update_is_fenced(pair: list[Fragile], stage: str) -> None:
    """Fault 40: it serves nobody until a later update succeeds on it."""
    replicas = Replicas(pair)
    setattr(pair[0], stage, True)
    await replicas.update(Source(1), 1)
    assert replicas.version() == 1
    for _ in range(10):
        _, versions, _ = await collect(replicas, request())
        assert set(versions) == {1}
    assert pair[0].requests == []
    assert (await replicas.stats())["replicas_serving"] == 1
    setattr(pair[0], stage, False)
    await replicas.update(Source(2), 2)
    await asyncio.gather(*(collect(replicas, request()) for _ in range(20)))
    assert pair[0].requests
    assert [engine.version() for engine in pair] == [2, 2]


async def test_a_turn_leaves_a_fenced_replica(pair: list[Fragile]) -> None:
    """Half-changed weights sample nothing that is kept."""
    replicas = Replicas(pair)
    stream = replicas.generate(request())
    first = await anext(stream)
    home = next(engine for engine in pair if engine.running)
    home.bad_commit = True
    await replicas.update(Source(1), 1)
    rest = [chunk async for chunk in stream]
    assert {chunk.version for chunk in rest} == {1}
    tokens = [token for chunk in [first, *rest] for token in chunk.ids.tolist()]
    assert spelled(pair[0], tokens) == TEXT


async def test_an_update_that_nobody_takes(pair: list[Fragile]) -> None:
    replicas = Replicas(pair)
    for engine in pair:
        engine.bad_prepare = True
    with pytest.raises(EngineError, match="no engine could take the weights of version 1"):
        await replicas.update(Source(1), 1)
    assert (await collect(replicas, request()))[2] == "stop"
    for engine in pair:
        engine.bad_prepare, engine.bad_commit = False, True
    with pytest.raises(EngineError, match="no engine could switch"):
        await replicas.update(Source(1), 1)
    with pytest.raises(EngineError, match="no engine serves this policy"):
        await collect(replicas, request())


async def test_an_engine_that_ends_without_a_reason(pair: list[Fragile]) -> None:
    class Silent(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Any:
            for chunk in ():
                yield chunk

    engine: TokenEngine = Silent(ScriptedOptions())
    with pytest.raises(EngineError, match="without a finish reason"):
        await collect(Replicas([engine]), request())


def test_capabilities_are_what_all_can(pair: list[Fragile]) -> None:
    pair[1]._options = ScriptedOptions(context_length=77)
    capabilities = Replicas(pair).capabilities
    assert capabilities.context_length == 77
    assert capabilities.weight_transports == ("file",)
    assert capabilities.trainable
    with pytest.raises(ValueError, match="at least one engine"):
        Replicas([])
