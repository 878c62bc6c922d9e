"""Models that cannot run in packed steps (recurrent, hybrid, chunked, with sinks or biases) are served all the same:
by their own forward, with the same promises about log-probabilities, seeds, endings and weights.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
import transformers
from rl_harness.contracts import GenerateRequest, TensorInfo, TokenChunk, WeightManifest
from rl_harness.errors import EngineError, Unsupported, UsageError
from rl_harness.records import SamplingParams, ids
from rl_harness.testing import EngineKit, engine_checks
from rl_harness_torch.engine import TorchEngine, TorchEngineOptions
from rl_harness_torch.models import load_model
from rl_harness_torch.own_forward import OwnModel
from rl_harness_torch.own_scheduler import OwnScheduler, StateStore
from rl_harness_torch.running import Running
from rl_harness_torch.scheduler import Limits
from rl_harness_torch.serving import scheduler_for
from rl_harness_torch.standby import Standby
from rl_harness_torch.testing import OWN_FORWARD_FAMILIES, tiny_model
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

Make = Callable[..., OwnScheduler]

#: A recurrence adds up rounding over the whole sequence.
_ROUNDING = 5e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {family: tiny_model(base / family, family) for family in OWN_FORWARD_FAMILIES}


@pytest.fixture
def make(folders: dict[str, Path]) -> Make:
    def build(family: str, **limits: int) -> OwnScheduler:
        all_limits = {"batch": 8, "prefill": 64, "kv_bytes": 2**24, "context": 256} | limits
        tokenizer = Tokenizer.from_file(str(folders[family] / "tokenizer.json"))
        # No end tokens: these random models like some tokens so much that they would often end at once.
        scheduler, slower = scheduler_for(load_model(folders[family]), tokenizer, (), Limits(**all_limits))
        assert isinstance(scheduler, OwnScheduler)
        assert slower is not None
        return scheduler

    return build


@functools.cache
def plain_model(folder: Path, scale: float) -> Any:
    """The untouched model, its weights times ``scale``."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


def own_logps(folder: Path, sequence: Sequence[int], start: int, scale: float = 1.0) -> list[float]:
    """The log-probs of sequence[start:] by one plain forward of the untouched model."""
    with torch.inference_mode():
        logits = plain_model(folder, scale)(torch.tensor([list(sequence)]), use_cache=False).logits[0].float()
    logps = torch.log_softmax(logits, -1)
    return [logps[i - 1, sequence[i]].item() for i in range(start, len(sequence))]


_names = itertools.count()


def request(prompt: Sequence[int], **sampling: object) -> GenerateRequest:
    params = SamplingParams(**({"max_tokens": 8} | sampling))  # type: ignore[arg-type]
    return GenerateRequest(id=f"r{next(_names)}", prompt=ids(prompt), sampling=params)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def run(scheduler: OwnScheduler, requests: Sequence[Running]) -> list[TokenChunk]:
    while not all(r.ended for r in requests):
        scheduler.step()
    return [r.chunk(scheduler.version) for r in requests]


def run_all(scheduler: OwnScheduler, requests: Sequence[Running]) -> list[TokenChunk]:
    """Like :func:`run` when some are cancelled."""
    while scheduler.busy:
        scheduler.step()
    return [r.chunk(scheduler.version) for r in requests]


def generate(scheduler: OwnScheduler, *requests: GenerateRequest) -> list[TokenChunk]:
    return run(scheduler, [scheduler.add(r) for r in requests])


def assert_exact(folder: Path, prompt: Sequence[int], chunk: TokenChunk) -> None:
    expected = own_logps(folder, [*prompt, *chunk.ids.tolist()], len(prompt))
    assert chunk.logps.tolist() == pytest.approx(expected, abs=_ROUNDING)


def standby(scheduler: OwnScheduler, folder: Path, target: Path) -> Standby:
    """The weights times 0.9, as a backend hands them over."""
    tensors = {name: p.detach().clone() for name, p in plain_model.__wrapped__(folder, 0.9).named_parameters()}
    save_file(tensors, target / "model.safetensors")
    infos = tuple(TensorInfo(name=name, shape=tuple(t.shape), dtype="float32") for name, t in tensors.items())
    manifest = WeightManifest(version=7, kind="full", tensors=infos, digest="")
    return Standby(scheduler.model.model, target, manifest)


