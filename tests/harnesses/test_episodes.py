"""Harnesses in whole episodes: real tasks, real sandboxes, real grading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from rl_harness.contracts import (
    Harness,
    HarnessCapabilities,
    HarnessContext,
    HarnessResult,
    Options,
    Prompts,
    Sandbox,
    SandboxSource,
    SandboxSpec,
    SetupStep,
)
from rl_harness.errors import EngineError, TaskError, Unsupported
from rl_harness.gateway import Gateway, TokenPolicy
from rl_harness.gateway.renderers.chatml import ChatMLRenderer
from rl_harness.records import Episode, EpisodeKey, SamplingParams, Termination, UnscoredReason, encode
from rl_harness.redaction import Secrets
from rl_harness.rollout.episode import Attempt, EpisodeRunner
from rl_harness.rollout.harnesses.chat import ChatHarness
from rl_harness.rollout.harnesses.nop import NopHarness
from rl_harness.rollout.harnesses.oracle import OracleHarness
from rl_harness.rollout.harnesses.python import PythonHarness, PythonOptions
from rl_harness.rollout.harnesses.shell import ShellHarness, ShellOptions
from rl_harness.sandboxes.local import LocalProvider
from rl_harness.sandboxes.snapshots import Snapshots
from rl_harness.tasks import Task, load_task
from rl_harness.testing.engine import ScriptedEngine, ScriptedOptions
from rl_harness.testing.tokenizer import write_tokenizer


async def attempt(
    harness: Harness, task: Task, provider: SandboxSource | None = None, gateway: Gateway | None = None
) -> Episode:
    runner = EpisodeRunner(
        harness=harness,
        provider=provider,
        gateway=gateway,
        policy="policy",
        benchmark="b",
        prompts=Prompts(),
        labels={"run": "r"},
    )
    key = EpisodeKey(phase="evaluate", step=0, task=task.name, sample=0)
    episode, _ = await runner.attempt(Attempt(key=key, task=task, split="all", sampling=SamplingParams()))
    return episode


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(LocalProvider.Options(state_dir=tmp_path / "sandboxes"))
    yield provider
    await provider.close()


@pytest.fixture
async def engine(tmp_path: Path) -> ScriptedEngine:
    engine = ScriptedEngine(ScriptedOptions())
    await engine.start(str(write_tokenizer(tmp_path / "model")))
    return engine


@pytest.fixture
async def gateway(engine: ScriptedEngine, tmp_path: Path) -> AsyncIterator[Gateway]:
    renderer = ChatMLRenderer(ChatMLRenderer.Options())
    renderer.load(tmp_path / "model")
    async with Gateway({"policy": TokenPolicy("policy", engine, renderer)}) as gateway:
        yield gateway


@pytest.fixture
def question(tmp_path: Path) -> Task:
    (tmp_path / "question").mkdir()
    (tmp_path / "question" / "instruction.md").write_text("Say 4.\n")
    (tmp_path / "question" / "task.toml").write_text("[rl_harness]\nanswer = '4'\n")
    return load_task(tmp_path / "question")


@pytest.fixture
def job(tmp_path: Path) -> Task:
    files = {
        "instruction.md": "Write 36 to answer.txt.\n",
        "task.toml": 'schema_version = "1.4"\n[solution.env]\nANSWER = "36"\n'
        '[environment]\nnetwork_mode = "no-network"\n',
        "tests/test.sh": "grep -qx 36 /app/answer.txt && echo 1 > /logs/verifier/reward.txt"
        " || echo 0 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": 'echo "$ANSWER" > answer.txt\n',
    }
    for name, text in files.items():
        path = tmp_path / "job" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return load_task(tmp_path / "job")


@pytest.mark.needs("userns")
async def test_the_oracle_passes_and_nop_does_not(job, provider):
    solved = await attempt(OracleHarness(Options()), job, provider)
    assert (solved.reward, solved.termination) == (1.0, Termination.ANSWER), solved.detail
    assert (await attempt(NopHarness(Options()), job, provider)).reward == 0.0


@pytest.mark.needs("userns")
async def test_shell_and_python_agents_solve_it(job, provider, gateway, engine, tmp_path):
    engine.reply = lambda request, prompt: "```bash\necho 36 > answer.txt\n```" if "Output:" not in prompt else "Done."
    episode = await attempt(ShellHarness(ShellOptions()), job, provider, gateway)
    assert (episode.reward, episode.termination, episode.usage.turns) == (1.0, Termination.ANSWER, 2), episode.detail
    assert [event.kind for event in episode.events] == ["exec"]
    (tmp_path / "agent.py").write_text("def solve(task): task.sandbox.write_file('/app/answer.txt', '36\\n')")
    python = PythonHarness(PythonOptions(target="agent:solve", path=tmp_path))
    assert (await attempt(python, job, provider, gateway)).reward == 1.0


async def test_an_agent_that_fails_because_the_engine_did_is_unscored(question, gateway, engine, tmp_path):
    def fail(request, prompt):
        raise EngineError("out of memory")

    engine.reply = fail
    code = """
