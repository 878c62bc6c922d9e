"""The trainer in one process: steps that are exact, refused steps that change nothing, checkpoints, weights out."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from rl_harness.contracts import Loss, LossResult, LossSpec, OptimizerSpec
from rl_harness.errors import BackendError, Unsupported
from rl_harness.records import Sample, ids, logps
from rl_harness_torch import checkpoint, tensors, weight_folders
from rl_harness_torch.models import load_model
from rl_harness_torch.trainer import Trainer
from rl_harness_torch.weight_files import PREFIX, reap
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

VOCAB = 61


def sample_of(name: str, prompt: list[int], completion: list[int], advantage: float, weight: float = 0.125) -> Sample:
    n = len(completion)
    return Sample(
        turn=name,
        episode=name,
        group="g",
        policy="p",
        temperature=1.0,
        prompt=ids(prompt),
        completion=ids(completion),
        mask=logps(np.ones(n)),
        behaviour_logps=logps(np.full(n, -np.log(VOCAB))),
        versions=ids(np.zeros(n)),
        advantage=logps(np.full(n, advantage)),
        weight=logps(np.full(n, weight)),
    )


@pytest.fixture
def samples() -> list[Sample]:
    return [sample_of("good", [1, 2, 3], [4, 5, 6, 7], 1.0), sample_of("bad", [1, 2, 3], [4, 9, 10, 11], -1.0)]


def grpo(**options: object) -> LossSpec:
    defaults = {"clip_low": 0.2, "clip_high": 0.2}
    return LossSpec(target="rl_harness.learning.grpo:GRPOLoss", options=defaults | options)


@pytest.fixture
def make_trainer(tiny_model: Path, tmp_path: Path):
    made: list[Trainer] = []

    def make(folder: Path = tiny_model, dtype: str = "fp32", **spec: object) -> Trainer:
        base = tmp_path / "memory"
        base.mkdir(exist_ok=True)
        trainer = Trainer(
            load_model(folder, dtype),  # type: ignore[arg-type]
            OptimizerSpec(**({"learning_rate": 1e-2} | spec)),  # type: ignore[arg-type]
            source=tiny_model,
            dtype=dtype,  # type: ignore[arg-type]
            weight_folders=weight_folders.WeightFolders((base,)),
        )
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.close()


def snapshot(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def logp_of(trainer: Trainer, samples: list[Sample]) -> list[float]:
    return [float(values.sum()) for values in trainer.forward(samples, ["logp"])["logp"]]


# -------------------------------------------------------------------------------------------------- steps


def test_a_step_makes_what_was_good_likelier_and_what_was_bad_less_likely(make_trainer, samples):
    trainer = make_trainer(learning_rate=1e-3)
    current = trainer.forward(samples, ["logp"])["logp"]
    samples = [
        msgspec.structs.replace(sample, behaviour_logps=logps(logp))
        for sample, logp in zip(samples, current, strict=True)
    ]
    before = logp_of(trainer, samples)
    result = trainer.train_step(samples, grpo())
    after = logp_of(trainer, samples)
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert result.version == trainer.version == 1


def test_metrics_say_what_was_computed(make_trainer, samples):
    metrics = make_trainer().train_step(samples, grpo()).metrics
    assert metrics["tokens"] == 14
    assert metrics["tokens_computed"] == 8  # 3 + shared 4, then 2 and 2; the last token of each predicts nothing
    assert metrics["tokens_trained"] == 8
    assert metrics["logp_gap_max"] >= metrics["logp_gap"] > 0
    assert 0 < metrics["entropy"] <= np.log(VOCAB) + 1e-5
    for name in ("loss", "grad_norm", "learning_rate", "clip_fraction", "ratio", "seconds", "seconds_backward"):
        assert np.isfinite(metrics[name]), name


def test_metric_means_do_not_depend_on_the_scale_of_the_weights(make_trainer, samples):
    small = [msgspec.structs.replace(sample, weight=logps(sample.weight / 100)) for sample in samples]
    full, scaled = (make_trainer().train_step(batch, grpo()).metrics for batch in (samples, small))
    assert scaled["logp_gap"] == pytest.approx(full["logp_gap"], rel=1e-4)
    assert scaled["entropy"] == pytest.approx(full["entropy"], rel=1e-4)
    assert scaled["loss"] == pytest.approx(full["loss"] / 100, rel=1e-4)


def test_warm_up_is_linear_and_gradients_are_clipped(make_trainer, samples):
    trainer = make_trainer(learning_rate=1e-3, warmup_steps=4, max_grad_norm=1e-6)
    rates = [trainer.train_step(samples, grpo()).metrics["learning_rate"] for _ in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])
    moments = trainer.optimizer.state()
    norm = torch.stack([m.norm() for name, m in moments.items() if name.startswith("exp_avg.")]).norm()
    assert float(norm) <= 1e-6


def test_a_kl_penalty_holds_the_policy_at_its_reference(make_trainer, samples):
    free, held = make_trainer(), make_trainer()
    for _ in range(5):
        free.train_step(samples, grpo())
        metrics = held.train_step(samples, grpo(kl=10.0)).metrics
    assert metrics["kl"] >= 0
    away = [abs(np.subtract(logp_of(t, samples), logp_of(make_trainer(), samples))).sum() for t in (free, held)]
    assert away[1] < away[0] / 2


def test_the_reference_stays_the_model_as_loaded(make_trainer, samples, tmp_path):
    trainer = make_trainer()
    first = logp_of(trainer, samples)
    trainer.train_step(samples, grpo())
    trainer.save(tmp_path / "checkpoint", optimizer=True)
    resumed = make_trainer()
    resumed.load(tmp_path / "checkpoint")
    reference = [float(values.sum()) for values in resumed.forward(samples, ["ref_logp"])["ref_logp"]]
    assert reference == pytest.approx(first, abs=1e-5)


def test_bf16_computes_narrow_and_keeps_fp32_masters(make_trainer, samples):
    trainer = make_trainer(dtype="bf16", learning_rate=1e-5)
    assert trainer.scorer.tree_packing
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    assert {m.dtype for m in trainer.optimizer.masters.values()} == {torch.float32}
    assert {m.dtype for m in trainer.optimizer.state().values()} <= {torch.float32}
    before = {name: m.clone() for name, m in trainer.optimizer.masters.items()}
    for _ in range(3):
        trainer.train_step(samples, grpo())
    # Steps this small vanish in bf16 weights; the masters must collect them.
    moved = [float((m - before[name]).abs().max()) for name, m in trainer.optimizer.masters.items()]
    assert max(moved) >= 2e-5
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, trainer.optimizer.masters[name].bfloat16())


def test_bf16_gradients_add_up_in_fp32_over_micro_batches(make_trainer, samples, tiny_model):
    grads = []
    for budget in (4, 10_000):
        trainer = Trainer(
            load_model(tiny_model, "bf16"), OptimizerSpec(), source=tiny_model, dtype="bf16", micro_batch_tokens=budget
        )
        grads.append(trainer.train_step(samples, grpo()).metrics["grad_norm"])
        assert all(p.grad is None for p in trainer.model.parameters())
    assert grads[0] == pytest.approx(grads[1], rel=0.05)


# -------------------------------------------------------------------------------- refused steps change nothing


class Exploding(Loss):
    needs = frozenset({"logp"})

    def __init__(self, *, value: float = 0.0, grad: float = 0.0) -> None:
        self.value, self.grad = value, grad

    def __call__(self, outputs, batch):
        return LossResult(value=self.value, grads={"logp": np.full_like(outputs["logp"], self.grad)}, sums={})


class Demanding(Loss):
    needs = frozenset({"value"})

    def __call__(self, outputs, batch):
        raise AssertionError("never evaluated")


@pytest.fixture(autouse=True)
def _losses(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Exploding, Demanding):
        monkeypatch.setattr(f"rl_harness.learning.grpo.{kind.__name__}", kind, raising=False)


@pytest.mark.parametrize(
    ("spec", "change", "error", "words"),
    [
        (("Exploding", {"value": float("nan")}), {}, BackendError, "loss is nan"),
        (("Exploding", {"grad": float("inf")}), {}, BackendError, "not finite"),
        (("Exploding", {"grad": 3e38}), {}, BackendError, "gradient norm"),
        (("Demanding", {}), {}, Unsupported, "no output value"),
        (("GRPOLoss", {"clip_low": 0.2, "nonsense": 1}), {}, Unsupported, "nonsense"),
        (("Missing", {}), {}, Unsupported, "cannot be imported"),
        (("GRPO", {}), {}, Unsupported, "not a Loss"),
        (("Exploding", {}), {"completion": ids([4, 9, 10, VOCAB])}, ValueError, "outside the vocabulary of 61"),
        (("Exploding", {}), {"prompt": ids([-1, 2, 3])}, ValueError, "id -1"),
        (("Exploding", {}), {"behaviour_logps": logps([0, 0, np.nan, 0])}, ValueError, "behaviour_logps"),
        (("Exploding", {}), {"prompt": ids([1] * 200)}, ValueError, "128 positions"),
    ],
)
def test_a_refused_step_leaves_everything_as_it_was(make_trainer, samples, spec, change, error, words):
    trainer = make_trainer()
    trainer.train_step(samples, grpo())
    before, moments = snapshot(trainer), {n: m.clone() for n, m in trainer.optimizer.state().items()}
    broken = [samples[0], msgspec.structs.replace(samples[1], **change)]
    name, options = spec
    with pytest.raises(error, match=words):
        trainer.train_step(broken, LossSpec(target=f"rl_harness.learning.grpo:{name}", options=options))
    assert same(snapshot(trainer), before)
    assert same(trainer.optimizer.state(), moments)
    assert trainer.version == trainer.optimizer.steps == 1
    assert all(p.grad is None for p in trainer.model.parameters())


def test_a_model_that_gives_nan_is_found_before_the_backward_pass(make_trainer, samples):
    trainer = make_trainer()
    with torch.no_grad():
        trainer.model.get_output_embeddings().weight[5] = float("nan")
    with pytest.raises(BackendError, match="logp for turn"):
        trainer.train_step(samples, grpo())
    assert trainer.version == 0


def test_a_batch_that_trains_nothing_is_refused(make_trainer, samples):
    masked = [msgspec.structs.replace(sample, mask=logps(np.zeros(4))) for sample in samples]
    with pytest.raises(BackendError, match="trains no token"):
        make_trainer().train_step(masked, grpo())


# ------------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training_goes_on_exactly_from_a_checkpoint(make_trainer, samples, tmp_path, dtype):
    trainer = make_trainer(dtype=dtype, warmup_steps=4)
    for _ in range(2):
        trainer.train_step(samples, grpo())
    trainer.save(tmp_path / "two", optimizer=True)
    expected = trainer.train_step(samples, grpo())

    resumed = make_trainer(dtype=dtype, warmup_steps=4)
    assert resumed.load(tmp_path / "two") == 2
    found = resumed.train_step(samples, grpo())
    assert same(snapshot(resumed), snapshot(trainer))
    assert same(resumed.optimizer.state(), trainer.optimizer.state())
    assert found.version == 3
    for name, value in expected.metrics.items():
        if not name.startswith("seconds"):
            assert found.metrics[name] == value, name


def test_a_checkpoint_is_a_model_folder_for_anyone(make_trainer, samples, tiny_model, tmp_path):
    trainer = make_trainer()
    trainer.train_step(samples, grpo())
    trainer.save(tmp_path / "model", optimizer=False)
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == sorted(
        {p.name for p in tiny_model.iterdir()} | {"trainer.json"}
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.float32
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, dict(trainer.model.named_parameters())[name])
    again = make_trainer(tmp_path / "model")
    assert logp_of(again, samples) == logp_of(trainer, samples)
    with pytest.raises(BackendError, match="without its optimizer"):
        again.load(tmp_path / "model")


def test_saving_over_a_checkpoint_replaces_it(make_trainer, samples, tmp_path):
    trainer = make_trainer()
    trainer.save(tmp_path / "c", optimizer=True)
    trainer.train_step(samples, grpo())
    (tmp_path / ".c.part").mkdir()  # as a kill in the middle of saving leaves it
    (tmp_path / ".c.part" / "model.safetensors").write_bytes(b"half")
    trainer.save(tmp_path / "c", optimizer=True)
    assert make_trainer().load(tmp_path / "c") == 1
    assert [p.name for p in tmp_path.iterdir() if "c" in p.name] == ["c"]


def test_a_full_disk_is_a_clear_error_and_the_old_checkpoint_stays(make_trainer, samples, tmp_path, monkeypatch):
    trainer = make_trainer()
    trainer.save(tmp_path / "c", optimizer=True)
    trainer.train_step(samples, grpo())
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(BackendError, match=r"was not saved.*No space left") as caught:
        trainer.save(tmp_path / "c", optimizer=True)
    monkeypatch.setattr(os, "write", real)
    assert "untouched" in str(caught.value.remedy)
    assert not (tmp_path / ".c.part").exists()
    assert make_trainer().load(tmp_path / "c") == 0


def test_a_checkpoint_that_does_not_fit_changes_nothing(make_trainer, samples, tmp_path):
    trainer = make_trainer()
    trainer.train_step(samples, grpo())
    trainer.save(tmp_path / "c", optimizer=True)
    before = snapshot(trainer)
    manifest = tmp_path / "c" / "trainer.json"
    written = json.loads(manifest.read_bytes())

    manifest.write_text(json.dumps(written | {"format": 99}))
    with pytest.raises(BackendError, match="format 99"):
        trainer.load(tmp_path / "c")
    manifest.write_text("{")
    with pytest.raises(BackendError, match=r"trainer\.json cannot be read"):
        trainer.load(tmp_path / "c")
    manifest.write_text(json.dumps(written))
    moments = {n: m.clone() for n, m in load_file(tmp_path / "c" / "optimizer.safetensors").items()}
    (tmp_path / "c" / "optimizer.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(BackendError, match="is damaged"):
        trainer.load(tmp_path / "c")
    (tmp_path / "c" / "optimizer.safetensors").unlink()
    with pytest.raises(BackendError, match="is missing"):
        trainer.load(tmp_path / "c")
    moments.pop(next(iter(moments)))
    tensors.write(tmp_path / "c" / "optimizer.safetensors", moments)
    with pytest.raises(BackendError, match="does not fit this model"):
        trainer.load(tmp_path / "c")
    with pytest.raises(BackendError, match="not a checkpoint"):
        trainer.load(tmp_path)
    assert same(snapshot(trainer), before)


def test_the_writer_agrees_with_safetensors(tmp_path):
    values = {
        "a": torch.randn(3, 5),
        "b.c": torch.randn(7).bfloat16(),
        "empty": torch.zeros(0, 4),
        "large": torch.randn((tensors._BUFFER >> 2) + 1001),
        "strided": torch.randn(6, 4).T,
    }
    tensors.write(tmp_path / "t.safetensors", values)
    read = load_file(tmp_path / "t.safetensors")
    assert same(read, values)
    assert read["b.c"].dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------- weights on their way


def test_weights_out_are_the_weights_in_the_serving_precision(make_trainer, samples):
    for dtype in ("fp32", "bf16"):
        trainer = make_trainer(dtype=dtype)
        trainer.train_step(samples, grpo())
        folder, manifest = trainer.weights()
        read = load_file(folder / "model.safetensors")
        assert same(read, snapshot(trainer))
        assert manifest.version == 1
        assert {info.name: info.shape for info in manifest.tensors} == {n: tuple(t.shape) for n, t in read.items()}
        assert manifest.digest == tensors.digest(read)
        trainer.release(folder)


def test_a_folder_is_stable_until_released_and_then_reused(make_trainer, samples):
    trainer = make_trainer()
    first, manifest = trainer.weights()
    trainer.train_step(samples, grpo())
    second, _ = trainer.weights()
    assert second != first
    assert tensors.digest(load_file(first / "model.safetensors")) == manifest.digest
    trainer.release(first)
    trainer.train_step(samples, grpo())
    third, _ = trainer.weights()
    assert third == first
    assert same(load_file(third / "model.safetensors"), snapshot(trainer))
    trainer.close()
    assert not first.exists()
    assert not second.exists()


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    code = (
        "import sys, time, torch; from pathlib import Path; from rl_harness_torch.weight_folders import WeightFolders\n"
        "WeightFolders((Path(sys.argv[1]),)).write({'a': torch.ones(4)}, 0)\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        (folder,) = tmp_path.iterdir()
        assert reap(tmp_path) == []  # it is alive
        process.kill()
        process.wait()
    newborn = tmp_path / f"{PREFIX}x"
    newborn.mkdir()
    stranger = tmp_path / "other"
    stranger.mkdir()
    assert reap(tmp_path) == [folder]
    os.utime(newborn, (time.time() - 1000,) * 2)
    assert reap(tmp_path) == [newborn]
    assert stranger.exists()


def test_without_room_in_memory_the_next_place_is_used_and_none_is_an_error(tmp_path, monkeypatch):
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real = weight_folders._allocate
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    calls = []

    def first_is_full(descriptor: int, size: int) -> None:
        calls.append(size)
        if len(calls) == 1:
            full(descriptor, 0, size)
        real(descriptor, size)

    monkeypatch.setattr(weight_folders, "_allocate", first_is_full)
    folders = weight_folders.WeightFolders((memory, disk))
    folder, _ = folders.write({"a": torch.ones(4)}, 0)
    assert folder.parent == disk
    assert list(memory.iterdir()) == []
    folders.close()
    monkeypatch.setattr(weight_folders, "_allocate", lambda descriptor, size: full(descriptor, 0, size))
    with pytest.raises(BackendError, match="No space left"):
        folders.write({"a": torch.ones(4)}, 0)


def test_format_is_that_of_the_manifest(make_trainer, tmp_path):
    make_trainer().save(tmp_path / "c", optimizer=True)
    assert checkpoint.read_manifest(tmp_path / "c").format == checkpoint.FORMAT
