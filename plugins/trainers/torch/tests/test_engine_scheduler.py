"""Continuous batching computes, for every request, what the model computes for that request alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from rl_harness.contracts import GenerateRequest, TensorInfo, TokenChunk, WeightManifest
from rl_harness.errors import EngineError, Unsupported, UsageError
from rl_harness.records import SamplingParams, ids
from rl_harness_torch.attention import PackedModel
from rl_harness_torch.models import end_token_ids, load_model
from rl_harness_torch.packed_scheduler import PackedScheduler as Scheduler
from rl_harness_torch.running import Running
from rl_harness_torch.scheduler import Limits
from rl_harness_torch.standby import Standby
from rl_harness_torch.testing import FAMILIES, tiny_model
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

END = 256
Make = Callable[..., Scheduler]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {family: tiny_model(base / family, family) for family in FAMILIES}


@pytest.fixture
def make(folders: dict[str, Path]) -> Make:
    def build(family: str = "llama", *, end: bool = False, **limits: int) -> Scheduler:
        folder = folders[family]
        model = load_model(folder)
        all_limits = {"batch": 8, "prefill": 64, "kv_bytes": 2**24, "context": 256} | limits
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # These random models like some tokens so much that they would often end at once.
        return Scheduler(PackedModel(model), tokenizer, end_token_ids(model) if end else (), Limits(**all_limits))

    return build


def own_logps(folder: Path, sequence: Sequence[int], start: int, temperature: float = 1.0) -> list[float]:
    """The log-probs of sequence[start:] by a plain forward of the untouched model."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits = model(torch.tensor([list(sequence)])).logits[0].float() / temperature
    logps = torch.log_softmax(logits, -1)
    return [logps[i - 1, sequence[i]].item() for i in range(start, len(sequence))]


_names = itertools.count()


def request(prompt: Sequence[int], **sampling: object) -> GenerateRequest:
    params = SamplingParams(**({"max_tokens": 12} | sampling))  # type: ignore[arg-type]
    return GenerateRequest(id=f"r{next(_names)}", prompt=ids(prompt), sampling=params)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def run(scheduler: Scheduler, requests: Sequence[Running]) -> list[TokenChunk]:
    while any(r.finish is None and r.error is None for r in requests):
        scheduler.step()
    return [r.chunk(scheduler.version) for r in requests]


def generate(scheduler: Scheduler, *requests: GenerateRequest) -> list[TokenChunk]:
    return run(scheduler, [scheduler.add(r) for r in requests])


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_a_plain_forward_whatever_else_runs(
    family: str, make: Make, folders: dict[str, Path]
) -> None:
    scheduler = make(family, prefill=16)
    first = scheduler.add(request(prompt_of(30, 1), seed=1, max_tokens=30))
    for _ in range(5):
        scheduler.step()
    # Joins of other lengths, in several pieces and lanes, while the first goes on; they leave at different times.
    later = [scheduler.add(request(prompt_of(n, n), seed=n, max_tokens=m)) for n, m in ((3, 4), (50, 20), (150, 9))]
    chunks = run(scheduler, [first, *later])
    for running, chunk in zip([first, *later], chunks, strict=True):
        prompt = running.request.prompt.tolist()
        expected = own_logps(folders[family], prompt + chunk.ids.tolist(), len(prompt))
        assert chunk.logps.tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_continued_conversation_computes_only_what_is_new(family: str, make: Make, folders: dict[str, Path]) -> None:
    scheduler = make(family)
    start = prompt_of(40)
    (turn,) = generate(scheduler, request(start, seed=1))
    before = scheduler.counters.computed_tokens
    longer = start + turn.ids.tolist() + prompt_of(10, 2)
    (again,) = generate(scheduler, request(longer, seed=2, max_tokens=5))
    assert again.cached_tokens == len(start) + len(turn.ids) - 1  # the last sampled token was never computed
    assert scheduler.counters.computed_tokens - before == 11 + 4
    assert again.logps.tolist() == pytest.approx(
        own_logps(folders[family], longer + again.ids.tolist(), len(longer)), abs=1e-4
    )


def test_a_burst_of_equal_prompts_is_computed_once(make: Make) -> None:
    scheduler = make(batch=16)
    prompt = prompt_of(100)
    chunks = generate(scheduler, *(request(prompt, seed=i, max_tokens=3) for i in range(16)))
    assert [c.cached_tokens for c in chunks] == [0] + [99] * 15
    assert scheduler.counters.computed_tokens == 100 + 15 + 16 * 2
    assert len({tuple(c.ids.tolist()) for c in chunks}) > 1


