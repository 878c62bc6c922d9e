"""The backend as core sees it: the contract, through the worker process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from rl_harness.contracts import LossSpec, OptimizerSpec
from rl_harness.errors import BackendError, Unavailable, Unsupported
from rl_harness.records import Sample, ids, logps
from rl_harness.testing import BackendKit, backend_checks
from rl_harness_torch.backend import TorchBackend, TorchBackendOptions
from rl_harness_torch.tensors import digest
from rl_harness_torch.weight_files import PREFIX
from safetensors.torch import load_file

LOSS = LossSpec(target="rl_harness.learning.grpo:GRPOLoss", options={"clip_low": 0.2, "clip_high": 0.2})


def sample_of(name: str, completion: list[int], advantage: float) -> Sample:
    n = len(completion)
    return Sample(
        turn=name,
        episode=name,
        group="g",
        policy="p",
        temperature=1.0,
        prompt=ids([1, 2, 3]),
        completion=ids(completion),
        mask=logps(np.ones(n)),
        behaviour_logps=logps(np.full(n, -4.0)),
        versions=ids(np.zeros(n)),
        advantage=logps(np.full(n, advantage)),
        weight=logps(np.full(n, 1 / 8)),
    )


SAMPLES = [sample_of("a", [4, 5, 6, 7], 1.0), sample_of("b", [4, 8, 9, 10], -1.0)]


def backend_of(**options: object) -> TorchBackend:
    return TorchBackend(TorchBackendOptions(threads=1, **options))  # type: ignore[arg-type]


async def test_the_whole_contract(tiny_model: Path, tmp_path: Path):
    backend = backend_of()
    await backend.preflight()
    await backend.start(str(tiny_model), OptimizerSpec(learning_rate=1e-2), seed=1)
    try:
        assert backend.version() == 0
        assert backend.capabilities.tree_packing
        before = await backend.forward(SAMPLES, ["logp", "entropy", "ref_logp"])
        assert [len(values) for values in before["logp"]] == [4, 4]
        np.testing.assert_allclose(before["ref_logp"][0], before["logp"][0], atol=1e-6)

        result = await backend.train_step(SAMPLES, LOSS)
        assert result.version == backend.version() == 1
        after = await backend.forward(SAMPLES, ["logp"])
        assert after["logp"][0].sum() > before["logp"][0].sum()

        with pytest.raises(BackendError, match=r"outside the vocabulary"):
            await backend.train_step([*SAMPLES, sample_of("c", [999], 1.0)], LOSS)
        with pytest.raises(Unsupported, match="no output value"):
            await backend.forward(SAMPLES, ["value"])
        with pytest.raises(Unsupported, match="by nccl"):
            await backend.weights("nccl")

        source = await backend.weights("file")
        assert source.transport == "file"
        assert source.path is not None
        assert source.manifest.version == 1
        assert digest(load_file(source.path / "model.safetensors")) == source.manifest.digest
        streamed = [(info.name, len(data)) async for info, data in source.buckets()]
        assert [name for name, _ in streamed] == [info.name for info in source.manifest.tensors]
        await source.release()

        await backend.save(tmp_path / "c", optimizer=True)
        await backend.train_step(SAMPLES, LOSS)
        assert backend.version() == 2
        assert await backend.load(tmp_path / "c") == backend.version() == 1
        np.testing.assert_array_equal((await backend.forward(SAMPLES, ["logp"]))["logp"][0], after["logp"][0])
    finally:
        await backend.close()
    await source.release()  # after the end there is nothing left to do
    assert not source.path.exists()


async def test_a_worker_that_is_killed_is_an_error_and_leaves_nothing_behind(tiny_model: Path):
    backend = backend_of()
    await backend.start(str(tiny_model), OptimizerSpec(), seed=1)
    source = await backend.weights("file")
    assert source.path is not None
    assert source.path.name.startswith(PREFIX)
    assert backend._worker is not None
    os.kill(backend._worker.pid, signal.SIGKILL)
    with pytest.raises(BackendError, match="SIGKILL"):
        await backend.train_step(SAMPLES, LOSS)
    await backend.close()
    assert not source.path.exists()


async def test_a_model_that_is_not_there_is_named(tmp_path: Path):
    backend = backend_of()
    with pytest.raises(Unavailable, match="no config"):
        await backend.start(str(tmp_path), OptimizerSpec(), seed=0)
    with pytest.raises(BackendError, match="not started"):
        await backend.train_step(SAMPLES, LOSS)


async def test_it_conforms(tiny_model: Path, tmp_path: Path):
    backend = backend_of(micro_batch_tokens=24)
    await backend.start(str(tiny_model), OptimizerSpec(learning_rate=1e-3), seed=1)
    try:
        for check in backend_checks():  # one after the other on one backend: starting takes seconds
            scratch = tmp_path / check.__name__
            scratch.mkdir()
            await check(BackendKit(backend=backend, vocab_size=61, scratch=scratch))
    finally:
        await backend.close()
