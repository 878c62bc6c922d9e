"""The embedded engine (``--engine torch``): a decoder-only transformers model, computed in a worker process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
from pydantic import BaseModel, Field
from rl_harness import contracts
from rl_harness.contracts import (
    EngineCapabilities,
    GenerateRequest,
    ModelInfo,
    TokenChunk,
    TokenEngine,
    WeightSource,
)
from rl_harness.errors import EngineError, Unavailable, Unsupported

from rl_harness_torch import models, threads
from rl_harness_torch.rpc import Worker

_log = logging.getLogger("rl_harness.engine.torch")
_TOP_LOGPROBS = 20


class TorchEngineOptions(contracts.Options):
    dtype: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: fp32 on a CPU, bf16 on a GPU")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    threads: int | None = Field(None, ge=1, description="CPU threads; OMP_NUM_THREADS or the physical cores if unset")
    max_batch: int = Field(64, ge=1, description="requests that run at once; others wait")
    prefill_tokens: int = Field(512, ge=16, description="prompt tokens computed between two tokens of running requests")
    kv_gib: float | None = Field(
        None, gt=0, description="memory for keys and values; a quarter of the free memory if unset (GPU: 60 %)"
    )
    context_length: int | None = Field(None, ge=16, description="prompt plus completion; the model's own if unset")
    stream_interval: float = Field(0.02, ge=0, description="seconds between two chunks of one stream")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """:class:`TorchEngineOptions` as the worker needs them."""

    dtype: Literal["auto", "fp32", "bf16"]
    device: str
    threads: int | None
    max_batch: int
    prefill_tokens: int
    kv_gib: float | None
    context_length: int | None
    stream_interval: float


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What was loaded. ``slower``: how and why, if it is not served in packed steps."""

    path: str
    device: str
    dtype: str
    threads: int
    vocab_size: int
    context_length: int
    slower: str | None = None


class TorchEngine(TokenEngine):
    """See the package's README for what it measures like and what it cannot serve."""

    api: ClassVar[int] = 1
    Options: ClassVar[type[contracts.Options]] = TorchEngineOptions

    def __init__(self, options: BaseModel) -> None:
        assert isinstance(options, TorchEngineOptions)
        self._options = options
        self._worker: Worker | None = None
        self._served: Served | None = None
        self._version = 0

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            trainable=True,
            weight_transports=("file",),
            context_length=self._served.context_length if self._served is not None else None,
            top_logprobs=_TOP_LOGPROBS,
        )

    async def preflight(self) -> None:
        for module in ("torch", "transformers", "safetensors"):
            if importlib.util.find_spec(module) is None:
                raise Unavailable(f"the embedded engine needs {module}", remedy="pip install rl-harness-torch")

    async def preflight_model(self, model: str) -> None:
        await asyncio.to_thread(models.find, model)

    async def start(self, model: str) -> ModelInfo:
        if self._worker is not None:
            raise EngineError("the embedded engine was started twice")
        await asyncio.to_thread(models.find, model)  # a worker that finds nothing to load takes seconds to say so
        options = self._options
        self._worker = await Worker.start(
            "rl_harness_torch.engine_worker", name="engine", env=threads.environment(options.threads)
        )
        settings = Settings(**options.model_dump())
        try:
            served = self._served = await self._worker.call("start", model, settings, returns=Served)
        except BaseException:
            await self.close()
            raise
        if served.slower is not None:
            _log.warning("%s: %s", model, served.slower)
        path = Path(served.path)
        return ModelInfo(
            name=Path(model).name,
            path=path,
            vocab_size=served.vocab_size,
            context_length=served.context_length,
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Raises ``UsageError`` for a request that can never be served: an empty prompt, one that fills the context,
        ids outside the vocabulary, sampling parameters out of range."""
        if request.sampling.top_logprobs > _TOP_LOGPROBS:
            raise Unsupported(
                f"request {request.id}: at most {_TOP_LOGPROBS} top_logprobs, not {request.sampling.top_logprobs}"
            )
        stream = self._started.stream("generate", request, yields=TokenChunk)
        async with contextlib.aclosing(stream):
            async for chunk in stream:
                yield chunk

    def version(self) -> int:
        return self._version

    async def prepare(self, source: WeightSource) -> None:
        """Check and map the weights in ``source.path``; running requests notice nothing."""
        if source.transport != "file" or source.path is None:
            raise Unsupported(f"the embedded engine takes weights by transport 'file', not {source.transport!r}")
        await self._started.call("prepare", str(source.path), source.manifest, returns=type(None))

    async def commit(self, version: int) -> None:
        """Switch between two tokens. Running requests are computed anew from their ids with the new weights and go
        on where they were; their later chunks carry the new version."""
        await self._started.call("commit", version, returns=type(None))
        self._version = version

    async def stats(self) -> Mapping[str, float]:
        return await self._started.call("stats", returns=dict[str, float])

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.close()

    @property
    def _started(self) -> Worker:
        if self._worker is None:
            raise EngineError("the embedded engine is not running")
        return self._worker
