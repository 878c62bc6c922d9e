"""What changes only beyond a length (a window, a chunk, a block) is found at load, however long that is."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rl_harness.contracts import GenerateRequest
from rl_harness.errors import Unsupported
from rl_harness.records import SamplingParams, ids
from rl_harness_torch import faithful, models
from rl_harness_torch.attention import PackedModel
from rl_harness_torch.faithful import lengths, shrunken
from rl_harness_torch.models import context_length
from rl_harness_torch.own_forward import OwnModel
from rl_harness_torch.scheduler import Limits, Scheduler
from rl_harness_torch.serving import scheduler_for
from rl_harness_torch.testing import tiny_model
from tokenizers import Tokenizer

_SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "attn_layer_indices": [1]}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_LOCAL = {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.1}

#: Kind, config, whether it is served in packed steps, whether by its cache if it is not.
_KINDS: dict[str, tuple[str, dict[str, Any], bool, bool]] = {
    "a window": ("Mistral", {"sliding_window": 128}, True, False),
    "a window in some layers": ("Gemma2", {"sliding_window": 128, "query_pre_attn_scalar": 8}, True, False),
    "a window of another name": ("ModernBertDecoder", {"local_attention": 128}, True, False),
    "a scale by position": (
        "Ministral3",
        {"rope_parameters": _YARN | {"original_max_position_embeddings": 64, "max_position_embeddings": 1024}},
        True,
        False,
    ),
    "a window in the mask only": ("Phimoe", _EXPERTS | {"sliding_window": 128}, False, True),
    "another in the mask only": ("Doge", {"sliding_window": 128}, False, True),
    "a window that is not ours": ("GPTNeo", _LOCAL | {"window_size": 128}, False, True),
    "chunks": (
        "Llama4Text",
        _EXPERTS
        | {"attention_chunk_size": 128, "no_rope_layers": [1, 0], "intermediate_size_mlp": 48}
        | {"interleave_moe_layer_step": 1},
        False,
        True,
    ),
    "sinks and a window": ("GptOss", _EXPERTS | {"sliding_window": 128}, False, True),
    "blocks": ("MiniMax", _EXPERTS | _LINEAR | {"block_size": 128}, False, True),
    "a chunked scan": ("Bamba", _MAMBA | {"mamba_chunk_size": 128}, False, True),
}


def build(kind: str, **more: Any) -> Any:
    name, config, *_ = _KINDS[kind]
    models._quiet()
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}Config")(**(_SIZES | config | more))
    return transformers.AutoModelForCausalLM.from_config(made).eval()


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    limits = Limits(batch=4, prefill=64, kv_bytes=2**24, context=512)
    return lambda model: scheduler_for(model, tokenizer, (), limits)


@functools.cache
def prompt() -> list[int]:
    return np.random.default_rng(0).integers(3, 250, 300).tolist()


def largest_gap(scheduler: Scheduler[Any], plain: Any) -> float:
    """Between what is served after a prompt of 300 tokens, and in a shorter one's company, and ``plain``."""
    requests = [
        scheduler.add(
            GenerateRequest(id=str(n), prompt=ids(prompt()[:n]), sampling=SamplingParams(max_tokens=20, seed=n))
        )
        for n in (120, 300)
    ]
    while scheduler.busy:
        scheduler.step()
    gaps = []
    for running in requests:
        assert running.error is None
        chunk = running.chunk(0)
        sequence = [*running.request.prompt.tolist(), *chunk.ids.tolist()]
        with torch.inference_mode():
            logps = plain(torch.tensor([sequence]), use_cache=False).logits[0].float().log_softmax(-1)
        at = torch.arange(running.prompt_length, len(sequence))
        expected = logps[at - 1, torch.tensor(sequence)[at]].numpy()
        gaps.append(float(np.abs(expected - chunk.logps).max()))
    return max(gaps)


@pytest.mark.parametrize("kind", _KINDS)
def test_a_model_is_served_exactly_beyond_its_lengths(kind: str, serve: Any) -> None:
    scheduler, slower = serve(build(kind))
    *_, packed, cached = _KINDS[kind]
    assert isinstance(scheduler.model, PackedModel) == packed == (slower is None)
    if not packed:
        assert scheduler.model.keeps_state == cached
    assert largest_gap(scheduler, build(kind)) < 1e-3


@pytest.mark.parametrize("kind", ["a window in the mask only", "another in the mask only"])
def test_a_window_that_our_attention_is_not_given_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="does not tell our attention of its sliding_window"):
        PackedModel(build(kind))
    # And were that not seen, the comparison beyond the window would find it.
    monkeypatch.setattr(PackedModel, "_check_windows", lambda *_: None)
    with pytest.raises(Unsupported, match=r"computes something else .*tried beyond its sliding_window 128"):
        PackedModel(build(kind))


def test_a_cache_that_is_wrong_only_beyond_a_length_is_not_used(serve: Any) -> None:
    model = build("blocks")
    for buffer in model.buffers():  # as saved in bf16: a decay of one token no longer is the root of a block's
        buffer.data = buffer.data.bfloat16().float()
    plain = build("blocks")
    for buffer in plain.buffers():
        buffer.data = buffer.data.bfloat16().float()
    scheduler, slower = serve(model)
    assert not scheduler.model.keeps_state
    assert "its cache does not give what one forward over everything gives" in slower
    assert largest_gap(scheduler, plain) < 1e-3


