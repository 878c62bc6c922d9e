"""Conformance checks for token engines: what the gateway and the inference layer rely on.

A plugin describes its engine once, as an :class:`EngineKit`, and runs every check on one that is started::

    KIT = EngineKit(engine=engine, info=info, prompt=[1, 2, 3])

    @pytest.mark.parametrize("check", engine_checks(), ids=lambda check: check.__name__)
    async def test_conforms(check, kit):
        await check(kit)

The model should be one that goes on for at least 16 tokens after ``prompt``. A check fails with
``AssertionError`` and a sentence.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, cast

import msgspec
import numpy as np

from rl_harness.contracts.common import API, Options
from rl_harness.contracts.engine import GenerateRequest, ModelInfo, TokenChunk, TokenEngine
from rl_harness.errors import RlHarnessError
from rl_harness.records.arrays import ids
from rl_harness.records.turn import SamplingParams

#: No check needs this long; an engine that takes longer hangs.
_HANG = 120.0
_TOKENS = 8


class EngineKit(msgspec.Struct, frozen=True, kw_only=True):
    """A started engine, what its ``start`` returned, and a prompt. ``seeded``: it is a model that samples, so that
    seeds and temperature mean something (a replaying test double is not)."""

    engine: TokenEngine
    info: ModelInfo
    prompt: Sequence[int]
    seeded: bool = True


Check = Callable[[EngineKit], Awaitable[None]]


def engine_checks(*, seeded: bool = True) -> list[Check]:
    """The checks that apply."""
    checks: list[Check] = [check_declaration, check_stream, check_length, check_stop_tokens, check_cancellation]
    return [*checks, check_crowd, check_seeds, check_greedy] if seeded else [*checks, check_crowd]


async def check_declaration(kit: EngineKit) -> None:
    """It states the contract's version, documented options, and what it serves."""
    engine = kit.engine
    assert engine.api == API, f"api is {engine.api!r}; this core accepts {API}"
    assert issubclass(engine.Options, Options), "Options is not a subclass of rl_harness.contracts.Options"
    undocumented = [name for name, field in engine.Options.model_fields.items() if not field.description]
    assert not undocumented, f"options without a description: {', '.join(undocumented)}"
    assert kit.info.path is not None, "ModelInfo.path is None: no renderer finds its tokenizer"
    assert not engine.capabilities.trainable or engine.capabilities.weight_transports, "trainable, but takes no weights"
    assert all(isinstance(value, int | float) for value in (await engine.stats()).values()), "stats are not numbers"


async def check_stream(kit: EngineKit) -> None:
    """Chunks carry a finite log-prob and a version for each id, and the last one alone a finish reason."""
    chunks = await _collect(kit, max_tokens=_TOKENS)
    assert chunks, "no chunk came"
    for chunk in chunks:
        assert chunk.ids.dtype == np.int32, f"ids are {chunk.ids.dtype}"
        assert chunk.logps.dtype == np.float32, f"log-probs are {chunk.logps.dtype}"
        assert len(chunk.ids) == len(chunk.logps), f"{len(chunk.ids)} ids have {len(chunk.logps)} log-probs"
        assert bool(np.isfinite(chunk.logps).all()), "a log-prob is not finite"
        assert bool((chunk.logps <= 1e-4).all()), "a log-prob is above 0"
        assert chunk.version == kit.engine.version(), f"a chunk is of version {chunk.version}"
        if kit.info.vocab_size is not None:
            assert bool(((chunk.ids >= 0) & (chunk.ids < kit.info.vocab_size)).all()), "an id is not in the vocabulary"
    ends = [chunk.finish_reason for chunk in chunks]
    assert ends[:-1] == [None] * (len(ends) - 1), f"finish reasons are {ends}"
    assert ends[-1] in ("stop", "length"), f"it finished with {ends[-1]!r}"
    assert chunks[0].cached_tokens <= len(kit.prompt), "more tokens were cached than the prompt has"


async def check_length(kit: EngineKit) -> None:
    """``max_tokens`` is kept to the token."""
    for limit in (1, 3):
        chunks = await _collect(kit, max_tokens=limit)
        count = sum(len(chunk.ids) for chunk in chunks)
        assert count == limit, f"with max_tokens {limit} it gave {count} tokens"
        assert chunks[-1].finish_reason == "length", f"it finished with {chunks[-1].finish_reason!r}"


async def check_stop_tokens(kit: EngineKit) -> None:
    """A stop token ends the completion and is part of it."""
    said = _tokens(await _collect(kit, max_tokens=_TOKENS, temperature=0.0))
    stop = said[min(2, len(said) - 1)]
    chunks = await _collect(kit, max_tokens=_TOKENS, temperature=0.0, stop_token_ids=(stop,))
    again = _tokens(chunks)
    assert again == said[: said.index(stop) + 1], f"stopping at {stop}, {said} became {again}"
    assert chunks[-1].finish_reason == "stop", f"it finished with {chunks[-1].finish_reason!r}"


async def check_cancellation(kit: EngineKit) -> None:
    """Closing an iterator ends that completion alone, at once."""
    stream = _generate(kit, max_tokens=_TOKENS)
    async with asyncio.timeout(_HANG):
        await anext(stream)
        other = asyncio.create_task(_collect(kit, max_tokens=_TOKENS))
        await stream.aclose()
        chunks = await other
    assert chunks[-1].finish_reason is not None, "cancelling one request broke another"


async def check_crowd(kit: EngineKit) -> None:
    """Many requests at once are each answered whole."""
    answers = await asyncio.gather(*(_collect(kit, max_tokens=_TOKENS) for _ in range(12)))
    ends = {chunks[-1].finish_reason for chunks in answers}
    assert ends <= {"stop", "length"}, f"of many at once some finished with {ends}"


async def check_seeds(kit: EngineKit) -> None:
    """A seed gives the same completion whatever else is running; without one completions differ."""
    how: dict[str, Any] = {"max_tokens": _TOKENS, "temperature": 1.5}
    alone = _tokens(await _collect(kit, seed=11, **how))
    crowd = await asyncio.gather(_collect(kit, seed=11, **how), *(_collect(kit, **how) for _ in range(5)))
    assert _tokens(crowd[0]) == alone, "the same seed gave another completion beside other requests"
    assert len({tuple(_tokens(chunks)) for chunks in crowd[1:]}) > 1, "without a seed every completion is the same"


async def check_greedy(kit: EngineKit) -> None:
    """Temperature 0 takes the likeliest token, which it is then certain of."""
    first = await _collect(kit, max_tokens=_TOKENS, temperature=0.0)
    second = await _collect(kit, max_tokens=_TOKENS, temperature=0.0, seed=5)
    assert _tokens(first) == _tokens(second), "two greedy completions differ"


def _generate(kit: EngineKit, **sampling: Any) -> AsyncGenerator[TokenChunk]:
    request = GenerateRequest(id=uuid.uuid4().hex, prompt=ids(kit.prompt), sampling=SamplingParams(**sampling))
    return cast("AsyncGenerator[TokenChunk]", kit.engine.generate(request))


async def _collect(kit: EngineKit, **sampling: Any) -> list[TokenChunk]:
    try:
        async with asyncio.timeout(_HANG), aclosing(_generate(kit, **sampling)) as stream:
            return [chunk async for chunk in stream]
    except RlHarnessError as error:
        raise AssertionError(f"a plain request failed: {error}") from error


def _tokens(chunks: Sequence[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.ids.tolist()]