def test_prompts_that_begin_alike_share_the_beginning(make: Make, folders: dict[str, Path]) -> None:
    scheduler = make()
    shared = prompt_of(60)
    prompts = [shared + prompt_of(10, i) for i in range(1, 5)]
    chunks = generate(scheduler, *(request(p, seed=1) for p in prompts))
    assert [c.cached_tokens for c in chunks] == [0, 60, 60, 60]
    for prompt, chunk in zip(prompts, chunks, strict=True):
        expected = own_logps(folders["llama"], prompt + chunk.ids.tolist(), len(prompt))
        assert chunk.logps.tolist() == pytest.approx(expected, abs=1e-4)


def test_a_seed_draws_the_same_alone_and_in_company(make: Make) -> None:
    wanted = request(prompt_of(20), seed=42, temperature=0.8)
    (alone,) = generate(make(), wanted)
    crowd = [request(prompt_of(20 + i, i), seed=i) for i in range(1, 6)]
    (*_, together) = generate(make(), *crowd, wanted)
    assert alone.ids.tolist() == together.ids.tolist()
    (other,) = generate(make(), request(prompt_of(20), seed=43, temperature=0.8))
    assert alone.ids.tolist() != other.ids.tolist()


def test_greedy_is_the_most_likely_token_each_time(make: Make, folders: dict[str, Path]) -> None:
    prompt = prompt_of(10)
    (chunk,) = generate(make(), request(prompt, temperature=0))
    model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    model.generation_config.eos_token_id = None
    expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, pad_token_id=0)[0, 10:]
    assert chunk.ids.tolist() == expected.tolist()


def test_more_requests_than_fit_wait_their_turn(make: Make) -> None:
    scheduler = make(batch=2, kv_bytes=1)
    chunks = generate(scheduler, *(request(prompt_of(10, i), seed=i, max_tokens=4) for i in range(5)))
    assert [len(c.ids) for c in chunks] == [4] * 5
    assert scheduler.stats()["prefix_bytes"] == 0  # no memory was left to remember anything in


def test_memory_of_finished_requests_is_bounded(make: Make) -> None:
    limit = 200 * make().model.shape.token_bytes
    scheduler = make(kv_bytes=limit)
    for i in range(8):
        generate(scheduler, request(prompt_of(60, i), seed=i))
        assert scheduler.stats()["prefix_bytes"] <= limit
    assert scheduler.stats()["running_bytes"] == 0


def test_a_sequence_that_outgrows_its_lane_moves_on(make: Make, folders: dict[str, Path]) -> None:
    prompt = prompt_of(90)
    (chunk,) = generate(make(), request(prompt, seed=3, max_tokens=150))
    assert len(chunk.ids) == 150
    assert chunk.logps.tolist() == pytest.approx(
        own_logps(folders["llama"], prompt + chunk.ids.tolist(), len(prompt)), abs=1e-4
    )


def test_bf16_serves_the_same_model_roughly(folders: dict[str, Path]) -> None:
    model = PackedModel(load_model(folders["llama"], "bf16"))
    tokenizer = Tokenizer.from_file(str(folders["llama"] / "tokenizer.json"))
    scheduler = Scheduler(model, tokenizer, (), Limits(batch=8, prefill=64, kv_bytes=2**24, context=256))
    assert model.shape.dtype == torch.bfloat16
    prompt = prompt_of(20)
    (chunk,) = generate(scheduler, request(prompt, seed=1, temperature=2.0))
    expected = own_logps(folders["llama"], prompt + chunk.ids.tolist(), len(prompt), temperature=2.0)
    assert np.abs(chunk.logps - np.array(expected)).mean() < 0.1


# ---------------------------------------------------------------------------------------------------- endings


def test_a_stop_token_is_included_and_ends_the_completion(make: Make) -> None:
    (free,) = generate(make(), request(prompt_of(10), seed=5))
    stop = int(free.ids[4])
    (chunk,) = generate(make(), request(prompt_of(10), seed=5, stop_token_ids=(stop,)))
    assert chunk.finish_reason == "stop"
    assert chunk.ids.tolist() == free.ids.tolist()[: free.ids.tolist().index(stop) + 1]


def test_a_completion_that_is_only_an_end_token(make: Make) -> None:
    everything = tuple(range(257))
    (chunk,) = generate(make(), request(prompt_of(10), seed=5, stop_token_ids=everything))
    assert (len(chunk.ids), len(chunk.logps), chunk.finish_reason) == (1, 1, "stop")


