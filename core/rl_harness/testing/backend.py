"""Conformance checks for training backends: what algorithms and the training job rely on.

A plugin starts its backend on a small model, describes it once as a :class:`BackendKit`, and runs every check::

    @pytest.mark.parametrize("check", backend_checks(), ids=lambda check: check.__name__)
    async def test_conforms(check, kit):
        await check(kit)

The backend should have been started with a learning rate of about 0.001, no warm-up, and room for a few dozen tokens
at a time, so that an episode does not fit at once. Checks train, so the model should be of no value. A check fails
with ``AssertionError`` and a sentence.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl_harness.contracts.algorithm import Loss, LossResult
from rl_harness.contracts.backend import Backend, LossSpec
from rl_harness.contracts.common import API, Options
from rl_harness.errors import RlHarnessError, Unsupported
from rl_harness.records.arrays import LogpArray, ids, logps
from rl_harness.records.sample import Sample, TokenBatch

_HERE = "rl_harness.testing.backend"
_METRICS = ("loss", "grad_norm", "learning_rate", "tokens", "tokens_computed", "seconds")


class BackendKit(msgspec.Struct, frozen=True, kw_only=True):
    """A started backend, the size of its model's vocabulary, and a folder for checkpoints."""

    backend: Backend
    vocab_size: int
    scratch: Path


Check = Callable[[BackendKit], Awaitable[None]]


def backend_checks() -> list[Check]:
    """The checks that apply to every backend."""
    return [
        check_declaration,
        check_forward,
        check_train_step,
        check_advantage_signs,
        check_units,
        check_refusals,
        check_weights,
        check_checkpoint,
    ]


class Likelihood(Loss):
    """-Σ weight · advantage · logp. ``poison`` is added to every gradient."""

    needs = frozenset({"logp"})

    def __init__(self, *, poison: float = 0.0) -> None:
        self.poison = poison

    def __call__(self, outputs: Mapping[str, LogpArray], batch: TokenBatch) -> LossResult:
        pull = batch.weight * batch.mask * batch.advantage
        value = -float(pull @ outputs["logp"])
        return LossResult(value=value, grads={"logp": logps(self.poison - pull)}, sums={})


