"""Models of many kinds train: on the way that fits them, with the model's own log-probs and exact gradients."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from rl_harness.contracts import LossSpec, OptimizerSpec
from rl_harness.errors import Unsupported
from rl_harness.learning.grpo import GRPOLoss
from rl_harness.records import Sample, TokenBatch, ids, logps
from rl_harness_torch.models import context_length, load_model, resolve
from rl_harness_torch.scoring import Scorer, Way
from rl_harness_torch.standby import Standby
from rl_harness_torch.trainer import Trainer
from rl_harness_torch.transforms import IDENTITY, Transform, recognise
from rl_harness_torch.weight_folders import WeightFolders
from torch.utils._python_dispatch import TorchDispatchMode

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
HEADS = SIZES | {
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}
TREE, ROWS, ALONE = Way("tree"), Way("rows"), Way("alone", own_logits=True)

#: Kind, its config, the way it is trained.
FAMILIES: dict[str, tuple[str, dict[str, Any], Way]] = {
    "cohere": ("Cohere", HEADS | {"logit_scale": 0.3}, TREE),
    "granite": ("Granite", HEADS | {"logits_scaling": 6.0}, TREE),
    "nanochat": ("NanoChat", HEADS | {"final_logit_softcapping": 5.0}, TREE),
    "longrope": ("Phi3", HEADS | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}, TREE),
    "dynamic": ("Llama", HEADS | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, TREE),
    "deepseek": (
        "DeepseekV3",
        HEADS
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
        | {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8}
        | {"head_dim": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
        TREE,
    ),
    "gemma2": (
        "Gemma2",
        HEADS | {"sliding_window": 4, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0},
        ROWS,
    ),
    "gemma3": ("Gemma3Text", HEADS | {"sliding_window": 4, "query_pre_attn_scalar": 8}, ROWS),
    "gpt-oss": (
        "GptOss",
        HEADS
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        ROWS,
    ),
    "llama4": (
        "Llama4Text",
        HEADS
        | {"intermediate_size_mlp": 48, "num_local_experts": 4, "attention_chunk_size": 4, "moe_layers": [1]}
        | {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
        ROWS,
    ),
    "bloom": ("Bloom", SIZES | {"n_layer": 2, "n_head": 4}, ROWS),
    "mamba": ("Mamba", SIZES | {"state_size": 8}, ROWS),
    "mamba2": (
        "Mamba2",
        SIZES | {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
        ROWS,
    ),
    "jamba": (
        "Jamba",
        HEADS
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4},
        ROWS,
    ),
    "bamba": ("Bamba", HEADS | MAMBA2 | {"attn_layer_indices": [1]}, ROWS),
    "lfm2": ("Lfm2", HEADS | {"full_attn_idxs": [1], "block_multiple_of": 8}, ROWS),
    "falcon-h1": (
        "FalconH1",
        HEADS | MAMBA2 | {"mamba_d_ssm": 64, "mamba_n_groups": 1, "lm_head_multiplier": 0.2},
        ROWS,
    ),
    "rwkv": (
        "Rwkv",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}
        | {"intermediate_size": 48, "rescale_every": 1},
        ROWS,
    ),
    "bert": ("Bert", HEADS | {"is_decoder": True}, ALONE),  # its output head is a network
}
FRACTIONS = ("cohere", "granite", "nanochat", "gemma2")


def build(family: str, **more: Any) -> transformers.PreTrainedModel:
    name, sizes, _ = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(sizes | more))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.config.rescale_every = 0  # as when it is loaded
    model.set_experts_implementation("eager")  # the only one that knows fp64
    with torch.no_grad():
        for parameter in model.parameters():  # some kinds start near 0, where a mistake would not show
            if parameter.ndim > 1 and parameter.std() < 0.05:
                parameter.normal_(0, 0.3)
    return model


def sample_of(rng: np.random.Generator, name: str, prompt: Sequence[int], completion: Sequence[int]) -> Sample:
    n = len(completion)
    return Sample(
        turn=name,
        episode=name,
        group="g",
        policy="p",
        temperature=0.8,
        prompt=ids(prompt),
        completion=ids(completion),
        mask=logps(np.ones(n)),
        behaviour_logps=logps(np.full(n, -4.0)),
        versions=ids(np.zeros(n)),
        advantage=logps(np.full(n, rng.normal())),
        weight=logps(np.full(n, 1 / (4 * n))),
    )


@pytest.fixture
def samples() -> list[Sample]:
    """Of different lengths, three with a common beginning; some padding is longer than the windows here."""
    rng = np.random.default_rng(0)
    draw = rng.integers(3, VOCAB, 40).tolist()
    return [
        sample_of(rng, "a", draw[:6], draw[6:13]),
        sample_of(rng, "b", draw[:6], draw[13:16]),
        sample_of(rng, "c", draw[:9], draw[16:20]),
        sample_of(rng, "d", draw[30:32], draw[20:30]),
        sample_of(rng, "e", draw[33:34], draw[34:36]),
    ]


class InDouble(TorchDispatchMode):
    """Computes in fp64 what models narrow to fp32 whatever their weights are, norms above all."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        narrows = func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64
        if narrows and kwargs.get("dtype") == torch.float32:
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


