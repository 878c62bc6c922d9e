"""Conformance checks for algorithms: what the training job and backends rely on.

In a test module of the plugin::

    @pytest.mark.parametrize("check", algorithm_checks(), ids=lambda check: check.__name__)
    def test_conforms(check):
        check(MyAlgorithm(MyAlgorithm.Options()))

A check fails with ``AssertionError`` and a sentence.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl_harness.contracts.algorithm import Algorithm, Loss
from rl_harness.contracts.common import API, Options
from rl_harness.records.sample import Group, TokenBatch
from rl_harness.records.turn import prompt_of
from rl_harness.testing.records import a_conversation, an_episode

Check = Callable[[Algorithm], None]


def algorithm_checks() -> list[Check]:
    """The checks that apply to every algorithm."""
    return [check_declaration, check_token_exact, check_dull_groups, check_loss_gradients, check_loss_parts]


def check_declaration(algorithm: Algorithm) -> None:
    """It states the contract's version and documented options."""
    assert algorithm.api == API, f"api is {algorithm.api!r}; this core accepts {API}"
    assert issubclass(algorithm.Options, Options), "Options is not a subclass of rl_harness.contracts.Options"
    undocumented = [name for name, field in algorithm.Options.model_fields.items() if not field.description]
    assert not undocumented, f"options without a description: {', '.join(undocumented)}"


def check_token_exact(algorithm: Algorithm) -> None:
    """Samples hold the ids of the turns they name, with finite numbers, and metrics are numbers."""
    group = _group([0.0, 1.0, 0.25, 1.0])
    turns = {turn.id: turn for conversation in group.turns for turn in conversation}
    learned = algorithm.learn([group])
    assert learned.samples, "it learns nothing from a group of different rewards"
    for sample in learned.samples:
        turn = turns[sample.turn]
        assert np.array_equal(sample.prompt, prompt_of(turn, turns.__getitem__)), f"{sample.turn}: another prompt"
        assert np.array_equal(sample.completion, turn.completion), f"{sample.turn}: another completion"
        assert np.array_equal(sample.behaviour_logps, turn.logps), f"{sample.turn}: other behaviour log-probs"
        assert np.array_equal(sample.versions, turn.versions), f"{sample.turn}: other versions"
        assert bool(np.isfinite(sample.advantage).all()), f"{sample.turn}: an advantage is not finite"
        assert bool((sample.weight >= 0).all()), f"{sample.turn}: a weight is negative"
        assert bool((sample.weight[sample.mask == 0] == 0).all()), f"{sample.turn}: a masked token has weight"
    assert sum(float(sample.weight.sum()) for sample in learned.samples) > 0, "no token has weight"
    odd = [name for name, value in learned.metrics.items() if not math.isfinite(value)]
    assert not odd, f"metrics that are not finite: {', '.join(odd)}"


def check_dull_groups(algorithm: Algorithm) -> None:
    """Nothing, equal rewards, and a group cut down to one episode are no errors."""
    for groups in ([], [_group([1.0, 1.0])], [_group([1.0], expected=4)]):
        learned = algorithm.learn(groups)
        assert all(bool(np.isfinite(sample.advantage).all()) for sample in learned.samples), (
            "an advantage is not finite"
        )


def check_loss_gradients(algorithm: Algorithm) -> None:
    """The loss's gradients are those of its value."""
    loss, batch, outputs = _loss_case(algorithm)
    result = loss(outputs, batch)
    assert result.grads.keys() <= loss.needs, f"it differentiates {sorted(result.grads.keys() - loss.needs)} undeclared"
    step = 1e-5
    for name, grad in result.grads.items():
        for i in range(len(batch.mask)):
            values = []
            for sign in (1, -1):
                moved = outputs[name].copy()
                moved[i] += sign * step
                values.append(loss({**outputs, name: moved}, batch).value)
            slope = (values[0] - values[1]) / (2 * step)
            assert math.isclose(grad[i], slope, rel_tol=1e-3, abs_tol=1e-6), f"d loss/d {name}[{i}]: {grad[i]}, {slope}"


def check_loss_parts(algorithm: Algorithm) -> None:
    """The loss of a batch is the sum of the losses of its units."""
    loss, batch, outputs = _loss_case(algorithm)
    whole = loss(outputs, batch)
    units: dict[str, NDArray[Any]] = {
        "token": np.arange(len(batch.mask)),
        "turn": batch.sample,
        "episode": batch.episode,
    }
    unit = units[loss.unit]
    parts = []
    for here in (unit == number for number in np.unique(unit)):
        part = {name: values[here] for name, values in msgspec.structs.asdict(batch).items()}
        part |= {name: np.unique(part[name], return_inverse=True)[1] for name in ("sample", "episode")}
        parts.append(loss({name: values[here] for name, values in outputs.items()}, TokenBatch(**part)))
    _same("loss", whole.value, [part.value for part in parts])
    for name, value in whole.sums.items():
        _same(name, value, [part.sums[name] for part in parts])


def _same(name: str, whole: float, parts: Sequence[float]) -> None:
    close = math.isclose(whole, sum(parts), rel_tol=1e-4, abs_tol=1e-7)
    assert close, f"{name}: the whole is {whole}, the sum of its parts {sum(parts)}"


def _group(rewards: Sequence[float], *, expected: int | None = None) -> Group:
    return Group(
        id="train/1/task",
        expected=len(rewards) if expected is None else expected,
        episodes=tuple(an_episode("task", reward, phase="train", sample=i) for i, reward in enumerate(rewards)),
        turns=tuple(
            tuple(
                msgspec.structs.replace(turn, id=f"{i}-{turn.id}", parent=turn.parent and f"{i}-{turn.parent}")
                for turn in a_conversation(1 + i % 2, new_tokens=2, completion=3)
            )
            for i in range(len(rewards))
        ),
    )


def _loss_case(algorithm: Algorithm) -> tuple[Loss, TokenBatch, dict[str, Any]]:
    """The algorithm's loss on what it learned from a group, with outputs near the behaviour's, in double precision."""
    spec = algorithm.loss()
    module, _, attribute = spec.target.partition(":")
    loss = getattr(importlib.import_module(module), attribute)(**spec.options)
    assert isinstance(loss, Loss), f"{spec.target} is not a Loss"
    batch = TokenBatch.of(algorithm.learn([_group([0.0, 1.0, 0.25])]).samples)
    rng = np.random.default_rng(0)
    outputs = {name: (batch.behaviour_logps + rng.normal(0, 0.05, len(batch.mask))) for name in loss.needs}
    return loss, batch, outputs
