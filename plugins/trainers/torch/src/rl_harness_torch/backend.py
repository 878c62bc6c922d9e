"""The torch backend: trains in a worker process, so that the event loop never waits for a matrix product."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field
from rl_harness.contracts import (
    Backend,
    BackendCapabilities,
    LossSpec,
    OptimizerSpec,
    Options,
    StepResult,
    WeightSource,
)
from rl_harness.contracts.common import API
from rl_harness.errors import BackendError, Unavailable, Unsupported
from rl_harness.records import Sample
from rl_harness.records.arrays import LogpArray

from rl_harness_torch.models import resolve
from rl_harness_torch.rpc import Worker
from rl_harness_torch.threads import environment
from rl_harness_torch.trainer_worker import Settings, Started, WeightsReady
from rl_harness_torch.weight_files import FileWeights, default_bases, reap

T = TypeVar("T")

_log = logging.getLogger(__name__)

#: Names of outputs, here as well so that capabilities are known without importing torch.
_OUTPUTS = frozenset({"logp", "entropy", "ref_logp"})


class TorchBackendOptions(Options):
    dtype: Literal["auto", "fp32", "bf16"] = Field(
        "auto",
        description="what the model computes in, auto: fp32 on a CPU, bf16 on a GPU; "
        "weights and Adam's moments are kept in fp32 either way",
    )
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    threads: int | None = Field(None, ge=1, description="CPU threads; OMP_NUM_THREADS or the physical cores if unset")
    micro_batch_tokens: int = Field(
        1024, ge=1, description="distinct tokens that go through the model at once; less takes less memory"
    )


class TorchBackend(Backend):
    api = API
    Options = TorchBackendOptions

    def __init__(self, options: TorchBackendOptions) -> None:
        self.options = options
        self._worker: Worker | None = None
        self._tree_packing = True
        self._version = 0

    @property
    def capabilities(self) -> BackendCapabilities:
        """``tree_packing`` is known for sure once the model is loaded and has been tried."""
        return BackendCapabilities(
            outputs=_OUTPUTS, weight_transports=("file",), tree_packing=self._tree_packing, parallel=()
        )

    async def preflight(self) -> None:
        missing = [name for name in ("torch", "transformers", "safetensors") if importlib.util.find_spec(name) is None]
        if missing:
            raise Unavailable(
                f"the torch backend needs {', '.join(missing)}, which this environment lacks",
                remedy="pip install rl-harness-torch into this environment again",
            )

    async def start(self, model: str, optimizer: OptimizerSpec, *, seed: int) -> None:
        options = self.options
        folder = await asyncio.to_thread(resolve, model)
        self._worker = await Worker.start(
            "rl_harness_torch.trainer_worker",
            name="trainer",
            env=environment(options.threads) | _memory_environment(),
            failure=BackendError,
        )
        try:
            settings = Settings(options.dtype, options.device, options.threads, options.micro_batch_tokens)
            started = await self._call("start", str(folder), optimizer, seed, settings, returns=Started)
        except BaseException:
            await self.close()
            raise
        self._tree_packing = started.tree_packing
        if started.reason:
            _log.warning("training on %s: %s", started.way, started.reason)

    async def forward(self, samples: Sequence[Sample], outputs: Sequence[str]) -> dict[str, list[LogpArray]]:
        return await self._call("forward", list(samples), list(outputs), returns=dict[str, list[LogpArray]])

    async def train_step(self, samples: Sequence[Sample], loss: LossSpec) -> StepResult:
        result = await self._call("train_step", list(samples), loss, returns=StepResult)
        self._version = result.version
        return result

    async def weights(self, transport: str) -> WeightSource:
        if transport != "file":
            raise Unsupported(f"the torch backend gives weights by file, not by {transport}")
        ready = await self._call("weights", returns=WeightsReady)
        return FileWeights(Path(ready.path), ready.manifest, self._release)

    async def _release(self, path: Path) -> None:
        if self._worker is not None and self._worker.alive:
            await self._call("release", str(path), returns=type(None))

    async def save(self, path: Path, *, optimizer: bool) -> None:
        await self._call("save", str(path), optimizer, returns=type(None))

    async def load(self, path: Path) -> int:
        self._version = await self._call("load", str(path), returns=int)
        return self._version

    def version(self) -> int:
        return self._version

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.close()
            for base in default_bases():  # the worker is gone, so its weight folders are nobody's
                reap(base)

    async def _call(self, method: str, *arguments: object, returns: type[T]) -> T:
        if self._worker is None:
            raise BackendError("the torch backend is not started")
        return await self._worker.call(method, *arguments, returns=returns)


def _memory_environment() -> dict[str, str]:
    """Keep freed memory in the process: a step frees and allocates the same gigabytes again, and getting them from
    the kernel page by page takes up to as long as the arithmetic."""
    return {
        "THP_MEM_ALLOC_ENABLE": "1",  # torch: huge pages for large tensors
        "MALLOC_MMAP_MAX_": "0",  # glibc: large blocks come from the heap ...
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),  # ... which is not given back
    }