class Watched(Trainer):
    """Keeps the gradients an optimizer step was made with."""

    def gradients(self, samples: Sequence[Sample], spec: LossSpec) -> dict[str, torch.Tensor]:
        seen: dict[str, torch.Tensor] = {}
        step = self.optimizer.step

        def watching() -> float:
            seen.update({n: m.grad.clone() for n, m in self.optimizer.masters.items() if m.grad is not None})
            return step()

        self.optimizer.step = watching  # type: ignore[method-assign]
        self.train_step(samples, spec)
        return seen


def own_logps(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """By the textbook: the sequence through the model by itself, its own logits."""
    sequence = torch.from_numpy(np.concatenate([sample.prompt, sample.completion]).astype(np.int64))
    logits = model(input_ids=sequence[None], use_cache=False).logits[0, len(sample.prompt) - 1 : -1]
    scores = (logits / sample.temperature).log_softmax(-1)
    return scores.gather(1, sequence[len(sample.prompt) :, None])[:, 0]


def grpo(**options: Any) -> LossSpec:
    return LossSpec(target="rl_harness.learning.grpo:GRPOLoss", options={"clip_low": 0.2, "clip_high": 0.2, **options})


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_models_own_logits(family, samples, tmp_path):
    model, way = build(family).double(), FAMILIES[family][2]
    with InDouble():
        logp = torch.cat([own_logps(model, sample) for sample in samples])
        loss = GRPOLoss(clip_low=0.2, clip_high=0.2)({"logp": logp.detach().numpy()}, TokenBatch.of(samples))
        logp.backward(torch.from_numpy(loss.grads["logp"]))
        expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        for forced in {way, ALONE}:
            twin = build(family).double()
            trainer = Watched(twin, OptimizerSpec(), source=tmp_path, micro_batch_tokens=40)
            assert trainer.scorer.way == way
            trainer.scorer.way = forced
            scores = trainer.forward(samples, ["logp"])["logp"]
            np.testing.assert_allclose(np.concatenate(scores), logp.detach(), atol=1e-9)
            found = trainer.gradients(samples, grpo())
            for name, grad in expected.items():
                torch.testing.assert_close(
                    found[name], grad, rtol=1e-9, atol=1e-11, msg=lambda m, at=f"{name} {forced}": f"{at}: {m}"
                )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_and_is_saved_and_served(family, samples, tiny_model, tmp_path):
    model = build(family)
    model.config.rescale_every = FAMILIES[family][1].get("rescale_every", 0)
    model.save_pretrained(tmp_path / "model")
    shutil.copy(tiny_model / "tokenizer.json", tmp_path / "model")
    memory = tmp_path / "memory"
    memory.mkdir()

    def trainer_of(folder: Path) -> Trainer:
        return Trainer(
            load_model(resolve(str(folder))),
            OptimizerSpec(learning_rate=1e-3),
            source=tmp_path / "model",
            weight_folders=WeightFolders((memory,)),
        )

    trainer = trainer_of(tmp_path / "model")
    assert trainer.scorer.way == FAMILIES[family][2]
    pair = [samples[0], samples[3]]
    first = trainer.forward(pair, ["logp"])["logp"]
    pair = [
        msgspec.structs.replace(sample, behaviour_logps=logp, advantage=logps(np.full(len(logp), sign)))
        for sample, logp, sign in zip(pair, first, (1.0, -1.0), strict=True)
    ]
    metrics = trainer.train_step(pair, grpo(kl=0.1)).metrics
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)  # the frozen reference is the same model as yet
    after = trainer.forward(pair, ["logp"])["logp"]
    assert after[0].sum() > first[0].sum()
    assert after[1].sum() < first[1].sum()
    with torch.no_grad():
        np.testing.assert_allclose(after[0], own_logps(trainer.model, pair[0]), atol=1e-4)

    trainer.save(tmp_path / "checkpoint", optimizer=True)
    resumed = trainer_of(tmp_path / "checkpoint")
    np.testing.assert_array_equal(resumed.forward(pair, ["logp"])["logp"][0], after[0])
    resumed = trainer_of(tmp_path / "model")
    assert resumed.load(tmp_path / "checkpoint") == 1
    resumed.train_step(pair, grpo(kl=0.1))
    trainer.train_step(pair, grpo(kl=0.1))
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, resumed.model.get_parameter(name)), name

    served = load_model(tmp_path / "model")
    folder, manifest = trainer.weights()
    Standby(served, folder, manifest).install()
    with torch.no_grad():
        assert torch.equal(own_logps(served, pair[0]), own_logps(trainer.model, pair[0]))
    trainer.close()
    resumed.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FRACTIONS)
