"""Prefix sharing must not change training: packed gradients equal those of one plain sequence at a time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from rl_harness.contracts import Loss, LossResult, LossSpec, OptimizerSpec
from rl_harness.errors import Unsupported
from rl_harness.learning.grpo import GRPOLoss
from rl_harness.records import Sample, TokenBatch, ids, logps
from rl_harness_torch.head import logit_outputs, token_outputs
from rl_harness_torch.scoring import Scorer
from rl_harness_torch.trainer import Trainer
from rl_harness_torch.transforms import IDENTITY, Transform
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 61
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


def llama(**more: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, initializer_range=0.3, **more)).eval()


def qwen3() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, head_dim=8, initializer_range=0.3)).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3)
    return GPT2LMHeadModel(config).eval()


def sliding() -> MistralForCausalLM:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, **HEADS, sliding_window=4, initializer_range=0.3)).eval()


def sample_of(rng: np.random.Generator, name: str, prompt: Sequence[int], completion: Sequence[int], **more: object):
    n = len(completion)
    fields = {
        "turn": name,
        "episode": name,
        "group": "g",
        "policy": "p",
        "temperature": 1.0,
        "mask": logps(np.ones(n)),
        "behaviour_logps": logps(rng.normal(-4, 0.3, n)),
        "versions": ids(np.zeros(n)),
        "advantage": logps(np.full(n, rng.normal())),
        "weight": logps(np.full(n, 1 / (4 * n))),
    }
    return Sample(prompt=ids(prompt), completion=ids(completion), **(fields | more))  # type: ignore[arg-type]


def conversations(seed: int = 0) -> list[Sample]:
    """Two groups; two-turn episodes; a duplicate completion; mixed temperatures; a masked token."""
    rng = np.random.default_rng(seed)

    def draw(n: int) -> list[int]:
        return [int(x) for x in rng.integers(0, VOCAB, n)]

    samples = []
    for group in range(2):
        prompt = draw(9)
        for episode in range(3):
            first, tool = draw(4), draw(3)
            name = f"{group}.{episode}"
            temperature = 0.7 if episode == 2 else 1.0
            more = {"episode": name, "temperature": temperature}
            samples.append(sample_of(rng, f"{name}.1", prompt, first, **more))
            samples.append(sample_of(rng, f"{name}.2", prompt + first + tool, draw(5), **more))
    twin = samples[0]
    samples.append(sample_of(rng, "twin", twin.prompt.tolist(), twin.completion.tolist(), mask=logps([1, 1, 0, 0])))
    return samples


def plain_gradients(model: torch.nn.Module, samples: Sequence[Sample], loss: Loss) -> dict[str, torch.Tensor]:
    """The same loss by the textbook: each sequence through the model by itself, full logits, autograd."""
    model.zero_grad()
    scores = []
    for sample in samples:
        sequence = torch.from_numpy(np.concatenate([sample.prompt, sample.completion]).astype(np.int64))
        logits = model(input_ids=sequence[None]).logits[0, len(sample.prompt) - 1 : -1] / sample.temperature
        scores.append(logits.log_softmax(-1).gather(1, sequence[len(sample.prompt) :, None])[:, 0])
    logp = torch.cat(scores)
    result = loss({"logp": logp.detach().numpy()}, TokenBatch.of(samples))
    logp.backward(torch.from_numpy(result.grads["logp"]))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class _Watched(Trainer):
    """Keeps the gradients an optimizer step was made with."""

    def capture(self, samples: Sequence[Sample], spec: LossSpec):
        seen: dict[str, torch.Tensor] = {}
        step = self.optimizer.step

        def watching() -> float:
            seen.update({n: m.grad.clone() for n, m in self.optimizer.masters.items() if m.grad is not None})
            return step()

        self.optimizer.step = watching  # type: ignore[method-assign]
        return seen, self.train_step(samples, spec)


def spec_of(**options: object) -> LossSpec:
    return LossSpec(target="rl_harness.learning.grpo:GRPOLoss", options={"clip_low": 0.2, "clip_high": 0.2, **options})


@pytest.mark.parametrize("build", [llama, qwen3, gpt2, sliding])
@pytest.mark.parametrize("budget", [8, 24, 10_000])
def test_gradients_equal_plain_training(build, budget, tmp_path):
    model = build().double()
    samples = conversations()
    expected = plain_gradients(model, samples, GRPOLoss(clip_low=0.2, clip_high=0.2))
    trainer = _Watched(model, OptimizerSpec(), source=tmp_path, micro_batch_tokens=budget)
    found, result = trainer.capture(samples, spec_of())
    assert set(found) == set(expected)
    # GPT-2 computes in fp64 throughout; the others' norms go through fp32 whatever the weights are.
    tight = {"rtol": 1e-9, "atol": 1e-11} if build is gpt2 else {"rtol": 1e-4, "atol": 2e-6}
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, **tight, msg=lambda m, name=name: f"{name}: {m}")
    assert result.metrics["tokens_computed"] > 0


def test_gradients_equal_plain_training_in_fp32(tmp_path):
    model, samples = llama(tie_word_embeddings=True), conversations()
    expected = plain_gradients(model, samples, GRPOLoss(clip_low=0.2, clip_high=0.2))
    found, _ = _Watched(model, OptimizerSpec(), source=tmp_path).capture(samples, spec_of())
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("unit", ["turn", "episode"])
@pytest.mark.parametrize("budget", [16, 10_000])
def test_sequence_level_ratios_survive_the_split(unit, budget, tmp_path):
    # With 16 tokens a micro-batch an episode's turns are apart, so the loss needs two passes.
    model, samples = gpt2().double(), conversations()
    expected = plain_gradients(model, samples, GRPOLoss(clip_low=0.2, clip_high=0.2, ratio=unit))
    trainer = _Watched(model, OptimizerSpec(), source=tmp_path, micro_batch_tokens=budget)
    found, _ = trainer.capture(samples, spec_of(ratio=unit))
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-7, atol=1e-9)


def test_sharing_is_real(tmp_path):
    samples = conversations()
    result = Trainer(llama(), OptimizerSpec(), source=tmp_path).train_step(samples, spec_of())
    assert result.metrics["tokens"] == sum(len(s.prompt) + len(s.completion) for s in samples)
    distinct = {tuple([*s.prompt, *s.completion][:i]) for s in samples for i in range(1, len(s.prompt) + 5)}
    assert result.metrics["tokens_computed"] < len(distinct) + 1
    assert result.metrics["tokens_computed"] < result.metrics["tokens"] / 2


def test_forward_gives_every_token_its_own_value(tmp_path):
    model = gpt2().double()
    samples = conversations()
    found = Trainer(model, OptimizerSpec(), source=tmp_path, micro_batch_tokens=20).forward(
        samples, ["logp", "entropy"]
    )
    for sample, logp, entropy in zip(samples, found["logp"], found["entropy"], strict=True):
        sequence = torch.from_numpy(np.concatenate([sample.prompt, sample.completion]).astype(np.int64))
        logits = model(input_ids=sequence[None]).logits[0, len(sample.prompt) - 1 : -1] / sample.temperature
        scores = logits.log_softmax(-1).detach()
        np.testing.assert_allclose(logp, scores.gather(1, sequence[len(sample.prompt) :, None])[:, 0], atol=1e-9)
        np.testing.assert_allclose(entropy, -(scores.exp() * scores).sum(-1), atol=1e-9)


class EntropyBonus(Loss):
    """Differentiates two outputs, as a third party's loss may."""

    needs = frozenset({"logp", "entropy"})

    def __call__(self, outputs: Mapping[str, np.ndarray], batch: TokenBatch) -> LossResult:
        w = batch.weight
        value = -(w @ outputs["logp"]) - 0.1 * (w @ outputs["entropy"])
        return LossResult(value=float(value), grads={"logp": -w, "entropy": -0.1 * w}, sums={})


