"""``rl-harness serve`` as a process for tests, with a real client as the agent and whoever rewards it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_harness.testing.engine import SCRIPTED_PLUGIN
from rl_harness.testing.tokenizer import write_tokenizer

PATIENCE = 120.0


class Served:
    """A running ``serve`` process: what it said, and clients of it."""

    def __init__(self, command: list[str], directory: Path, environment: dict[str, str]) -> None:
        self.directory = directory
        self.environment = environment
        self.process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.events: list[dict[str, Any]] = []
        self._agents: dict[str, Any] = {}
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._errors: list[bytes] = []
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        threading.Thread(target=self._read, args=(self.process.stdout, self._lines.put), daemon=True).start()
        self._listening = threading.Thread(
            target=self._read, args=(self.process.stderr, self._errors.append), daemon=True
        )
        self._listening.start()

    @staticmethod
    def _read(stream: Any, put: Callable[[bytes], None]) -> None:
        for line in stream:
            put(line)
        put(b"")

    @property
    def errors(self) -> str:
        """What it said on standard error, all of it once it has ended."""
        if self.process.poll() is not None:
            self._listening.join(PATIENCE)
        return b"".join(self._errors).decode()

    def wait_for(self, event: str, count: int = 1) -> dict[str, Any]:
        """The ``count``-th event of a kind since the process started."""
        while len(found := [one for one in self.events if one["event"] == event]) < count:
            try:
                line = self._lines.get(timeout=PATIENCE)
            except queue.Empty:
                raise AssertionError(f"no {event} came: {self.events[-3:]}, {self.errors}") from None
            assert line, f"it ended before {event}: {self.events[-3:]}, {self.errors}"
            self.events.append(json.loads(line))
        return found[count - 1]

    def ready(self) -> Served:
        told = self.wait_for("serving")
        self.base_url: str = told["base_url"]
        self.admin_key: str | None = told["admin_key"]
        return self

    def request(self, method: str, path: str, body: Any = None, *, key: str | None = None) -> tuple[int, Any]:
        """Status and JSON body of a request below the address."""
        import urllib.error
        import urllib.request

        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        url = self.base_url.removesuffix("/v1") + path
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                return response.status, json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def session(self, **how: Any) -> Any:
        status, told = self.request("POST", "/rl/sessions", how, key=self.admin_key)
        assert status == 201, told
        return told

    def look(self, session: dict[str, Any]) -> Any:
        status, told = self.request("GET", f"/rl/sessions/{session['id']}", key=self.admin_key)
        assert status == 200, told
        return told

    def agent(self, session: dict[str, Any]) -> Any:
        """The client that the ``openai`` package gives."""
        import openai

        key = session["api_key"]
        if key not in self._agents:  # an agent keeps its client too; making one costs more than a call
            self._agents[key] = openai.OpenAI(base_url=self.base_url, api_key=key, max_retries=0, timeout=PATIENCE)
        return self._agents[key]

    def say(self, session: dict[str, Any], *messages: str, **how: Any) -> Any:
        """One call of a real client; the messages are the user's and the model's in turn."""
        roles = ("user", "assistant")
        conversation = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
        return self.agent(session).chat.completions.create(model="m", messages=conversation, **how)

    def reward(self, session: dict[str, Any], *arguments: str, expect: int = 0) -> str:
        """``rl-harness reward`` as a process; what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "rl_harness", "reward", self.base_url, *arguments],
            cwd=self.directory,
            env={**self.environment, "RL_HARNESS_REWARD_KEY": session["reward_key"]},
            capture_output=True,
            timeout=PATIENCE,
        )
        assert done.returncode == expect, (done.returncode, done.stdout.decode(), done.stderr.decode())
        return (done.stdout or done.stderr).decode()

    def give(self, session: dict[str, Any], body: Any) -> tuple[int, Any]:
        """A reward without the command."""
        return self.request("POST", "/rl/reward", body, key=session["reward_key"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=PATIENCE)


class ServingPlace:
    """A directory to serve in."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RL_HARNESS_")},
            "OMP_NUM_THREADS": "1",
        }
        self.processes: list[Served] = []

    def start(self, *arguments: str, **variables: str) -> Served:
        command = [sys.executable, "-m", "rl_harness", "serve", "--json", *arguments]
        served = Served(command, self.directory, {**self.environment, **variables})
        self.processes.append(served)
        return served

    def scripted(self, *arguments: str, replies: tuple[str, ...] = ("yes", "no", "well"), **variables: str) -> Served:
        """It says ``replies`` one after the other."""
        model = self.directory / "tiny"
        if not model.exists():
            write_tokenizer(model)
        said = "engine.replies=" + json.dumps(list(replies))
        scripted = ("-p", str(SCRIPTED_PLUGIN), "--engine", "scripted", "--model", str(model), "-o", said)
        return self.start(*scripted, *arguments, **variables).ready()

    def kill(self) -> None:
        for served in self.processes:
            served.kill()

    def cli(self, *arguments: str, expect: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "rl_harness", *arguments],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            timeout=PATIENCE,
        )
        assert done.returncode == expect, (done.returncode, done.stdout.decode(), done.stderr.decode())
        return (done.stdout or done.stderr).decode()