def test_a_cache_that_rounding_carries_away_is_not_used() -> None:
    assert OwnModel(build("blocks")).keeps_state
    model = OwnModel(build("blocks").bfloat16())
    assert not model.keeps_state
    assert model.why_no_cache


def test_why_a_cache_is_not_used_is_said(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise Unsupported("it cannot be tried beyond its block_size")

    monkeypatch.setattr("rl_harness_torch.own_forward.shrunken", fails)
    _, slower = serve(build("blocks"))
    assert "without a cache, every sequence from its first token for each new one (it cannot be tried" in slower


@pytest.mark.parametrize("kind", _KINDS)
def test_a_twin_has_the_same_weights_in_the_same_memory_and_short_lengths(kind: str) -> None:
    model = build(kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = shrunken(model)
    assert found is not None
    twin, what = found
    assert any(str(size) in what for size in lengths(model.config).values()) or "original_max" in what
    assert shrunken(twin) is None
    assert [p.data_ptr() for p in twin.parameters()] == [p.data_ptr() for p in model.parameters()]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    few = faithful.probe_ids(model)[:7]  # shorter than any of them, they are one model
    if "original_max" not in what:  # frequencies depend on that number too
        torch.testing.assert_close(faithful.own_logits(twin, few), faithful.own_logits(model, few), atol=1e-4, rtol=0)


def test_a_model_without_lengths_is_loaded_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faithful, "_twin", lambda *_: pytest.fail("a twin was made"))
    config = transformers.LlamaConfig(**_SIZES)
    PackedModel(transformers.AutoModelForCausalLM.from_config(config).eval())


def test_a_number_that_is_the_size_of_a_weight_is_no_length() -> None:
    class Tower(transformers.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.bias_in_chunks = torch.nn.Parameter(torch.zeros(config.chunk_count))

    config = transformers.LlamaConfig(**_SIZES, chunk_count=100)
    model: Any = Tower(config).eval()
    assert lengths(config) == {"chunk_count": 100}
    assert shrunken(model) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"sliding_window": 0}, {}),
        ({"sliding_window": None}, {}),
        ({"sliding_window": False}, {}),
        ({"sliding_window": 4096, "use_sliding_window": False}, {}),
        ({"sliding_window": 4096, "use_sliding_window": True}, {"sliding_window": 4096}),
        ({"sliding_window": 4096, "max_window_layers": 28}, {"sliding_window": 4096}),
        ({"window_sizes": [128, 256]}, {"window_sizes": 256}),
        ({"chunk_size_feed_forward": 64}, {}),
    ],
)
def test_what_is_a_length(given: dict[str, Any], expected: dict[str, int]) -> None:
    assert lengths(transformers.LlamaConfig(**_SIZES, **given)) == expected


@pytest.mark.parametrize("name", ["Roberta", "Camembert", "XLMRoberta"])
def test_positions_that_begin_elsewhere_are_the_models_own_affair(name: str, serve: Any) -> None:
    sizes = {k: v for k, v in _SIZES.items() if k not in ("num_key_value_heads", "head_dim")}
    sizes |= {"is_decoder": True, "pad_token_id": 1, "max_position_embeddings": 514}

    def made() -> Any:
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**sizes)
        return transformers.AutoModelForCausalLM.from_config(config).eval()

    scheduler, _ = serve(made())
    assert scheduler.model.keeps_state
    assert largest_gap(scheduler, made()) < 1e-3
    assert context_length(made()) == 512


def test_the_remedy_for_a_model_that_looks_ahead_fits() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=16, initializer_range=0.4)
    encoder: Any = transformers.BertLMHeadModel(config).eval()
    with pytest.raises(Unsupported, match="is not causal") as caught:
        OwnModel(encoder)
    assert "is_decoder" in str(caught.value.remedy)
    encoder.config.is_decoder = True  # too late for its layers, but said
    with pytest.raises(Unsupported, match="is not causal") as caught:
        OwnModel(encoder)
    assert "is_decoder" not in str(caught.value.remedy)


def xlstm(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = transformers.xLSTMConfig(vocab_size=257, hidden_size=32, num_heads=4, num_hidden_layers=2, num_blocks=2)
    return transformers.AutoModelForCausalLM.from_config(config).eval().to(dtype)


def test_a_model_that_mixes_precisions_is_refused_in_a_low_one_at_load(serve: Any) -> None:
    with pytest.raises(Unsupported, match="xLSTMForCausalLM does not compute in bfloat16") as caught:
        serve(xlstm(torch.bfloat16))
    assert caught.value.remedy == "set engine.dtype to fp32"
    scheduler, _ = serve(xlstm(torch.float32))
    assert largest_gap(scheduler, xlstm(torch.float32)) < 1e-3


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, ZeroDivisionError])
def test_a_model_that_fails_when_it_is_tried_is_refused_with_its_reason(error: type[Exception], serve: Any) -> None:
    model = build("a window")
    plain = model.forward
    model._supports_attention_backend = False

    def fails(input_ids: Any, **others: Any) -> Any:
        if input_ids.shape[1] < 24:
            raise error("wants more tokens")
        return plain(input_ids=input_ids, **others)

    model.forward = fails
    with pytest.raises(Unsupported, match=rf"MistralForCausalLM cannot compute .*{error.__name__}: wants more tokens"):
        serve(model)