@pytest.mark.parametrize("family", OWN_FORWARD_FAMILIES)
def test_every_family_is_served_exactly(family: str, make: Make, folders: dict[str, Path], tmp_path: Path) -> None:
    scheduler = make(family, prefill=16)
    wanted = request(prompt_of(20, 1), seed=1, max_tokens=12)
    (alone,) = generate(scheduler, wanted)
    scheduler.weights_changed(0)  # so that nothing is remembered
    first = scheduler.add(wanted)
    for _ in range(5):
        scheduler.step()
    # Joins of other lengths while the first goes on; they leave at different times.
    later = [scheduler.add(request(prompt_of(n, n), seed=n, max_tokens=m)) for n, m in ((1, 3), (2, 4), (30, 9))]
    chunks = run(scheduler, [first, *later])
    assert chunks[0].ids.tolist() == alone.ids.tolist()
    for running, chunk in zip([first, *later], chunks, strict=True):
        assert_exact(folders[family], running.request.prompt.tolist(), chunk)
    # The next turn of the first conversation, with more of the prompt than of the answer new to the model.
    start = first.tokens.tolist()
    longer = start + prompt_of(3, 2)
    (again,) = generate(scheduler, request(longer, seed=2, max_tokens=4))
    assert again.cached_tokens == (len(start) - 1 if scheduler.model.keeps_state else 0)
    assert_exact(folders[family], longer, again)
    # New weights in the middle of a completion.
    running = scheduler.add(request(prompt_of(10, 3), seed=3, max_tokens=6))
    for _ in range(3):
        scheduler.step()
    old = running.chunk(scheduler.version)
    standby(scheduler, folders[family], tmp_path).install()
    scheduler.weights_changed(7)
    (new,) = run(scheduler, [running])
    assert (old.version, new.version, len(old.ids) + len(new.ids)) == (0, 7, 6)
    assert_exact(folders[family], prompt_of(10, 3), old)
    assert new.logps.tolist() == pytest.approx(
        own_logps(folders[family], running.tokens.tolist(), 10 + len(old.ids), scale=0.9), abs=_ROUNDING
    )


@pytest.mark.parametrize(
    ("family", "keeps", "pieces", "batches"),
    # RecurrentGemma keeps its recurrent state in its layers, where one sequence overwrites the other's; Mamba continues
    # a state by single tokens only, and is silently wrong on more; RWKV mixes sequences that are continued together.
    [
        ("mamba", True, False, "any"),
        ("mamba2", True, True, "any"),
        ("rwkv", True, True, "none"),
        ("bloom", True, True, "equal"),
        ("recurrent_gemma", False, False, "none"),
    ],
)
def test_what_a_cache_is_good_for_is_found_out_when_a_model_is_loaded(
    family: str, keeps: bool, pieces: bool, batches: str, make: Make
) -> None:
    scheduler = make(family)
    model = scheduler.model
    assert (model.keeps_state, model.takes_pieces, model.batches) == (keeps, pieces, batches)
    stats = scheduler.stats()
    assert (stats["own_forward"], stats["own_cache"]) == (1, int(keeps))


def watch_batches(scheduler: OwnScheduler) -> list[tuple[int, int]]:
    """Fills with ``(sequences, tokens)`` of every forward pass."""
    seen: list[tuple[int, int]] = []
    model: Any = scheduler.model.model
    model.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"].shape), with_kwargs=True)
    return seen


