"""``rl-harness run`` as a process: results, interruption once and twice, continuing, refusals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

PLUGIN = """
import asyncio, os, pathlib, time
from rl_harness import Extension, hookimpl
from rl_harness.contracts import Harness, HarnessCapabilities, HarnessResult, Options
from rl_harness.records import Termination

class Patient(Harness):
    '''Answers once a file named "go" exists; notes every start.'''
    api = 1
    capabilities = HarnessCapabilities(protocols=frozenset(), needs_sandbox=False)

    def __init__(self, options): ...

    async def run(self, context):
        with open("started", "a") as file:
            file.write(context.task.name + "\\n")
        while not os.path.exists("go"):
            await asyncio.sleep(0.01)
        return HarnessResult(termination=Termination.ANSWER, answer="42")

@hookimpl
def rl_harness_harnesses():
    return [Extension("patient", f"{__name__}:Patient", "waits for a file")]
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a plugin file and six tasks that are graded on their answer."""
    (tmp_path / "kit.py").write_text(textwrap.dedent(PLUGIN))
    (tmp_path / "rl-harness.toml").write_text(
        'plugins = ["kit.py"]\nharness = "patient"\nconcurrency = 2\nname = "x"\n'
    )
    for number in range(6):
        task = tmp_path / "tasks" / f"task-{number}"
        task.mkdir(parents=True)
        (task / "instruction.md").write_text("What is the answer?\n")
        (task / "task.toml").write_text('schema_version = "1.4"\n\n[rl_harness]\nanswer = "42"\n')
    return tmp_path


class Command:
    """A running ``rl-harness run tasks``."""

    def __init__(self, place: Path, *arguments: str) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RL_HARNESS_")}
        command = [sys.executable, "-m", "rl_harness", "run", "./tasks", *arguments]
        self.process = subprocess.Popen(
            command, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@pytest.fixture
def started(place: Path) -> Iterator[Any]:
    running: list[Command] = []

    def start(*arguments: str) -> Command:
        running.append(Command(place, *arguments))
        return running[-1]

    yield start
    for command in running:
        command.process.kill()
        command.process.communicate()


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def starts(place: Path) -> list[str]:
    file = place / "started"
    return file.read_text().split() if file.exists() else []


def test_a_run_reports_and_ends_with_0(place: Path, started: Any) -> None:
    (place / "go").touch()
    code, out, err = started("--limit", "3", "--json").end()
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert (report["status"], report["evaluations"][0]["summary"]["passed"]) == ("done", 3)
    assert len(starts(place)) == 3


def test_interrupted_once_it_finishes_what_runs_and_the_same_command_continues(place: Path, started: Any) -> None:
    first = started()
    wait_for(lambda: len(starts(place)) == 2)
    first.interrupt()
    time.sleep(0.2)
    assert first.process.poll() is None
    (place / "go").touch()
    code, _, _ = first.end()
    assert code == 130
    assert len(starts(place)) == 2
    code, out, _ = started().end()
    assert code == 0
    assert "resum" in out or "continu" in out
    assert sorted(starts(place)) == [f"task-{number}" for number in range(6)]


def test_interrupted_twice_it_stops_now_and_the_same_command_continues(place: Path, started: Any) -> None:
    first = started()
    wait_for(lambda: len(starts(place)) == 2)
    first.interrupt()
    time.sleep(0.2)
    first.interrupt()
    code, _, err = first.end()
    assert code == 130
    assert "Traceback" not in err
    (place / "go").touch()
    assert started().end()[0] == 0
    assert sorted(set(starts(place))) == [f"task-{number}" for number in range(6)]


def test_a_run_without_a_model_says_so(place: Path, started: Any) -> None:
    code, _, err = started("--harness", "chat", "--base-url", "http://127.0.0.1:9/v1").end()
    assert code == 2
    assert "--model" in err


WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "safetensors"):
    sys.modules[name] = None  # importing it raises ImportError
from rl_harness.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


async def test_any_api_model_is_evaluated_without_torch(place: Path) -> None:
    async def stream(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["model"] == "acme-large"
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for delta, reason in (({"role": "assistant", "content": "4"}, None), ({"content": "2"}, None), ({}, "stop")):
            chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}}
        await response.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", stream)
    async with TestServer(app) as server:
        arguments = ["run", "./tasks", "--harness", "chat", "--model", "acme-large", "--json"]
        arguments += ["--base-url", str(server.make_url("/v1"))]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WITHOUT_TORCH, *arguments, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    summary = json.loads(out)["evaluations"][0]["summary"]
    assert (summary["passed"], summary["scored"]) == (6, 6)
