"""One GRPO step, sampling included: ours against TRL's GRPOTrainer, on the same model, prompt and threads.

    python benchmarks/grpo_step.py [--model FOLDER-OR-NAME] [--threads 2] [--steps 5] [--rounds 1]

Both take one prompt of about 40 tokens, 8 completions of 32 tokens, fp32, and time whole steps: TRL's from its
step callbacks, ours from sampling through the weight update until the engine serves the new weights. TRL runs in an
environment of its own that this script makes once. Prints seconds a step of both and their ratio; the claim is at
most 0.5.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TRL = ("trl==1.16.*", "torch==2.13.0", "transformers==5.24.0", "accelerate", "datasets")
HOME = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl-harness" / "benchmarks" / "trl-1.16"
GROUP, LENGTH = 8, 32
PROMPT = (
    "The little village lay between two hills, and every morning the baker walked down to the river with an empty "
    "basket. Nobody knew what he was looking for, until one winter day"
)
#: A token of the vocabulary that text does not contain, as end token: every completion has its full length.
NEVER = "<reponame>"
CLAIM = 0.5


def environment(threads: int) -> dict[str, str]:
    """For both sides alike: as many threads, and idle ones that sleep."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def endless(model: Path, target: Path) -> Path:
    """A copy of a model folder whose end token is never sampled (weights are linked)."""
    from tokenizers import Tokenizer

    end = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id(NEVER)
    if end is None:
        raise SystemExit(f"{model} has no token {NEVER}: this benchmark is for SmolLM2")
    target.mkdir()
    for file in model.iterdir():
        if file.suffix == ".safetensors":
            (target / file.name).symlink_to(file.resolve())
        elif file.is_file():
            shutil.copy(file, target)
    for name, key, value in (
        ("config.json", "eos_token_id", end),
        ("generation_config.json", "eos_token_id", end),
        ("tokenizer_config.json", "eos_token", NEVER),
    ):
        content = json.loads((target / name).read_bytes())
        (target / name).write_text(json.dumps(content | {key: value}))
    return target


# ------------------------------------------------------------------------------------------------------------ TRL


def install_trl() -> Path:
    python = HOME / "bin" / "python"
    done = HOME / "complete"
    if not done.is_file():
        print(f"making an environment for {TRL[0]} in {HOME} (once; about 1.5 GB)", flush=True)
        venv.create(HOME, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *TRL], check=True)
        done.touch()
    return python