def test_the_models_own_end_token_ends_a_completion(make: Make) -> None:
    scheduler = make(end=True)
    with torch.no_grad():  # a model that only ever says "end"
        embedding = scheduler.model.model.get_input_embeddings().weight
        embedding.zero_()
        embedding[:, 0] = torch.arange(257) - 1000.0
        embedding[END, 0] = 1000.0
        scheduler.model.model.model.norm.weight.zero_()
        scheduler.model.model.model.norm.weight[0] = 1.0
    scheduler.weights_changed(1)
    (chunk,) = generate(scheduler, request([END, END], temperature=0))
    assert chunk.ids.tolist() == [END]
    assert chunk.finish_reason == "stop"


def test_a_stop_string_over_several_tokens_ends_on_an_ordinary_token(make: Make) -> None:
    (free,) = generate(make(), request(prompt_of(10), seed=5, max_tokens=40))
    tokenizer = Tokenizer.from_file(str(make().model.model.name_or_path) + "/tokenizer.json")
    # Bytes that are whole characters, so that the text can be written down.
    pair = next(
        i for i in range(1, 39) if "\ufffd" not in (text := tokenizer.decode(free.ids[i : i + 2].tolist())) and text
    )
    stop = tokenizer.decode(free.ids[pair : pair + 2].tolist())
    (chunk,) = generate(make(), request(prompt_of(10), seed=5, max_tokens=40, stop=("never this", stop)))
    assert chunk.finish_reason == "stop"
    assert int(chunk.ids[-1]) != END
    assert tokenizer.decode(chunk.ids.tolist(), skip_special_tokens=False).endswith(stop)
    assert chunk.ids.tolist() == free.ids.tolist()[: len(chunk.ids)]


def test_max_tokens_and_the_end_of_the_context_both_finish_by_length(make: Make) -> None:
    short, long = generate(
        make(context=64), request(prompt_of(10), max_tokens=3, seed=1), request(prompt_of(40), max_tokens=None, seed=1)
    )
    assert (len(short.ids), short.finish_reason) == (3, "length")
    assert (len(long.ids), long.finish_reason) == (24, "length")


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "the prompt is empty"),
        (list(range(64)), {}, "64 tokens and the context holds 64"),
        ([1, 257], {}, "id 257 is outside the vocabulary of 257"),
        ([-1, 2], {}, "id -1 is outside"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"top_p": 0.0}, "top_p is 0"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused(
    prompt: list[int], sampling: dict[str, object], message: str, make: Make
) -> None:
    with pytest.raises(UsageError, match=message):
        make(context=64).add(request(prompt, **sampling))


def test_a_cancelled_request_leaves_and_the_others_go_on(make: Make) -> None:
    scheduler = make(batch=2)
    doomed, kept, waiting = (scheduler.add(request(prompt_of(10, i), seed=i)) for i in range(3))
    scheduler.step()
    doomed.cancelled = True
    (kept_chunk, waiting_chunk) = run(scheduler, [kept, waiting])
    assert doomed.finish is None
    assert len(doomed.tokens) == 11
    assert len(kept_chunk.ids) == len(waiting_chunk.ids) == 12
    assert not scheduler.busy


# ---------------------------------------------------------------------------------------------------- weights


def scale_weights(scheduler: Scheduler, version: int) -> None:
    with torch.no_grad():
        for parameter in scheduler.model.model.parameters():
            parameter.mul_(0.9)
    scheduler.weights_changed(version)


def test_new_weights_serve_from_the_next_token_and_old_ones_leave_no_trace(
    make: Make, folders: dict[str, Path], tmp_path: Path
) -> None:
    scheduler = make()
    prompt = prompt_of(20)
    # Another request has put the same prompt in the prefix store under the old weights.
    generate(scheduler, request(prompt, seed=9, max_tokens=2))
    running = scheduler.add(request(prompt, seed=1, max_tokens=10))
    while len(running.tokens) < 25:
        scheduler.step()
    old = running.chunk(scheduler.version)
    scale_weights(scheduler, 3)
    (new,) = run(scheduler, [running])
    assert (old.version, new.version) == (0, 3)
    assert len(old.ids) + len(new.ids) == 10
    scaled = tmp_path / "scaled"
    model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    model.save_pretrained(scaled)
    start = prompt + old.ids.tolist()
    assert old.logps.tolist() == pytest.approx(own_logps(folders["llama"], start, len(prompt)), abs=1e-4)
    assert new.logps.tolist() == pytest.approx(own_logps(scaled, start + new.ids.tolist(), len(start)), abs=1e-4)
    (after,) = generate(scheduler, request(prompt, seed=1, max_tokens=4))
    assert after.logps.tolist() == pytest.approx(own_logps(scaled, prompt + after.ids.tolist(), len(prompt)), abs=1e-4)