@pytest.mark.parametrize("family", ["mamba", "lfm2", "gpt_oss"])
def test_a_group_computes_its_prompt_once_and_goes_on_together(
    family: str, make: Make, folders: dict[str, Path]
) -> None:
    scheduler = make(family)
    seen = watch_batches(scheduler)
    prompt = prompt_of(30)
    chunks = generate(scheduler, *(request(prompt, seed=i, max_tokens=1 + i // 2) for i in range(6)))
    assert [c.cached_tokens for c in chunks] == [0] + [29] * 5
    assert seen == [(1, 29), (6, 1), (4, 1), (2, 1)]
    assert scheduler.counters.computed_tokens == 29 + 6 + 4 + 2
    assert len({tuple(c.ids.tolist()) for c in chunks}) > 3
    for chunk in chunks:
        assert_exact(folders[family], prompt, chunk)


@pytest.mark.parametrize("family", ["mamba", "jamba", "rwkv", "gpt_oss"])
def test_bf16_hides_nothing_when_a_model_is_looked_at(family: str, folders: dict[str, Path]) -> None:
    exact, rounded = (OwnModel(load_model(folders[family], dtype)) for dtype in ("fp32", "bf16"))
    assert rounded.model.dtype == torch.bfloat16
    for name in ("keeps_state", "takes_pieces", "batches"):
        assert getattr(rounded, name) == getattr(exact, name)
    assert rounded.state_bytes(100) < exact.state_bytes(100)
    assert all(
        torch.equal(new, old)
        for new, old in zip(rounded.model.parameters(), load_model(folders[family], "bf16").parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("family", "together"), [("mamba", [(3, 1)]), ("lfm2", [(1, 1), (2, 1)]), ("rwkv", [(1, 1), (1, 1), (1, 1)])]
)
def test_what_can_be_computed_together_is(
    family: str, together: list[tuple[int, int]], make: Make, folders: dict[str, Path]
) -> None:
    scheduler = make(family)
    prompts = [prompt_of(5, 1), prompt_of(9, 2), prompt_of(9, 3)]
    requests = [scheduler.add(request(prompt, seed=1)) for prompt in prompts]
    scheduler.step()
    seen = watch_batches(scheduler)
    scheduler.step()
    assert seen == together
    requests[1].cancelled = True
    for prompt, running, chunk in zip(prompts, requests, run_all(scheduler, requests), strict=True):
        assert_exact(folders[family], prompt, chunk)
        assert len(chunk.ids) == (2 if running.cancelled else 8)


def test_prompts_that_begin_alike_share_the_beginning(make: Make, folders: dict[str, Path]) -> None:
    scheduler = make("lfm2")
    shared = prompt_of(40)
    prompts = [shared + prompt_of(5, i) for i in range(1, 5)]
    chunks = generate(scheduler, *(request(p, seed=1) for p in prompts))
    assert [c.cached_tokens for c in chunks] == [0, 0, 40, 40]  # the second one shows where they part
    for prompt, chunk in zip(prompts, chunks, strict=True):
        assert_exact(folders["lfm2"], prompt, chunk)


def test_a_long_addition_is_not_fed_token_by_token(make: Make, folders: dict[str, Path]) -> None:
    scheduler = make("mamba")
    generate(scheduler, request(prompt_of(20), seed=1, max_tokens=2))
    longer = prompt_of(20) + prompt_of(40, 1)
    before = scheduler.counters.computed_tokens
    (chunk,) = generate(scheduler, request(longer, seed=2, max_tokens=1))
    assert chunk.cached_tokens == 0
    assert scheduler.counters.computed_tokens - before == 60
    assert_exact(folders["mamba"], longer, chunk)


def test_a_long_prompt_does_not_stop_the_others(make: Make) -> None:
    scheduler = make("bloom", prefill=16)
    first = scheduler.add(request(prompt_of(5), seed=1, max_tokens=20))
    scheduler.step()
    scheduler.add(request(prompt_of(100, 1), seed=2))
    lengths = []
    for _ in range(4):
        scheduler.step()
        lengths.append(len(first.tokens))
    assert lengths == [7, 8, 9, 10]


def test_memory_is_bounded(make: Make) -> None:
    scheduler = make("bloom", batch=4)
    limit = scheduler.model.state_bytes(60)
    scheduler = make("bloom", batch=4, kv_bytes=limit)
    for round_ in range(3):
        requests = [scheduler.add(request(prompt_of(20, 10 * round_ + i), seed=i)) for i in range(4)]
        while not all(r.ended for r in requests):
            scheduler.step()
            stats = scheduler.stats()
            assert stats["running"] <= 2
            assert stats["running_bytes"] + stats["prefix_bytes"] <= limit
    lonely = make("bloom", kv_bytes=1)
    assert [len(c.ids) for c in generate(lonely, *(request(prompt_of(5, i), seed=i) for i in range(3)))] == [8] * 3
    assert lonely.stats()["prefix_bytes"] == 0


def test_endings(make: Make) -> None:
    scheduler = make("mamba", context=40)
    (free,) = generate(scheduler, request(prompt_of(10), seed=5))
    tokenizer = Tokenizer.from_file(scheduler.model.model.name_or_path + "/tokenizer.json")
    token = int(free.ids[4])
    (stopped,) = generate(scheduler, request(prompt_of(10), seed=5, stop_token_ids=(token,)))
    assert stopped.finish_reason == "stop"
    assert stopped.ids.tolist() == free.ids.tolist()[: free.ids.tolist().index(token) + 1]
    texts = [tokenizer.decode([int(i)], skip_special_tokens=False) for i in free.ids]
    at = next(i for i, text in enumerate(texts) if i > 0 and text and "\ufffd" not in text)
    (cut,) = generate(scheduler, request(prompt_of(10), seed=5, stop=("never this", texts[at])))
    assert cut.finish_reason == "stop"
    assert tokenizer.decode(cut.ids.tolist(), skip_special_tokens=False).endswith(texts[at])
    (full,) = generate(scheduler, request(prompt_of(30), seed=5, max_tokens=None))
    assert (len(full.ids), full.finish_reason) == (10, "length")
    with pytest.raises(UsageError, match="40 tokens and the context holds 40"):
        scheduler.add(request(prompt_of(40)))


def test_a_cancelled_request_leaves_and_the_others_go_on(make: Make) -> None:
    scheduler = make("mamba", batch=2)
    doomed, kept, waiting = (scheduler.add(request(prompt_of(10, i), seed=i)) for i in range(3))
    scheduler.step()
    doomed.cancelled = True
    kept_chunk, waiting_chunk = run(scheduler, [kept, waiting])
    assert doomed.finish is None
    assert len(doomed.tokens) == 11
    assert len(kept_chunk.ids) == len(waiting_chunk.ids) == 8
    assert not scheduler.busy


def test_damaged_weights_fail_the_request_and_are_not_remembered(make: Make) -> None:
    scheduler = make("mamba")
    running = scheduler.add(request(prompt_of(20), seed=1))
    scheduler.step()
    with torch.no_grad():
        scheduler.model.model.get_input_embeddings().weight.fill_(float("nan"))
    scheduler.weights_changed(1)
    scheduler.step()
    assert isinstance(running.error, EngineError)
    assert not scheduler.busy
    assert scheduler.stats()["prefix_bytes"] == scheduler.store.nbytes


@pytest.mark.parametrize("family", ["mamba", "lfm2", "gpt_oss"])
def test_any_order_of_arrivals_cancellations_and_updates_keeps_every_log_prob_exact(
    family: str, make: Make, folders: dict[str, Path]
) -> None:
    rng = np.random.default_rng(1)
    scheduler = make(family, batch=4, prefill=16, kv_bytes=200_000)
    trunk = prompt_of(50)
    seen: list[tuple[Running, list[TokenChunk]]] = []

    def collect_new() -> None:
        for running, chunks in seen:
            if running.unsent:
                chunks.append(running.chunk(scheduler.version))

    for i in range(40):
        if len(seen) < 10 and rng.random() < 0.5:
            earlier = seen[rng.integers(len(seen))][0].tokens.tolist() if seen and rng.random() < 0.5 else trunk
            prompt = earlier[: rng.integers(1, len(earlier) + 1)][:60] + prompt_of(int(rng.integers(0, 6)), i)
            seen.append((scheduler.add(request(prompt, seed=i, max_tokens=int(rng.integers(1, 20)))), []))
        elif seen and rng.random() < 0.1:
            seen[rng.integers(len(seen))][0].cancelled = True
        elif scheduler.version < 2 and rng.random() < 0.1:
            collect_new()
            with torch.no_grad():
                for parameter in scheduler.model.model.parameters():
                    parameter.mul_(0.9)
            scheduler.weights_changed(scheduler.version + 1)
        scheduler.step()
    while scheduler.busy:
        scheduler.step()
    collect_new()
    assert scheduler.counters.cached_tokens > 0
    for running, chunks in seen:
        at = running.prompt_length
        for chunk in chunks:
            end = at + len(chunk.ids)
            expected = own_logps(folders[family], running.tokens[:end].tolist(), at, scale=0.9**chunk.version)
            assert chunk.logps.tolist() == pytest.approx(expected, abs=_ROUNDING)
            at = end
        assert at == len(running.tokens)


# ------------------------------------------------------------------------------------------------- what is refused


def test_the_model_is_its_own_again_when_packed_steps_did_not_do(make: Make, folders: dict[str, Path]) -> None:
    before = load_model(folders["gpt_oss"]).config._attn_implementation
    assert make("gpt_oss").model.model.config._attn_implementation == before != "rl_harness_packed"


def test_an_encoder_decoder_model_is_refused() -> None:
    config = transformers.T5Config(d_model=16, d_kv=8, num_layers=1, num_heads=2, d_ff=16, vocab_size=64)
    model: Any = transformers.T5ForConditionalGeneration(config)
    limits = Limits(batch=1, prefill=64, kv_bytes=2**20, context=64)
    with pytest.raises(Unsupported, match="T5ForConditionalGeneration is an encoder-decoder model"):
        scheduler_for(model.eval(), Tokenizer.from_str(_ANY_TOKENIZER), (), limits)


def test_a_model_that_looks_ahead_is_refused() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    wide = {"intermediate_size": 16, "initializer_range": 0.4}
    encoder: Any = transformers.BertLMHeadModel(transformers.BertConfig(**sizes, **wide))
    with pytest.raises(Unsupported, match="BertLMHeadModel is not causal"):
        OwnModel(encoder.eval())
    decoder: Any = transformers.BertLMHeadModel(transformers.BertConfig(**sizes, **wide, is_decoder=True))
    assert OwnModel(decoder.eval()).vocab_size == 64


def test_a_model_whose_cache_is_broken_is_computed_without_it(folders: dict[str, Path]) -> None:
    model: Any = load_model(folders["lfm2"])
    plain = model.forward

    def forgetful(input_ids: torch.Tensor, cache: Any = None, **others: Any) -> Any:
        return plain(input_ids, cache=None, **others)

    model.forward = forgetful
    assert not OwnModel(model).keeps_state


_ANY_TOKENIZER = json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}})


# -------------------------------------------------------------------------------------------------- the state store


def test_states_are_found_by_exact_beginnings_and_dropped_oldest_first(make: Make) -> None:
    model = make("mamba").model
    store = StateStore()
    sequences = [ids(prompt_of(n, n)) for n in (5, 6, 7)]
    for sequence in sequences:
        _, state = model.forward(sequence)
        assert state is not None
        store.insert(sequence, state)
    longer = ids([*sequences[0], 1, 2])
    assert store.find(longer)[0] == 5
    assert store.find(sequences[1][:-1]) == (0, None)
    assert store.shared(ids([*sequences[1][:4], 9])) == 4
    store.shrink(store.nbytes - 1)
    assert [store.find(sequence)[0] for sequence in sequences] == [5, 0, 7]  # the first was used meanwhile
    store.clear()
    assert store.nbytes == 0


# ---------------------------------------------------------------------------------------------- in its own process

Check = Callable[[EngineKit], Awaitable[None]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kit(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineKit]:
    folder = tiny_model(tmp_path_factory.mktemp("served") / "mamba", "mamba", eos_token_id=None)
    engine = TorchEngine(TorchEngineOptions(threads=1, device="cpu", stream_interval=0))
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]  # the shortest handler there is
    logger = logging.getLogger("rl_harness.engine.torch")
    logger.addHandler(handler)
    info = await engine.start(str(folder))
    logger.removeHandler(handler)
    (record,) = records
    assert "served by its own forward and cache, sequences of any length at a time, which is" in record.getMessage()
    yield EngineKit(engine=engine, info=info, prompt=[1, 2, 3])
    await engine.close()


@pytest.mark.parametrize("check", engine_checks(), ids=lambda check: check.__name__)
@pytest.mark.asyncio(loop_scope="module")
async def test_the_engine_conforms(check: Check, kit: EngineKit) -> None:
    await check(kit)


@pytest.mark.asyncio(loop_scope="module")
async def test_its_statistics_say_how_it_serves(kit: EngineKit) -> None:
    stats = await kit.engine.stats()
    assert (stats["own_forward"], stats["own_cache"]) == (1, 1)