def run_trl(model: Path, threads: int, steps: int, scratch: Path) -> dict[str, Any]:
    command = [str(install_trl()), str(Path(__file__).resolve()), "--only-trl", "--model", str(model)]
    command += ["--threads", str(threads), "--steps", str(steps)]
    out = subprocess.run(
        command, env=environment(threads), cwd=scratch, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def trl_main(model: str, threads: int, steps: int) -> dict[str, Any]:
    """Runs inside TRL's environment."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    seconds: list[float] = []
    lengths: list[int] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **more: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **more: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

    def reward(completions: list[str], completion_ids: list[list[int]], **more: Any) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [float(len(set(text))) for text in completions]

    config = GRPOConfig(
        output_dir="trl",
        per_device_train_batch_size=GROUP,
        num_generations=GROUP,
        max_completion_length=LENGTH,
        max_steps=steps,
        learning_rate=1e-6,
        temperature=1.0,
        beta=0.0,
        bf16=False,
        fp16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [PROMPT] * steps}),
        callbacks=[Clock()],
    )
    trainer.train()
    return {"seconds": seconds, "tokens": sum(lengths) / max(1, len(lengths))}


# ----------------------------------------------------------------------------------------------------------- ours


async def run_ours(model: Path, threads: int, steps: int) -> dict[str, Any]:
    from rl_harness.contracts import OptimizerSpec
    from rl_harness.learning.grpo import GRPO, GRPOOptions
    from rl_harness_torch.backend import TorchBackend, TorchBackendOptions
    from rl_harness_torch.engine import TorchEngine, TorchEngineOptions
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    engine = TorchEngine(TorchEngineOptions(dtype="fp32", device="cpu", threads=threads))
    backend = TorchBackend(TorchBackendOptions(dtype="fp32", device="cpu", threads=threads))
    algorithm = GRPO(GRPOOptions())
    seconds: list[float] = []
    parts: dict[str, list[float]] = {}
    lengths: list[int] = []
    try:
        await engine.start(str(model))
        await backend.start(str(model), OptimizerSpec(learning_rate=1e-6), seed=0)
        for step in range(steps):
            start = time.perf_counter()
            completions = await asyncio.gather(*(sample(engine, prompt, f"{step}.{i}") for i in range(GROUP)))
            sampled = time.perf_counter()
            group = group_of(step, prompt, completions, tokenizer)
            learned = algorithm.learn([group])
            result = await backend.train_step(learned.samples, algorithm.loss())
            trained = time.perf_counter()
            source = await backend.weights("file")
            await engine.prepare(source)
            await engine.commit(source.manifest.version)
            await source.release()
            end = time.perf_counter()
            seconds.append(end - start)
            lengths += [len(ids) for ids, _ in completions]
            measured = {"sample": sampled - start, "train": trained - sampled, "weights": end - trained}
            for name, value in (measured | {"logp_gap": result.metrics["logp_gap"]}).items():
                parts.setdefault(name, []).append(value)
    finally:
        await backend.close()
        await engine.close()
    return {"seconds": seconds, "tokens": sum(lengths) / len(lengths), "parts": parts}


async def sample(engine: Any, prompt: list[int], name: str) -> tuple[list[int], list[float]]:
    from rl_harness.contracts import GenerateRequest
    from rl_harness.records import SamplingParams, ids

    request = GenerateRequest(
        id=name, prompt=ids(prompt), sampling=SamplingParams(max_tokens=LENGTH, temperature=1.0), cache_key="group"
    )
    tokens: list[int] = []
    logps: list[float] = []
    async for chunk in engine.generate(request):
        tokens += chunk.ids.tolist()
        logps += chunk.logps.tolist()
    return tokens, logps


def group_of(step: int, prompt: list[int], completions: list[tuple[list[int], list[float]]], tokenizer: Any) -> Any:
    from rl_harness.records import (
        Episode,
        EpisodeKey,
        Group,
        Message,
        SamplingParams,
        TaskRef,
        Termination,
        Turn,
        ids,
        logps,
    )

    episodes, turns = [], []
    for i, (tokens, values) in enumerate(completions):
        text = tokenizer.decode(tokens)
        episodes.append(
            Episode(
                id=f"{step}.{i}",
                key=EpisodeKey(phase="train", step=step, task="story", sample=i),
                task=TaskRef(benchmark="b", name="story", split="train", digest=""),
                termination=Termination.ANSWER,
                reward=float(len(set(text))),
            )
        )
        turn = Turn(
            id=f"{step}.{i}.0",
            session=f"{step}.{i}",
            index=0,
            policy="policy",
            sampling=SamplingParams(max_tokens=LENGTH),
            parent=None,
            shared=0,
            context=ids(prompt),
            completion=ids(tokens),
            logps=logps(values),
            versions=ids([step] * len(tokens)),
            finish_reason="length",
            message=Message(role="assistant", content=text),
            prompt_tokens=len(prompt),
            completion_tokens=len(tokens),
        )
        turns.append((turn,))
    return Group(id=f"train/{step}/story", expected=GROUP, episodes=tuple(episodes), turns=tuple(turns))


# ----------------------------------------------------------------------------------------------------- comparison


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a SmolLM2 folder or packaged name")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each side in a round")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them that are not counted")
    parser.add_argument("--rounds", type=int, default=1, help="how often both sides run in turn")
    parser.add_argument("--only-trl", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only_trl:
        print(json.dumps(trl_main(given.model, given.threads, given.steps)))
        return 0

    from rl_harness_torch.models import resolve

    install_trl()
    os.environ.update(environment(given.threads))
    steps = given.warmup + given.steps
    times: dict[str, list[float]] = {"trl": [], "ours": []}
    with tempfile.TemporaryDirectory() as scratch:
        model = endless(resolve(given.model), Path(scratch) / "model")
        for _ in range(given.rounds):
            for name in times:
                result = (
                    run_trl(model, given.threads, steps, Path(scratch))
                    if name == "trl"
                    else asyncio.run(run_ours(model, given.threads, steps))
                )
                times[name] += result["seconds"][given.warmup :]
                report(name, result, given.warmup)
    trl, ours = (statistics.median(times[name]) for name in ("trl", "ours"))
    print(f"grpo_step: ours {ours:.2f} s, TRL 1.16 {trl:.2f} s a step (median), ratio {ours / trl:.2f} <= {CLAIM}")
    return 0 if ours / trl <= CLAIM else 1


def report(name: str, result: Mapping[str, Any], warmup: int) -> None:
    line = " ".join(f"{value:.2f}" for value in result["seconds"])
    parts = {key: statistics.median(values[warmup:]) for key, values in result.get("parts", {}).items()}
    detail = "".join(f"  {key} {value:.3g}" for key, value in parts.items())
    print(f"{name:5} {line} s  ({result['tokens']:.1f} tokens a completion){detail}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