def test_what_is_done_to_logits_is_found_among_the_configs_numbers(family, dtype):
    model = build(family).to(dtype)
    expected = {
        "cohere": Transform(0.3),
        "granite": Transform(1 / 6),
        "nanochat": Transform(1.0, 5.0),
        "gemma2": Transform(1.0, 5.0),
    }
    assert recognise(model, model.get_output_embeddings()) == expected[family]


def test_a_factor_and_a_soft_cap_are_found_together(monkeypatch):
    model = build("dynamic", logit_scale=0.3, final_cap=7.0)
    assert recognise(model, model.lm_head) == IDENTITY
    forward = model.forward

    def both(**more):
        out = forward(**more)
        out.logits = 7.0 * torch.tanh(0.3 * out.logits / 7.0)
        return out

    monkeypatch.setattr(model, "forward", both)
    assert recognise(model, model.lm_head) == pytest.approx(Transform(0.3, 7.0))


def test_unknown_logits_are_taken_from_the_model_and_the_log_says_why(monkeypatch, samples, tmp_path, caplog):
    model = build("dynamic")
    forward, kept = model.forward, []

    def odd(input_ids=None, logits_to_keep=0, **more):
        kept.append(logits_to_keep)
        out = forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **more)
        out.logits = out.logits.abs().sqrt()
        return out

    monkeypatch.setattr(model, "forward", odd)
    with caplog.at_level(logging.WARNING):
        trainer = Watched(model, OptimizerSpec(), source=tmp_path)
    assert trainer.scorer.way == ALONE
    assert "one sequence at a time with its own logits: what it does to its logits" in caplog.text
    found = trainer.forward(samples, ["logp"])["logp"]
    assert len(kept[-1]) == len(
        samples[int(np.argmin([len(s.prompt) + len(s.completion) for s in samples]))].completion
    )
    with torch.no_grad():
        for sample, logp in zip(samples, found, strict=True):
            np.testing.assert_allclose(logp, own_logps(model, sample), atol=1e-5)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "bloom", "gemma2"])
def test_bf16_takes_the_same_way_and_keeps_fp32_masters(family, samples, tmp_path):
    model = build(family).bfloat16()
    trainer = Trainer(model, OptimizerSpec(), source=tmp_path, dtype="bf16")
    assert trainer.scorer.way == FAMILIES[family][2]
    trainer.train_step(samples, grpo())
    assert {m.dtype for m in trainer.optimizer.masters.values()} == {torch.float32}


def test_parameters_keep_their_own_precision_on_the_way_to_the_engine(tmp_path):
    model = build("mamba").bfloat16()
    name, kept = next((n, p) for n, p in model.named_parameters() if n.endswith("A_log"))
    kept.data = kept.data.float() + 1e-6
    trainer = Trainer(model, OptimizerSpec(), source=tmp_path, dtype="bf16", weight_folders=WeightFolders((tmp_path,)))
    folder, manifest = trainer.weights()
    served = build("mamba").bfloat16()
    served.get_parameter(name).data = torch.zeros_like(kept)
    Standby(served, folder, manifest).install()
    assert torch.equal(served.get_parameter(name), kept)
    trainer.close()


def test_a_parameter_without_gradient_goes_on_exactly_from_a_checkpoint(samples, tiny_model, tmp_path):
    def trainer() -> Trainer:
        made = Trainer(load_model(tiny_model), OptimizerSpec(learning_rate=1e-2), source=tiny_model)
        made.model.get_parameter("model.norm.weight").requires_grad_(False)  # now and then, as an expert nobody asks
        return made

    def step(made: Trainer, with_norm: bool) -> None:
        made.model.get_parameter("model.norm.weight").requires_grad_(with_norm)
        made.train_step(samples, grpo())

    whole = trainer()
    for with_norm in (False, True):
        step(whole, with_norm)
        whole.save(tmp_path / "c", optimizer=True)
        resumed = trainer()
        resumed.load(tmp_path / "c")
        for made in (resumed, twin := trainer()):
            made.load(tmp_path / "c")
            step(made, True)
        for name, parameter in resumed.model.named_parameters():
            assert torch.equal(parameter, twin.model.get_parameter(name)), name


