"""The engine's worker process: owns the model, takes requests between steps, streams what was sampled."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from rl_harness.contracts.backend import WeightManifest
from rl_harness.contracts.engine import GenerateRequest
from rl_harness.errors import EngineError, RlHarnessError
from tokenizers import Tokenizer

from rl_harness_torch import devices, models, threads
from rl_harness_torch.engine import Served, Settings
from rl_harness_torch.rpc import Call, Channel, Message
from rl_harness_torch.running import Running
from rl_harness_torch.scheduler import Limits, Scheduler
from rl_harness_torch.serving import scheduler_for
from rl_harness_torch.standby import Standby

_CONTEXT_IF_UNKNOWN = 131_072


class EngineWorker:
    """Methods without underscore are called from the main process; ``generate`` is handled apart, by the loop."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._calls: dict[int, tuple[Call, Running]] = {}  # by id of the running request
        self._standby: Standby | None = None
        self._scheduler: Scheduler[Any] | None = None
        self._interval = 0.0
        self._sent_at = 0.0

    def start(self, model: str, settings: Settings) -> Served:
        used = threads.settle(check=settings.threads is None)
        device = devices.pick(settings.device, "engine.device")
        dtype = devices.precision(settings.dtype, device)
        path = models.resolve(model)
        loaded = models.load_model(path, dtype, device)
        self._interval = settings.stream_interval
        made_for = models.context_length(loaded) or _CONTEXT_IF_UNKNOWN
        context = min(made_for, settings.context_length or made_for)
        end = models.end_token_ids(loaded)
        limits = Limits(
            batch=settings.max_batch,
            prefill=settings.prefill_tokens,
            kv_bytes=_kv_bytes(settings.kv_gib, device),
            context=context,
        )
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self._scheduler, slower = scheduler_for(loaded, tokenizer, end, limits)
        return Served(
            path=str(path),
            device=device,
            dtype=dtype,
            threads=used,
            vocab_size=self._scheduler.model.vocab_size,
            context_length=context,
            slower=slower,
        )

    def prepare(self, folder: str, manifest: WeightManifest) -> None:
        self._standby = None
        self._standby = Standby(self._running_scheduler.model.model, Path(folder), manifest)

    def commit(self, version: int) -> None:
        if self._standby is None:
            raise EngineError(f"there are no prepared weights to commit as version {version}")
        self._flush(everything=True)  # what the old weights sampled keeps their version
        standby, self._standby = self._standby, None
        standby.install()
        self._running_scheduler.weights_changed(version)

    def stats(self) -> dict[str, float]:
        return self._running_scheduler.stats()

    # ------------------------------------------------------------------------------------------------- the loop

    def _loop(self) -> None:
        while True:
            call = self._channel.receive(block=not self._busy)
            if call is None:
                self._step()
            elif call.method == "generate":
                self._generate(call)
            else:
                self._channel.dispatch(call, self)

    @property
    def _busy(self) -> bool:
        return self._scheduler is not None and self._scheduler.busy

    @property
    def _running_scheduler(self) -> Scheduler[Any]:
        if self._scheduler is None:
            raise EngineError("the engine has not been started")
        return self._scheduler

    def _generate(self, call: Call) -> None:
        try:
            (request,) = call.arguments((GenerateRequest,))
            running = self._running_scheduler.add(request)
        except Exception as error:
            self._channel.send([call.failure(error)])
        else:
            self._calls[id(running)] = (call, running)

    def _step(self) -> None:
        for call, running in list(self._calls.values()):
            if call.cancelled:
                running.cancelled = True
                self._channel.send([call.result()])
                del self._calls[id(running)]
        try:
            self._running_scheduler.step()
        except Exception as error:
            self._abandon(error)
        self._flush()

    def _flush(self, *, everything: bool = False) -> None:
        """Send new tokens: at once for requests that ended, else every ``stream_interval`` seconds."""
        now = time.monotonic()
        due = everything or now - self._sent_at >= self._interval
        messages: list[Message] = []
        version = self._running_scheduler.version
        for call, running in list(self._calls.values()):
            if (running.unsent and due) or running.finish is not None:
                messages.append(call.item(running.chunk(version)))
            if running.ended:
                messages.append(call.failure(running.error) if running.error is not None else call.result())
                del self._calls[id(running)]
        if due and messages:
            self._sent_at = now
        self._channel.send(messages)

    def _abandon(self, error: Exception) -> None:
        """A step failed, out of memory perhaps: every request in it fails, the engine goes on with none."""
        failure = error if isinstance(error, RlHarnessError) else EngineError(f"{type(error).__name__}: {error}")
        self._channel.send([call.failure(failure) for call, _ in self._calls.values()])
        self._calls.clear()
        self._running_scheduler.abandon()


def _kv_bytes(gib: float | None, device: str) -> int:
    if gib is not None:
        return int(gib * 2**30)
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0] * 0.6)
    return _free_memory() // 4


def _free_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def main() -> None:
    EngineWorker(Channel.inherited())._loop()


if __name__ == "__main__":
    main()
