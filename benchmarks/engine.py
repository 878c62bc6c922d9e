"""The embedded engine's sampling speed over transformers' ``model.generate``, in tokens per second.

Two workloads, each computed by both in turn, in processes with the same threads and the same fp32 model; a round gives
one ratio, the median of the rounds counts. No prompt is ever repeated, so nothing is left over from an earlier round.

- ``batch``: 16 different prompts of 40 tokens, 64 new tokens each. Claim: at least 1.0 times ``generate`` at batch 16.
- ``group``: 16 completions of one 400-token prompt, 32 new tokens each. Claim: at least 1.3 times.

The engine is measured as the gateway uses it, its process boundary included. Exit code 1 when a claim is not met.

    python benchmarks/engine.py [--model smollm2-135m-instruct] [--threads 2] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rl_harness.contracts import GenerateRequest
from rl_harness.records import SamplingParams, ids
from rl_harness.records.arrays import IdArray
from rl_harness_torch import threads
from rl_harness_torch.engine import TorchEngine, TorchEngineOptions
from rl_harness_torch.rpc import Worker, serve

BATCH = 16
WORKLOADS = {"batch": (40, 64, False, 1.0), "group": (400, 32, True, 1.3)}


class Baseline:
    """``model.generate`` in a worker of its own."""

    def load(self, path: str) -> int:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads.settle(check=False))
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return torch.get_num_threads()

    def generate(self, prompts: list[IdArray], new_tokens: int) -> int:
        import torch

        batch = torch.from_numpy(np.stack(prompts).astype(np.int64))
        with torch.inference_mode():
            out = self.model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=new_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        return int((out.shape[1] - batch.shape[1]) * out.shape[0])


async def sample(engine: TorchEngine, name: str, prompts: list[IdArray], new_tokens: int) -> int:
    async def one(i: int) -> int:
        sampling = SamplingParams(max_tokens=new_tokens, seed=i)
        request = GenerateRequest(id=f"{name}{i}", prompt=prompts[i], sampling=sampling)
        return sum([len(chunk.ids) async for chunk in engine.generate(request)])

    return sum(await asyncio.gather(*(one(i) for i in range(len(prompts)))))


async def compare(arguments: argparse.Namespace) -> int:
    engine = TorchEngine(TorchEngineOptions(device="cpu", threads=arguments.threads))
    info = await engine.start(arguments.model)
    environment = threads.environment(arguments.threads) | {"PYTHONPATH": str(Path(__file__).parent)}
    baseline = await Worker.start("engine", name="baseline", env=environment)
    failed = False
    try:
        used = await baseline.call("load", str(info.path), returns=int)
        print(f"model {info.name}, fp32, {used} threads, {arguments.rounds} rounds, tokens/s")
        rng = np.random.default_rng(0)
        for name, (length, new_tokens, shared, claim) in WORKLOADS.items():
            ratios, best = [], {"engine": 0.0, "generate": 0.0}
            for round_number in range(arguments.rounds + 1):
                prompts = [ids(rng.integers(100, info.vocab_size or 1000, length)) for _ in range(BATCH)]
                if shared:
                    prompts = [prompts[0]] * BATCH
                start = time.perf_counter()
                tokens = await sample(engine, f"{name}{round_number}-", prompts, new_tokens)
                middle = time.perf_counter()
                base_tokens = await baseline.call("generate", prompts, new_tokens, returns=int)
                speeds = (tokens / (middle - start), base_tokens / (time.perf_counter() - middle))
                if round_number:  # the first is for warming up
                    ratios.append(speeds[0] / speeds[1])
                    best = {k: max(v, s) for (k, v), s in zip(best.items(), speeds, strict=True)}
            ratio = statistics.median(ratios)
            failed |= ratio < claim
            print(
                f"{name}: engine {best['engine']:.0f}, generate {best['generate']:.0f} (best of each); "
                f"ratio {ratio:.2f} (median of {', '.join(f'{r:.2f}' for r in ratios)}), claim >= {claim}"
            )
    finally:
        await baseline.close()
        await engine.close()
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    return asyncio.run(compare(parser.parse_args()))


if __name__ == "__main__":
    if "RL_HARNESS_WORKER" in os.environ:
        serve(Baseline())
    sys.exit(main())