def test_scaled_positions_end_where_their_scale_would_change():
    """Beyond, it depends on the length of whatever is computed together, so engine and trainer would part."""
    assert context_length(build("longrope")) == 32
    assert context_length(build("dynamic")) == 128
    scorer = Scorer(build("longrope"))
    assert scorer.max_positions == 32


# ----------------------------------------------------------------------------------- what is not what it looks like


class Scaled(transformers.LlamaForCausalLM):
    """``place``: where parameters stand that do nothing as long as they are as made."""

    place = "after"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.factor = torch.nn.Parameter(torch.ones(config.vocab_size))
        self.shift = torch.nn.Parameter(torch.zeros(config.hidden_size))
        if self.place == "between":
            self.lm_head.register_forward_pre_hook(lambda _, given: (given[0] + self.shift,))

    def forward(self, *given: Any, **more: Any) -> Any:
        out = super().forward(*given, **more)
        if self.place == "after":
            out.logits = out.logits * self.factor
        elif self.place == "within":  # a part of the rest of the model is used again
            out.logits = out.logits + self.model.norm.weight.sum() - len(self.model.norm.weight)
        return out


@pytest.mark.parametrize(("place", "parameter"), [("after", "factor"), ("between", "shift"), ("within", None)])
def test_parameters_that_do_nothing_yet_are_trained_too(place, parameter, samples, tmp_path):
    made = type("Made", (Scaled,), {"place": place})
    torch.manual_seed(0)
    model = made(transformers.LlamaConfig(**HEADS)).eval()
    trainer = Watched(model, OptimizerSpec(), source=tmp_path)
    assert trainer.scorer.way == ALONE
    gradients = trainer.gradients(samples, grpo())
    if parameter:
        assert gradients[parameter].abs().max() > 0


def test_frozen_parameters_are_constants(tmp_path):
    model = Scaled(transformers.LlamaConfig(**HEADS)).eval()
    model.factor.requires_grad_(False)
    model.shift.requires_grad_(False)
    assert Scorer(model).way == TREE


@pytest.mark.parametrize("off", [{"sliding_window": 0}, {"sliding_window": False}, {"sliding_window": None}])
def test_a_window_of_nothing_is_none(off):
    assert Scorer(build("dynamic", **off)).way == TREE
    assert Scorer(build("dynamic", sliding_window=64, use_sliding_window=False)).way == TREE
    assert Scorer(build("dynamic", sliding_window=64)).way == ROWS


def test_qwen2_moe_as_it_is_saved_goes_as_a_trie():
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = transformers.Qwen2MoeConfig(**HEADS, **experts, shared_expert_intermediate_size=16)
    assert config.sliding_window == 0
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert Scorer(model).way == TREE


@pytest.mark.parametrize("name", ["Roberta", "Camembert"])
def test_decoders_whose_positions_begin_elsewhere_train(name, samples, tmp_path):
    sizes = {k: v for k, v in HEADS.items() if k not in ("num_key_value_heads", "head_dim")}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, is_decoder=True)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    trainer = Trainer(model, OptimizerSpec(), source=tmp_path)
    found = trainer.forward(samples, ["logp"])["logp"]
    with torch.no_grad():
        for sample, logp in zip(samples, found, strict=True):
            np.testing.assert_allclose(logp, own_logps(model, sample), atol=1e-5)


def test_a_model_that_mixes_precisions_is_refused_in_a_low_one():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_heads": 4, "num_hidden_layers": 2, "num_blocks": 2}
    model = transformers.AutoModelForCausalLM.from_config(transformers.xLSTMConfig(**sizes)).eval()
    Scorer(model)
    with pytest.raises(Unsupported, match="does not compute in bfloat16") as caught:
        Scorer(model.bfloat16())
    assert caught.value.remedy == "set backend.dtype to fp32"


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_a_model_that_fails_when_it_is_tried_is_refused_with_its_reason(error, monkeypatch):
    model = build("dynamic")

    def fails(**_):
        raise error("no such thing")

    monkeypatch.setattr(model, "forward", fails)
    with pytest.raises(Unsupported, match=rf"LlamaForCausalLM cannot compute .*{error.__name__}: no such thing"):
        Scorer(model)