def test_new_weights_are_parameters_and_need_not_hold_buffers(folders: dict[str, Path], tmp_path: Path) -> None:
    model = load_model(folders["deepseek_v3"])
    assert model.state_dict().keys() - dict(model.named_parameters()).keys()
    tensors = {name: parameter.detach() * 0.9 for name, parameter in model.named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors")
    infos = tuple(TensorInfo(name=name, shape=tuple(t.shape), dtype="float32") for name, t in tensors.items())
    manifest = WeightManifest(version=1, kind="full", tensors=infos, digest="")
    Standby(model, tmp_path, manifest).install()
    assert all(torch.equal(parameter, tensors[name]) for name, parameter in model.named_parameters())


def test_damaged_weights_fail_the_request_and_shift_nothing(make: Make) -> None:
    scheduler = make()
    running = scheduler.add(request(prompt_of(20), seed=1))
    scheduler.step()
    with torch.no_grad():
        scheduler.model.model.model.norm.weight.fill_(float("nan"))
    scheduler.weights_changed(1)
    scheduler.step()
    assert isinstance(running.error, EngineError)
    assert "not finite after 1 tokens" in str(running.error)
    chunk = running.chunk(0)
    assert len(chunk.ids) == len(chunk.logps) == 1
    assert not scheduler.busy


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_arrivals_cancellations_and_updates_keeps_every_log_prob_exact(
    seed: int, make: Make, folders: dict[str, Path]
) -> None:
    rng = np.random.default_rng(seed)
    scheduler = make(batch=4, prefill=16, kv_bytes=300 * 1024)
    trunk = prompt_of(100, seed)
    seen: list[tuple[Running, list[TokenChunk]]] = []

    def collect_new() -> None:
        for running, chunks in seen:
            if running.unsent:
                chunks.append(running.chunk(scheduler.version))

    for i in range(60):
        if len(seen) < 14 and rng.random() < 0.4:
            earlier = seen[rng.integers(len(seen))][0].tokens.tolist() if seen and rng.random() < 0.5 else trunk
            prompt = earlier[: rng.integers(1, len(earlier) + 1)][:120] + prompt_of(int(rng.integers(0, 20)), i)
            seen.append((scheduler.add(request(prompt, seed=i, max_tokens=int(rng.integers(1, 60)))), []))
        elif seen and rng.random() < 0.1:
            seen[rng.integers(len(seen))][0].cancelled = True
        elif scheduler.version < 2 and rng.random() < 0.1:
            collect_new()
            scale_weights(scheduler, scheduler.version + 1)
        scheduler.step()
    while scheduler.busy:
        scheduler.step()
    collect_new()
    assert len(seen) > 5
    plain = AutoModelForCausalLM.from_pretrained(folders["llama"]).eval()
    logps = []
    for _ in range(scheduler.version + 1):
        with torch.inference_mode():
            logps.append([torch.log_softmax(plain(torch.tensor([r.tokens.tolist()])).logits[0], -1) for r, _ in seen])
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.mul_(0.9)
    for i, (running, chunks) in enumerate(seen):
        at = running.prompt_length
        for chunk in chunks:
            for token, logp in zip(chunk.ids.tolist(), chunk.logps.tolist(), strict=True):
                assert logp == pytest.approx(logps[chunk.version][i][at - 1, token].item(), abs=1e-4)
                at += 1
        assert at == len(running.tokens)
        assert running.cancelled or running.finish == "length"


# ---------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("class_name", "config", "reason"),
    [
        (
            "T5",
            {"d_model": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "d_ff": 16, "vocab_size": 64},
            "encoder-decoder",
        ),
        ("Mamba", {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 64, "state_size": 4}, "attention"),
    ],
)
def test_a_model_type_it_cannot_serve_is_refused_with_the_reason(
    class_name: str, config: dict[str, int], reason: str
) -> None:
    import transformers

    kind = "ForConditionalGeneration" if class_name == "T5" else "ForCausalLM"
    model = getattr(transformers, class_name + kind)(getattr(transformers, f"{class_name}Config")(**config))
    with pytest.raises(Unsupported, match=reason):
        PackedModel(model.eval())


def test_a_model_that_computes_something_else_here_is_refused(folders: dict[str, Path]) -> None:
    model = load_model(folders["llama"])
    attention = model.model.layers[1].self_attn
    plain = attention.forward

    def stateful(*args: object, **kwargs: object) -> object:  # as if the layer kept something besides keys and values
        output, weights = plain(*args, **kwargs)
        return output * (1 + 0.1 * output.shape[1]), weights

    attention.forward = stateful
    with pytest.raises(Unsupported, match="computes something else"):
        PackedModel(model)
