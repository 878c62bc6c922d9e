"""A small world for jobs: a tokenizer folder as the model, the scripted engine, a few tasks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rl_harness.testing.engine import SCRIPTED_PLUGIN
from rl_harness.testing.tokenizer import write_tokenizer


class World:
    """Runs ``rl-harness`` as a process in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = write_tokenizer(directory / "tiny")
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RL_HARNESS_")},
            "XDG_CACHE_HOME": str(directory / "cache"),
            "OMP_NUM_THREADS": "1",
        }

    def question(self, name: str, answer: str) -> Path:
        """A task graded on its final answer."""
        task = self.directory / "tasks" / name
        task.mkdir(parents=True)
        (task / "instruction.md").write_text(f"Say {answer}.\n")
        (task / "task.toml").write_text(f"[rl_harness]\nanswer = {answer!r}\n")
        return task

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "rl_harness", *arguments]

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,
        )

    def run(self, *arguments: str, expect: int = 0) -> str:
        """Standard output of a command that must end with exit code ``expect``."""
        done = subprocess.run(
            self.command(*arguments), cwd=self.directory, env=self.environment, capture_output=True, timeout=100
        )
        assert done.returncode == expect, (done.returncode, done.stdout.decode(), done.stderr.decode())
        self.stderr = done.stderr.decode()
        assert "Traceback" not in self.stderr
        return done.stdout.decode()

    def json(self, *arguments: str, expect: int = 0) -> Any:
        return json.loads(self.run(*arguments, "--json", expect=expect))

    @property
    def scripted(self) -> tuple[str, ...]:
        """The options that select the scripted engine."""
        return ("-p", str(SCRIPTED_PLUGIN), "--engine", "scripted", "--model", str(self.model))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)