import json, os, urllib.request
def solve(task):
    body = json.dumps({"model": task.model, "messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {"Authorization": "Bearer " + task.api_key}
    try:
        urllib.request.urlopen(urllib.request.Request(task.base_url + "/chat/completions", body, headers))
    except Exception:
        os._exit(1)
"""
    (tmp_path / "agent.py").write_text(code)
    python = PythonHarness(PythonOptions(target="agent:solve", path=tmp_path))
    episode = await attempt(python, question, gateway=gateway)
    assert (episode.reward, episode.unscored) == (None, UnscoredReason.ENGINE_ERROR)
    assert "out of memory" in episode.detail


async def test_a_harness_that_cannot_start_its_worker_is_unscored(question, tmp_path):
    python = PythonHarness(PythonOptions(target="agent:solve", path=tmp_path / "gone"))
    episode = await attempt(python, question)
    assert (episode.reward, episode.unscored) == (None, UnscoredReason.HARNESS_ERROR)
    assert episode.termination == Termination.HARNESS_ERROR


async def test_an_agents_own_failure_is_graded(question, tmp_path):
    (tmp_path / "agent.py").write_text("def solve(task): raise ValueError('mine')")
    python = PythonHarness(PythonOptions(target="agent:solve", path=tmp_path))
    episode = await attempt(python, question)
    assert (episode.reward, episode.termination) == (0.0, Termination.AGENT_ERROR)


class Patient(Harness):
    """Watches over its machine for an hour, calling its model again and again would it have one."""

    api = 1
    setup = (SetupStep(name="tools", script="echo installed > /opt/tools"),)

    def __init__(self) -> None:
        super().__init__(Options())
        self.looked = 0

    @property
    def capabilities(self) -> HarnessCapabilities:
        return HarnessCapabilities(protocols=frozenset())

    async def run(self, context: HarnessContext) -> HarnessResult:
        assert context.sandbox is not None
        assert await context.sandbox.read_file("/opt/tools") == b"installed\n"
        while True:
            self.looked += 1
            await asyncio.sleep(0.05)


async def test_a_sandbox_that_dies_stops_its_agent_at_once_and_the_episode_is_unscored(job, provider, tmp_path):
    harness = Patient()
    source = Snapshots(provider, identity="local 1", state=tmp_path / "uses")
    running = asyncio.create_task(attempt(harness, job, source))
    while not harness.looked:
        await asyncio.sleep(0.01)
        assert not running.done(), running.result()
    await provider.reap(force=True)  # its init is killed, as by the kernel when memory runs out
    async with asyncio.timeout(60):  # its agent never ends by itself
        episode = await running
    assert episode.unscored is UnscoredReason.SANDBOX_ERROR
    assert episode.termination is Termination.SANDBOX_ERROR
    assert "sandbox" in episode.detail
    looked = harness.looked
    await asyncio.sleep(0.2)
    assert harness.looked == looked


class Refusing(LocalProvider):
    """Finds only when asked for a sandbox that something is wrong."""

    error: Exception = TaskError("compose.yaml: services.db: is no service")

    async def create(self, spec: SandboxSpec) -> Sandbox:
        raise self.error


@pytest.mark.parametrize(
    "error", [TaskError("the file: is bad"), Unsupported("the file: is bad"), ValueError("the file: is bad")]
)
async def test_what_is_wrong_with_a_task_costs_its_episode_only(job, tmp_path, error):
    provider = Refusing(LocalProvider.Options(state_dir=tmp_path / "sandboxes"))
    provider.error = error
    episode = await attempt(NopHarness(NopHarness.Options()), job, provider)
    assert episode.unscored is UnscoredReason.SANDBOX_ERROR
    assert episode.reward is None
    assert "the file: is bad" in episode.detail


class Mistaken(LocalProvider):
    """One of its methods raises what no contract knows."""

    method = ""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await super().create(spec)
        close, broken = sandbox.close, self.method

        async def mistake(*_: object, **__: object) -> None:
            if broken == "close":
                await close()
            raise KeyError("templateID")

        if "episode" in spec.labels:
            setattr(sandbox, broken, mistake)
        return sandbox


@pytest.mark.needs("userns")
@pytest.mark.parametrize("method", ["close", "kill_processes", "died", "exec", "changes"])
async def test_a_plugins_mistake_costs_its_episode_only(job, tmp_path, method, caplog):
    provider = Mistaken(LocalProvider.Options(state_dir=tmp_path / "sandboxes"))
    provider.method = method
    episode = await attempt(OracleHarness(OracleHarness.Options()), job, provider)
    assert "templateID" in episode.detail
    if method == "exec":  # raised in the middle of an agent, which is graded
        assert episode.termination is Termination.AGENT_ERROR
    else:
        assert episode.reward is None
        assert episode.unscored in (UnscoredReason.SANDBOX_ERROR, UnscoredReason.VERIFIER_ERROR)
    if method == "close":
        assert "Traceback" in caplog.text
        provider.method = ""
    await provider.close()


class KeylessInsideHarness(Harness):
    """Its agent runs in the sandbox and is given an address, and no key."""

    api = 1

    @property
    def capabilities(self) -> HarnessCapabilities:
        return HarnessCapabilities(inside=True)

    async def run(self, context: HarnessContext) -> HarnessResult:
        assert context.endpoint is not None
        assert context.sandbox is not None
        code = (
            "import json, sys, urllib.request as u; body = {'messages': [{'role': 'user', 'content': 'q'}]};"
            "print(json.load(u.urlopen(sys.argv[1] + '/chat/completions', json.dumps(body).encode()))['usage'])"
        )
        done = await context.sandbox.exec(["python3", "-c", code, context.endpoint.keyless_url], timeout=60)
        return HarnessResult(termination=Termination.ANSWER, detail=(done.stdout + done.stderr).decode())


@pytest.mark.needs("userns")
async def test_an_agent_inside_needs_no_key_where_its_address_is_secret(job, provider, gateway, engine):
    engine.reply = lambda request, prompt: "ok"
    episode = await attempt(KeylessInsideHarness(Options()), job, provider, gateway)
    assert episode.usage.turns == 1, episode.detail


TOKEN = "tok_9f8e7d6c5b4a39281706"


class LeakyHarness(Harness):
    """Its agent comes upon a secret: in an observation, in a reply, in its answer and in what it says at the end."""

    api = 1

    @property
    def capabilities(self) -> HarnessCapabilities:
        return HarnessCapabilities(needs_sandbox=False, acts=False)

    async def run(self, context: HarnessContext) -> HarnessResult:
        assert context.endpoint is not None
        context.on_event("exec", {"command": ["env"], "output": f"DEPLOY_TOKEN={TOKEN}"})
        asked = [{"role": "user", "content": "q"}, {"role": "user", "content": f"env says {TOKEN}"}]
        async with aiohttp.ClientSession() as http:
            for count in (1, 2):
                url = f"{context.endpoint.keyless_url}/chat/completions"
                async with http.post(url, json={"messages": asked[:count]}) as response:
                    assert response.status == 200, await response.text()
        return HarnessResult(termination=Termination.ANSWER, answer=f"4 {TOKEN}", detail=f"saw {TOKEN}")


async def test_a_secret_stays_out_of_an_episode(question, gateway, engine, monkeypatch):
    """Its turn is quarantined, its texts are redacted, and its grade is what it would have been."""
    gateway.secrets = gateway._sessions.secrets = Secrets({"DEPLOY_TOKEN": TOKEN})
    engine.reply = lambda request, prompt: "ok"
    runner = EpisodeRunner(
        harness=LeakyHarness(Options()),
        provider=None,
        gateway=gateway,
        policy="policy",
        benchmark="b",
        prompts=Prompts(),
        labels={},
    )
    key = EpisodeKey(phase="train", step=0, task=question.name, sample=0)
    episode, turns = await runner.attempt(Attempt(key=key, task=question, split="all", sampling=SamplingParams()))
    assert episode.flags == ("secrets",)
    assert [turn.quarantined for turn in turns] == [(), ("DEPLOY_TOKEN",)]
    assert episode.answer == "4 [redacted: DEPLOY_TOKEN]"
    assert episode.events[0].data["output"] == "DEPLOY_TOKEN=[redacted: DEPLOY_TOKEN]"
    assert TOKEN.encode() not in encode(episode) + b"".join(encode(turn) for turn in turns)
    assert episode.reward is not None
    assert episode.usage.turns == 2


@pytest.mark.needs("userns")
@pytest.mark.parametrize("stream", ["", " >&2"])
async def test_a_set_up_that_fails_after_much_output_tells_its_reason(job, provider, tmp_path, stream):
    """The end of what was printed, where the reason is, was cut from what the episode keeps."""
    script = (
        f"seq 1000000{stream}; echo E: no such package ripgrp{stream}; exit 100\n"  # beyond what commands may print
    )
    (job.directory / "environment").mkdir()
    (job.directory / "environment" / "setup.sh").write_text(script)
    (job.directory / "task.toml").write_text('[environment]\nnetwork_mode = "no-network"\n[rl_harness]\n')
    source = Snapshots(provider, identity="local 1", state=tmp_path / "uses")
    episode = await attempt(NopHarness(Options()), load_task(job.directory), source)
    assert episode.unscored is UnscoredReason.SANDBOX_ERROR
    assert episode.detail.startswith("set-up step 'environment/setup.sh' failed with exit code 100:\n1\n2\n")
    assert episode.detail.endswith("\n1000000\nE: no such package ripgrp")
    assert len(episode.detail) < 2100


async def test_an_episode_that_ends_in_a_model_call_records_that_it_waited(question, gateway, engine):
    """A call of which no turn came counted nowhere: the agent seemed to have been idle."""
    engine._options = ScriptedOptions(replies=("4",), delay=3600)
    (question.directory / "task.toml").write_text("[rl_harness]\nanswer = '4'\n[agent]\ntimeout_sec = 1\n")
    episode = await attempt(ChatHarness(ChatHarness.Options()), load_task(question.directory), gateway=gateway)
    assert (episode.termination, episode.usage.turns) == (Termination.TIME_LIMIT, 0), episode.detail
    assert 0 < episode.seconds["model"] <= episode.seconds["agent"]