class WholeEpisodes(Likelihood):
    """Refuses to be given a part of an episode; ``tokens`` is how many each has."""

    unit = "episode"

    def __init__(self, *, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def __call__(self, outputs: Mapping[str, LogpArray], batch: TokenBatch) -> LossResult:
        counts = np.bincount(batch.episode)
        if (counts != self.tokens).any():
            raise ValueError(f"episodes of {self.tokens} tokens arrived with {counts.tolist()}")
        return super().__call__(outputs, batch)


class Impossible(Likelihood):
    """Needs an output no backend has."""

    needs = frozenset({"logp", "horoscope"})


async def check_declaration(kit: BackendKit) -> None:
    """It states the contract's version, documented options, and what it can do."""
    backend = kit.backend
    assert backend.api == API, f"api is {backend.api!r}; this core accepts {API}"
    assert issubclass(backend.Options, Options), "Options is not a subclass of rl_harness.contracts.Options"
    undocumented = [name for name, field in backend.Options.model_fields.items() if not field.description]
    assert not undocumented, f"options without a description: {', '.join(undocumented)}"
    assert "logp" in backend.capabilities.outputs, "it cannot compute logp, which every loss needs"
    assert backend.capabilities.weight_transports, "its weights can go nowhere"


async def check_forward(kit: BackendKit) -> None:
    """Every sample gets its own values, in order, whatever it is beside."""
    samples = conversations(kit.vocab_size)
    for name in sorted(kit.backend.capabilities.outputs):
        together = (await kit.backend.forward(samples, [name]))[name]
        assert len(together) == len(samples), f"{name}: {len(together)} arrays for {len(samples)} samples"
        for sample, values in zip(samples, together, strict=True):
            assert len(values) == len(sample.completion), f"{name}: {len(values)} values for {sample.turn}"
            assert bool(np.isfinite(values).all()), f"{name} of {sample.turn} is not finite"
            alone = (await kit.backend.forward([sample], [name]))[name][0]
            worst = float(np.abs(values - alone).max())
            assert worst < 0.05, f"{name} of {sample.turn} changes by {worst} with what is beside it"


async def check_train_step(kit: BackendKit) -> None:
    """A step makes what it trains on likelier, raises the version by one, and reports what it did."""
    samples, before = conversations(kit.vocab_size), kit.backend.version()
    likelihood = await _likelihood(kit, samples)
    result = await kit.backend.train_step(samples, _spec("Likelihood"))
    assert result.version == kit.backend.version() == before + 1, f"version {before} became {result.version}"
    for name in _METRICS:
        assert np.isfinite(result.metrics.get(name, np.nan)), f"metric {name} is {result.metrics.get(name)}"
    logical = sum(len(sample.prompt) + len(sample.completion) for sample in samples)
    assert result.metrics["tokens"] == logical, f"tokens is {result.metrics['tokens']}, not {logical}"
    assert await _likelihood(kit, samples) > likelihood, "what was trained on became less likely"


async def check_advantage_signs(kit: BackendKit) -> None:
    """A negative advantage and a mask are honoured token by token."""
    good, bad = conversations(kit.vocab_size)[:2]
    bad = msgspec.structs.replace(bad, advantage=logps(-bad.advantage))
    silent = logps(np.zeros(len(bad.completion)))
    start = [await _likelihood(kit, [sample]) for sample in (good, bad)]
    await kit.backend.train_step([good, bad], _spec("Likelihood"))
    end = [await _likelihood(kit, [sample]) for sample in (good, bad)]
    assert end[0] - start[0] > end[1] - start[1], "opposite advantages did not part the samples"
    twin = msgspec.structs.replace(good, turn="masked", episode="masked", mask=silent[: len(good.completion)])
    one, two = [await _gradient(kit, samples) for samples in ([good], [good, twin])]
    assert np.isclose(one, two, rtol=0.02), f"a masked sample changed the gradient norm from {one} to {two}"


async def check_units(kit: BackendKit) -> None:
    """A loss whose unit is the episode sees episodes whole, however they are split for computing."""
    samples = conversations(kit.vocab_size)
    tokens = sum(len(sample.completion) for sample in samples if sample.episode == samples[0].episode)
    await kit.backend.train_step(samples, _spec("WholeEpisodes", tokens=tokens))


async def check_refusals(kit: BackendKit) -> None:
    """What cannot be trained on is refused with an error, and the model stays as it is."""
    samples, version = conversations(kit.vocab_size), kit.backend.version()
    before = await kit.backend.forward(samples, ["logp"])
    outside = msgspec.structs.replace(samples[0], completion=ids(samples[0].completion + kit.vocab_size))
    broken = msgspec.structs.replace(samples[0], behaviour_logps=logps(np.full(len(samples[0].mask), np.nan)))
    for why, batch, spec in (
        ("ids outside the vocabulary", [*samples, outside], _spec("Likelihood")),
        ("a log-prob that is not a number", [broken, *samples], _spec("Likelihood")),
        ("a gradient that is not finite", samples, _spec("Likelihood", poison=float("nan"))),
        ("an output it does not have", samples, _spec("Impossible")),
        ("an option the loss does not take", samples, _spec("Likelihood", nonsense=1)),
        ("a loss that does not exist", samples, LossSpec(target=f"{_HERE}:Nothing")),
    ):
        try:
            await kit.backend.train_step(batch, spec)
        except RlHarnessError:
            continue
        raise AssertionError(f"it trained on {why}")
    assert kit.backend.version() == version, "a refused step raised the version"
    after = await kit.backend.forward(samples, ["logp"])
    same = all(np.array_equal(a, b) for a, b in zip(before["logp"], after["logp"], strict=True))
    assert same, "a refused step changed the model"


async def check_weights(kit: BackendKit) -> None:
    """Weights on their way are those of their version, stay as they are until released, and are named in full."""
    backend = kit.backend
    try:
        await backend.weights("pigeon")
    except Unsupported:
        pass
    else:
        raise AssertionError("it gave weights by a transport that does not exist")
    source = await backend.weights(backend.capabilities.weight_transports[0])
    try:
        assert source.manifest.version == backend.version(), f"weights of version {source.manifest.version}"
        if source.transport == "file":
            assert source.path is not None, "no path with transport file"
            assert list(source.path.glob("*.safetensors")), f"no safetensors file in {source.path}"
        before = [(info.name, bytes(data)) async for info, data in source.buckets()]
        assert [name for name, _ in before] == [info.name for info in source.manifest.tensors], "names out of order"
        await backend.train_step(conversations(kit.vocab_size), _spec("Likelihood"))
        assert [(info.name, bytes(data)) async for info, data in source.buckets()] == before, "a step tore weights"
        second = await backend.weights(source.transport)
        try:
            changed = [bytes(data) async for _, data in second.buckets()] != [data for _, data in before]
            assert changed, "the next version has the same weights"
            assert second.manifest.digest != source.manifest.digest, "other weights have the same digest"
        finally:
            await second.release()
    finally:
        await source.release()


async def check_checkpoint(kit: BackendKit) -> None:
    """A checkpoint is a model folder, and training goes on from it as it would have."""
    backend, samples, path = kit.backend, conversations(kit.vocab_size), kit.scratch / "runs" / "checkpoint"
    await backend.train_step(samples, _spec("Likelihood"))
    version = backend.version()
    await backend.save(path, optimizer=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (path / name).is_file(), f"the checkpoint has no {name}"
    left = sorted(entry.name for entry in path.parent.iterdir())
    assert left == ["checkpoint"], f"saving left {left}"
    await backend.train_step(samples, _spec("Likelihood"))
    expected = await backend.forward(samples, ["logp"])
    assert await backend.load(path) == backend.version() == version, "loading gave another version"
    await backend.train_step(samples, _spec("Likelihood"))
    found = await backend.forward(samples, ["logp"])
    for a, b in zip(expected["logp"], found["logp"], strict=True):
        assert np.allclose(a, b, atol=1e-5), "the step after loading was not the step that had been made"


def conversations(vocab_size: int) -> list[Sample]:
    """Two groups of two episodes of two turns, which share prefixes as real ones do."""
    rng = np.random.default_rng(0)
    samples = []
    for group in range(2):
        prompt = rng.integers(0, vocab_size, 10)
        for episode in range(2):
            first, reply, second = (rng.integers(0, vocab_size, n) for n in (5, 4, 6))
            name = f"group {group} episode {episode}"
            for turn, (before, completion) in enumerate(
                ((prompt, first), (np.concatenate([prompt, first, reply]), second))
            ):
                samples.append(_sample(f"{name} turn {turn}", name, f"group {group}", before, completion))
    return samples


def _sample(turn: str, episode: str, group: str, prompt: NDArray[Any], completion: NDArray[Any]) -> Sample:
    n = len(completion)
    return Sample(
        turn=turn,
        episode=episode,
        group=group,
        policy="policy",
        temperature=1.0,
        prompt=ids(prompt),
        completion=ids(completion),
        mask=logps(np.ones(n)),
        behaviour_logps=logps(np.full(n, -3.0)),
        versions=ids(np.zeros(n)),
        advantage=logps(np.ones(n)),
        weight=logps(np.full(n, 1 / 64)),
    )


def _spec(name: str, **options: object) -> LossSpec:
    return LossSpec(target=f"{_HERE}:{name}", options=options)


async def _likelihood(kit: BackendKit, samples: Sequence[Sample]) -> float:
    return float(sum(values.sum() for values in (await kit.backend.forward(samples, ["logp"]))["logp"]))


async def _gradient(kit: BackendKit, samples: Sequence[Sample]) -> float:
    """The gradient norm of a step that is then taken back."""
    path = kit.scratch / "before"
    await kit.backend.save(path, optimizer=True)
    result = await kit.backend.train_step(samples, _spec("Likelihood"))
    await kit.backend.load(path)
    return result.metrics["grad_norm"]
