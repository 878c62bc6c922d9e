"""The embedded engine as the gateway uses it: a worker process, streams, cancellation, new weights, failures."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from rl_harness.contracts import GenerateRequest, TensorInfo, TokenChunk, WeightManifest, WeightSource
from rl_harness.errors import EngineError, Unavailable, Unsupported, UsageError
from rl_harness.records import SamplingParams, ids
from rl_harness_torch.engine import TorchEngine, TorchEngineOptions
from rl_harness_torch.testing import tiny_model
from safetensors.torch import load_file, save_file

SMOLLM2 = "smollm2-135m-instruct"

# Starting a worker takes seconds (it imports torch and transformers), so most tests share one, and one event loop.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=4096)


async def started(folder: Path) -> TorchEngine:
    engine = TorchEngine(TorchEngineOptions(threads=1, device="cpu", stream_interval=0, context_length=4000))
    await engine.start(str(folder))
    return engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[TorchEngine]:
    engine = await started(folder)
    yield engine
    await engine.close()


def request(name: str, prompt: Sequence[int], **sampling: object) -> GenerateRequest:
    # Byte 256 ends a completion; the tests want them as long as they ask for.
    params = SamplingParams(**({"max_tokens": 8, "temperature": 0.7} | sampling))  # type: ignore[arg-type]
    return GenerateRequest(id=name, prompt=ids(prompt), sampling=params)


async def collect(engine: TorchEngine, wanted: GenerateRequest) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(wanted)]


class FolderSource(WeightSource):
    """A folder of safetensors, as a backend writes it."""

    transport = "file"

    def __init__(self, path: Path, version: int, **changes: object) -> None:
        self.path = path
        tensors = tuple(
            TensorInfo(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in load_file(path / "model.safetensors").items()
        )
        fields = {"version": version, "kind": "full", "tensors": tensors, "digest": ""} | changes
        self.manifest = WeightManifest(**fields)  # type: ignore[arg-type]

    def buckets(self) -> AsyncIterator[tuple[TensorInfo, memoryview]]:
        raise Unsupported("only files")


def scaled(folder: Path, target: Path, factor: float) -> Path:
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v * factor for k, v in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    return target


async def test_it_says_what_it_serves(engine: TorchEngine, folder: Path) -> None:
    capabilities = engine.capabilities
    assert capabilities.trainable
    assert capabilities.weight_transports == ("file",)
    assert capabilities.context_length == 4000  # asked for; the model has 4096
    with pytest.raises(EngineError, match="started twice"):
        await engine.start(str(folder))


async def test_tokens_stream_as_they_are_sampled(engine: TorchEngine) -> None:
    chunks = await collect(engine, request("a", range(20), max_tokens=30, seed=3, top_logprobs=2))
    assert len(chunks) > 5
    assert all(len(c.ids) == len(c.logps) == len(c.top_logprobs) > 0 for c in chunks)
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason in ("stop", "length")
    assert {c.version for c in chunks} == {engine.version()}
    assert all(len(top) == 2 for c in chunks for top in c.top_logprobs)
    assert np.isfinite(np.concatenate([c.logps for c in chunks])).all()


async def test_many_conversations_at_once(engine: TorchEngine) -> None:
    before = await engine.stats()
    results = await asyncio.gather(
        *(collect(engine, request(str(i), range(i + 1), seed=i, max_tokens=i + 1)) for i in range(40))
    )
    for i, chunks in enumerate(results):
        count = sum(len(c.ids) for c in chunks)
        assert count == i + 1 or chunks[-1].finish_reason == "stop"
    after = await engine.stats()
    assert after["requests"] - before["requests"] == 40
    assert after["running"] == after["waiting"] == 0
    assert after["steps"] - before["steps"] < sum(range(41)) / 3  # they ran together


async def test_closing_the_iterator_cancels_it_in_the_engine(engine: TorchEngine) -> None:
    before = await engine.stats()
    stream = engine.generate(request("endless", range(5), max_tokens=3900, temperature=5.0))
    async with contextlib.aclosing(stream):  # type: ignore[type-var]  # an async generator
        await anext(stream)
    await collect(engine, request("next", range(5), max_tokens=4))
    after = await engine.stats()
    assert after["running"] == 0
    assert after["sampled_tokens"] - before["sampled_tokens"] < 2000


async def test_a_request_that_can_never_be_served_harms_nobody(engine: TorchEngine) -> None:
    with pytest.raises(UsageError, match="vocabulary"):
        await collect(engine, request("bad", [1, 9999]))
    with pytest.raises(Unsupported, match="at most 20 top_logprobs"):
        await collect(engine, request("greedy for detail", [1], top_logprobs=21))
    assert await collect(engine, request("good", [1, 2]))


async def test_new_weights_take_effect_between_two_tokens(engine: TorchEngine, folder: Path, tmp_path: Path) -> None:
    old = engine.version()
    target = scaled(folder, tmp_path / "v1", 0.5)
    first = asyncio.Event()
    chunks: list[TokenChunk] = []

    async def long_one() -> None:
        async for chunk in engine.generate(request("long", range(10), max_tokens=1500, temperature=3.0, seed=1)):
            chunks.append(chunk)
            first.set()

    task = asyncio.create_task(long_one())
    await first.wait()
    await engine.prepare(FolderSource(target, old + 1))
    assert engine.version() == old
    await engine.commit(old + 1)
    assert engine.version() == old + 1
    await task
    await engine.prepare(FolderSource(folder, old + 2))
    await engine.commit(old + 2)
    versions = [c.version for c in chunks]
    assert versions == sorted(versions)
    assert set(versions) == {old, old + 1}

    from transformers import AutoModelForCausalLM

    sequence = [*range(10), *np.concatenate([c.ids for c in chunks]).tolist()]
    ours = np.concatenate([c.logps for c in chunks])
    label = np.repeat(versions, [len(c.ids) for c in chunks])
    model = AutoModelForCausalLM.from_pretrained(folder)
    for version in (old, old + 1):
        if version > old:
            model.load_state_dict(load_file(target / "model.safetensors"), strict=False)
        with torch.inference_mode():
            logits = model(torch.tensor([sequence])).logits[0] / 3.0
        theirs = torch.log_softmax(logits, -1)[torch.arange(9, len(sequence) - 1), torch.tensor(sequence[10:])].numpy()
        assert np.abs(ours - theirs)[label == version].max() < 1e-4


async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve_on(
    engine: TorchEngine, folder: Path, tmp_path: Path
) -> None:
    version = engine.version()
    before = await collect(engine, request("before", range(5), seed=1))
    good = FolderSource(folder, 1)
    partial, misshapen, truncated = (tmp_path / name for name in ("partial", "misshapen", "truncated"))
    for path in (partial, misshapen, truncated):
        path.mkdir()
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, partial / "model.safetensors")
    save_file(tensors | {name: tensors[name][:5].clone()}, misshapen / "model.safetensors")
    (truncated / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:2000])
    wrong = [
        (FolderSource(partial, 1), f"{name} is missing"),
        (FolderSource(misshapen, 1), f"{name} is .*the served model's"),
        (FolderSource(partial, 1, tensors=good.manifest.tensors), f"{name} is in only one of manifest and files"),
        (FolderSource(misshapen, 1, tensors=good.manifest.tensors), "the manifest says"),
    ]
    for source, message in wrong:
        with pytest.raises(EngineError, match=message):
            await engine.prepare(source)
    good.path = truncated
    with pytest.raises(EngineError, match="cannot be read"):
        await engine.prepare(good)
    with pytest.raises(Unsupported, match="adapter"):
        await engine.prepare(FolderSource(folder, 1, kind="adapter"))
    with pytest.raises(EngineError, match="no prepared weights to commit as version 1"):
        await engine.commit(1)
    assert engine.version() == version
    after = await collect(engine, request("after", range(5), seed=1))
    assert np.concatenate([c.ids for c in before]).tolist() == np.concatenate([c.ids for c in after]).tolist()


async def test_a_killed_worker_fails_every_request_with_the_reason(folder: Path) -> None:
    engine = await started(folder)
    tasks = [asyncio.create_task(collect(engine, request(str(i), [i], max_tokens=3900))) for i in range(3)]
    await collect(engine, request("another", [9]))
    assert engine._worker is not None
    os.kill(engine._worker.pid, signal.SIGKILL)
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, EngineError)
        assert "SIGKILL" in str(outcome)
    with pytest.raises(EngineError, match="SIGKILL"):
        await collect(engine, request("later", [1]))
    await engine.close()


async def test_a_folder_without_a_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    engine = TorchEngine(TorchEngineOptions(threads=1))
    for refuses in (engine.preflight_model, engine.start):
        with pytest.raises(Unavailable, match=r"has no config\.json"):
            await refuses(str(tmp_path))
    with pytest.raises(EngineError, match="not running"):
        await collect(engine, request("a", [1]))


async def test_the_event_loop_stays_free_while_the_model_computes(engine: TorchEngine) -> None:
    task = asyncio.create_task(collect(engine, request("a", range(200), max_tokens=500, temperature=3.0)))
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 500  # far more often than there were steps to wait for


@pytest.mark.needs("smollm2")
async def test_a_real_model_answers() -> None:
    from tokenizers import Tokenizer

    engine = TorchEngine(TorchEngineOptions(device="cpu"))
    info = await engine.start(SMOLLM2)
    try:
        assert info.path is not None
        tokenizer = Tokenizer.from_file(str(info.path / "tokenizer.json"))
        text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        prompt = tokenizer.encode(text).ids
        chunks = await collect(engine, request("a", prompt, temperature=0, max_tokens=16, stop=("France is Pa",)))
        completion = np.concatenate([c.ids for c in chunks]).tolist()
        assert tokenizer.decode(completion) == "The capital of France is Paris"
        assert chunks[-1].finish_reason == "stop"
    finally:
        await engine.close()