def test_a_loss_may_differentiate_the_entropy(tmp_path, monkeypatch):
    model, samples = gpt2().double(), [s for s in conversations() if s.turn != "twin"]
    model.zero_grad()
    for sample in samples:
        sequence = torch.from_numpy(np.concatenate([sample.prompt, sample.completion]).astype(np.int64))
        logits = model(input_ids=sequence[None]).logits[0, len(sample.prompt) - 1 : -1] / sample.temperature
        scores = logits.log_softmax(-1)
        logp = scores.gather(1, sequence[len(sample.prompt) :, None])[:, 0]
        w = torch.from_numpy(sample.weight.copy())
        (-(w * logp).sum() + 0.1 * (w * (scores.exp() * scores).sum(-1)).sum()).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    monkeypatch.setattr("rl_harness.learning.grpo.EntropyBonus", EntropyBonus, raising=False)
    trainer = _Watched(model, OptimizerSpec(), source=tmp_path, micro_batch_tokens=40)
    found, _ = trainer.capture(samples, LossSpec(target="rl_harness.learning.grpo:EntropyBonus"))
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("chunk_rows", [1, 3, 7, 100])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("transform", [IDENTITY, Transform(0.3), Transform(1.0, 2.0), Transform(0.5, 3.0)])
def test_the_chunked_head_is_the_plain_one(chunk_rows, with_bias, transform):
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 5).double().requires_grad_(), torch.randn(11, 5).double().requires_grad_()
    bias = torch.randn(11).double().requires_grad_() if with_bias else None
    targets, scale = torch.randint(11, (7,)), torch.rand(7).double() + 0.5
    logits = transform(hidden @ weight.T + (bias if bias is not None else 0))
    scores = (logits * scale[:, None]).log_softmax(-1)
    plain = scores.gather(1, targets[:, None])[:, 0], -(scores.exp() * scores).sum(-1)
    ours = token_outputs(hidden, weight, bias, targets, scale, transform, chunk_bytes=chunk_rows * 11 * 4)
    into = [hidden, weight] + ([bias] if bias is not None else [])
    pull = torch.randn(7).double(), torch.randn(7).double()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(torch.autograd.grad(ours, into, pull), torch.autograd.grad(plain, into, pull), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_log_probs_of_given_logits_are_the_plain_ones(chunk_rows):
    torch.manual_seed(0)
    logits, targets, scale = torch.randn(7, 11).double().requires_grad_(), torch.randint(11, (7,)), torch.rand(7) + 0.5
    scores = (logits * scale.double()[:, None]).log_softmax(-1)
    plain = scores.gather(1, targets[:, None])[:, 0], -(scores.exp() * scores).sum(-1)
    ours = logit_outputs(logits, targets, scale, chunk_bytes=chunk_rows * 11 * 4)
    pull = torch.randn(7).double(), torch.randn(7).double()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(torch.autograd.grad(ours, logits, pull), torch.autograd.grad(plain, logits, pull))


def test_a_model_with_a_sliding_window_is_not_packed_and_says_why():
    scorer = Scorer(sliding())
    assert not scorer.tree_packing
    assert "window 4" in str(scorer.reason)


def test_a_model_that_ignores_the_mask_is_found_out(monkeypatch):
    model = llama()
    forward = model.model.forward

    def deaf(attention_mask=None, position_ids=None, **more):
        four_d = attention_mask is not None and attention_mask.ndim == 4
        return forward(attention_mask=None if four_d else attention_mask, position_ids=position_ids, **more)

    monkeypatch.setattr(model.model, "forward", deaf)
    assert "found by trying" in str(Scorer(model).reason)


def test_a_model_that_is_not_causal_is_refused(monkeypatch):
    model = llama()
    forward = model.forward

    def sighted(**more):
        out = forward(**more)
        out.logits = out.logits + out.logits.mean(1, keepdim=True)
        return out

    monkeypatch.setattr(model, "forward", sighted)
    with pytest.raises(Unsupported, match="not causal"):
        Scorer(model)


def test_a_model_that_never_says_the_same_twice_is_refused(monkeypatch):
    model = llama()
    forward, calls = model.forward, itertools.count()

    def moody(**more):
        out = forward(**more)
        out.logits = out.logits.abs().sqrt() * (1 + next(calls) // 4)  # the head is tried once, then each probe
        return out

    monkeypatch.setattr(model, "forward", moody)
    with pytest.raises(Unsupported, match="same log-probs twice"):
        Scorer(model)
