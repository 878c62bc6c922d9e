"""What every agent gets from its base, shown with a small agent of our own: a script that calls its model once."""

from __future__ import annotations

import asyncio
import dataclasses
import stat
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rl_harness.contracts import HarnessCapabilities, Prompts, SandboxCapabilities
from rl_harness.errors import ConfigError, EngineError, Unavailable, Unsupported
from rl_harness.gateway import Gateway, TokenPolicy
from rl_harness.gateway.renderers.chatml import ChatMLRenderer
from rl_harness.records import Episode, EpisodeKey, SamplingParams, Termination, UnscoredReason
from rl_harness.rollout.episode import Attempt, EpisodeRunner
from rl_harness.sandboxes.local import LocalProvider
from rl_harness.tasks import Task, load_task
from rl_harness.testing.engine import ScriptedEngine, ScriptedOptions
from rl_harness.testing.tokenizer import write_tokenizer
from rl_harness_cli_agents import CliAgent, CliAgentOptions, Npm, Package, Pip, Seat
from rl_harness_cli_agents.__main__ import agents, load
from rl_harness_cli_agents.cache import agents_folder, install

#: Asks its model what to do and does it; prints what it read, and where its own files are.
PROGRAM = """
import json, os, subprocess, sys, urllib.error, urllib.request
body = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": sys.stdin.read()}]}
def ask():
    request = urllib.request.Request(os.environ["URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["KEY"]})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
for _ in range(int(os.environ.get("CALLS", "1"))):
    try:
        said = ask()
    except urllib.error.HTTPError as error:
        print("the model says", error.code)
        sys.exit(int(os.environ.get("CODE", "0")))
    code = subprocess.run(said, shell=True).returncode
open(os.path.expanduser("~/state"), "w").write("mine")
print("home", os.environ["HOME"], sorted(os.listdir(os.environ["HOME"])), sys.argv[1:])
sys.exit(code)
"""


@dataclass(frozen=True, kw_only=True)
class Script(Package):
    """A program that needs no registry."""

    text: str = PROGRAM

    def host_script(self, version: str) -> str:
        return f'echo {version} >> "$PREFIX/installed"; cat > "$PREFIX/agent.py" <<\'END\'\n{self.text}\nEND\n'

    def sandbox_script(self, version: str, prefix: str) -> str:
        return f"mkdir -p {prefix}; PREFIX={prefix}\n{self.host_script(version)}"

    def command(self, prefix: str) -> list[str]:
        return ["python3", f"{prefix}/agent.py"]

    def check(self, prefix: str) -> str:
        return f"[ -e {prefix}/agent.py ]"

    def preflight(self) -> None:
        return

    def facts(self) -> object:
        return self.text


class Own(CliAgent):
    name: ClassVar[str] = "own"
    package: ClassVar[Package] = Script(version="1.0", program="own")

    def environment(self, seat: Seat) -> Mapping[str, str]:
        return {"URL": seat.base_url, "KEY": seat.api_key, "MODEL": seat.model}

    def files(self, seat: Seat) -> Mapping[str, str]:
        return {f"{seat.home}/.own/it's a file": "$HOME `pwd`\n"}

    def arguments(self, seat: Seat) -> Sequence[str]:
        return [*self.options.args]

    def stdin(self, seat: Seat) -> str:
        return seat.instruction


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


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
def job(tmp_path: Path) -> Task:
    files = {
        "instruction.md": "-p 'Write' \"36\"\nto $HOME `answer`.txt\n",
        "task.toml": 'schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\n',
        "tests/test.sh": "ls -A /app; grep -qx 36 /app/answer.txt && echo 1 > /logs/verifier/reward.txt"
        " || echo 0 > /logs/verifier/reward.txt\n",
    }
    for name, text in files.items():
        path = tmp_path / "job" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return load_task(tmp_path / "job")


async def attempt(agent: CliAgent, job: Task, provider: LocalProvider, gateway: Gateway, **limits: Any) -> Episode:
    agent.adapt(provider.capabilities)
    await agent.preflight()
    await agent.start()
    runner = EpisodeRunner(
        harness=agent,
        provider=provider,
        gateway=gateway,
        policy="policy",
        benchmark="b",
        prompts=Prompts(),
        labels={"run": "r"},
        **limits,
    )
    key = EpisodeKey(phase="evaluate", step=0, task=job.name, sample=0)
    episode, _ = await runner.attempt(Attempt(key=key, task=job, split="all", sampling=SamplingParams()))
    return episode


def own(**options: Any) -> Own:
    return Own(CliAgentOptions(**options))


@pytest.mark.needs("userns")
async def test_an_agent_runs_inside_with_a_home_of_its_own(job, provider, gateway, engine) -> None:
    engine.reply = lambda request, prompt: "echo 36 > answer.txt"
    episode = await attempt(own(args=("--flag", "a b")), job, provider, gateway)
    assert (episode.reward, episode.termination, episode.usage.turns) == (1.0, Termination.ANSWER, 1), episode.detail
    assert episode.answer == "home /var/tmp/rl-harness-home ['.own', 'state'] ['--flag', 'a b']"
    (event, verifier) = episode.events
    assert (event.kind, event.data["exit_code"], event.data["program"]) == ("agent", 0, "own 1.0")
    assert "home /var/tmp" in event.data["output"]
    assert verifier.data["output"].strip() == "answer.txt", "something of the agent's own was left with the result"


@pytest.mark.needs("userns")
async def test_the_instruction_arrives_as_it_is(job, provider, gateway, engine) -> None:
    prompts = []
    engine.reply = lambda request, prompt: prompts.append(prompt) or "true"
    await attempt(own(), job, provider, gateway)
    assert job.instruction in prompts[0]


@pytest.mark.needs("userns")
async def test_what_counts_is_the_result_and_not_the_exit_code(job, provider, gateway, engine) -> None:
    engine.reply = lambda request, prompt: "echo 36 > answer.txt; echo on; exit 3"
    episode = await attempt(own(), job, provider, gateway)
    assert (episode.reward, episode.termination) == (1.0, Termination.AGENT_ERROR)
    engine.reply = lambda request, prompt: "true"
    episode = await attempt(own(), job, provider, gateway)
    assert (episode.reward, episode.termination) == (0.0, Termination.ANSWER)


@pytest.mark.needs("userns")
async def test_an_agent_is_stopped_at_its_deadline_and_graded(job, provider, gateway, engine) -> None:
    engine.reply = lambda request, prompt: "echo 36 > answer.txt; echo started; sleep 1000"
    episode = await attempt(own(), job, provider, gateway, agent_timeout=2.0)
    assert (episode.reward, episode.termination) == (1.0, Termination.TIME_LIMIT)
    assert "started" in episode.events[0].data["output"]


@pytest.mark.needs("userns")
async def test_a_call_beyond_the_last_turn_is_told_whatever_the_agent_makes_of_it(
    job, provider, gateway, engine
) -> None:
    engine.reply = lambda request, prompt: "echo 36 > answer.txt"
    for code in ("0", "1"):
        agent = own(env={"CALLS": "3", "CODE": code})
        episode = await attempt(agent, job, provider, gateway, max_turns=2)
        assert (episode.reward, episode.termination, episode.usage.turns) == (1.0, Termination.TURN_LIMIT, 2)


@pytest.mark.needs("userns")
async def test_an_agent_whose_model_failed_is_not_graded_although_it_exits_with_0(
    job, provider, gateway, engine
) -> None:
    def fail(request: Any, prompt: str) -> str:
        raise EngineError("out of memory")

    engine.reply = fail
    episode = await attempt(own(), job, provider, gateway)
    assert (episode.reward, episode.unscored) == (None, UnscoredReason.ENGINE_ERROR)
    assert "out of memory" in episode.detail


@pytest.mark.needs("userns")
async def test_a_program_that_is_not_there_is_the_harness_s_failure(job, provider, gateway) -> None:
    episode = await attempt(own(install="present"), job, provider, gateway)
    assert episode.unscored is UnscoredReason.HARNESS_ERROR
    assert "own, or what it runs on, is not in the sandbox" in episode.detail


@pytest.mark.needs("userns")
async def test_it_is_installed_in_a_sandbox_where_that_is_asked_for(job, provider, gateway, engine, cache, tmp_path):
    from rl_harness.sandboxes.snapshots import Snapshots

    engine.reply = lambda request, prompt: "echo 36 > answer.txt"
    agent = own(install="sandbox")
    assert agent.setup[0].name == "own 1.0"
    source = Snapshots(provider, identity="local", state=tmp_path / "uses")
    episode = await attempt(agent, job, source, gateway)
    assert episode.reward == 1.0, episode.detail
    assert (source.counts.built, cache.exists()) == (1, False)
    await provider.delete_snapshot((await provider.snapshots())[0].id)


def test_where_it_is_installed_follows_from_what_the_sandbox_can_do() -> None:
    agent = own()
    agent.adapt(SandboxCapabilities(mounts=True))
    assert (len(agent.mounts), agent.setup) == (1, ())
    agent.adapt(SandboxCapabilities())
    assert (agent.mounts, len(agent.setup)) == ((), 1)
    with pytest.raises(Unsupported, match="cannot be shown"):
        own(install="host").adapt(SandboxCapabilities())
    with pytest.raises(Unsupported, match="isolates nothing"):
        own().adapt(SandboxCapabilities(isolated=False))


def test_it_calls_tools_from_inside() -> None:
    assert own().capabilities == HarnessCapabilities(calls_tools=True, inside=True)


async def test_many_want_an_agent_and_one_installs_it(cache: Path, tmp_path: Path) -> None:
    """Also between processes: the lock is a file's, and each of these takes it anew."""
    count = tmp_path / "count"
    script = f'echo x >> {count}; sleep 0.3; echo done > "$PREFIX/program"'
    folder = agents_folder() / "some-1.0"
    await asyncio.gather(*(install(folder, script) for _ in range(5)))
    assert count.read_text() == "x\n"
    assert (folder / "program").read_text() == "done\n"
    assert [path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock")] == ["some-1.0"]
    assert stat.S_IMODE((folder / "program").stat().st_mode) & 0o444 == 0o444


async def test_a_failed_or_cancelled_installation_leaves_nothing(cache: Path) -> None:
    folder = agents_folder() / "some-1.0"
    with pytest.raises(Unavailable, match="no such package"):
        await install(folder, 'echo half > "$PREFIX/program"; echo no such package; exit 1')
    task = asyncio.create_task(install(folder, 'echo half > "$PREFIX/program"; sleep 1000'))
    partial = folder.with_name(f".{folder.name}.partial")
    while not (partial / "program").exists():
        await asyncio.sleep(0.01)
        assert not task.done(), task.result()
    task.cancel()
    await asyncio.wait([task])
    assert [path.name for path in folder.parent.iterdir()] == [f".{folder.name}.lock"]


async def test_what_a_killed_installation_left_is_no_agent(cache: Path) -> None:
    folder = agents_folder() / "some-1.0"
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(parents=True)
    (partial / "half").touch()
    await install(folder, 'echo whole > "$PREFIX/program"')
    assert [path.name for path in folder.iterdir()] == ["program"]


@dataclass(frozen=True, kw_only=True)
class Mirrored(Script):
    """Comes from a registry of one's own, which only its user can name."""

    def host_script(self, version: str) -> str:
        return 'echo "$MIRROR" > "$PREFIX/mirror"'


class Mirror(Own):
    package: ClassVar[Package] = Mirrored(version="1.0", program="mirror")


async def test_an_installation_is_given_its_variables_wherever_it_is_made(cache: Path) -> None:
    variables = {"MIRROR": "at home"}
    (step,) = Mirror(CliAgentOptions(install="sandbox", install_env=variables)).setup
    assert step.env == variables
    agent = Mirror(CliAgentOptions(install="host", install_env=variables))
    await agent.start()
    assert (agent.mounts[0].source / "mirror").read_text() == "at home\n"


def test_options_refuse_what_is_no_version() -> None:
    with pytest.raises(ValueError, match="version"):
        own(version="1.0; rm -rf /")


def test_an_agent_that_needs_a_newer_node_gets_one_first(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Npm(package="@me/agent", version="1", program="agent", node=(22, 19))
    monkeypatch.setattr("rl_harness_cli_agents.packages.node_inside", lambda: (22, 19))
    before = package.identity()
    assert "node@" not in package.host_script("1")
    monkeypatch.setattr("rl_harness_cli_agents.packages.node_inside", lambda: (22, 18))
    first, second = package.host_script("1").splitlines()
    assert first.endswith('--prefix "$PREFIX" node@24')
    assert second.startswith('PATH="$PREFIX/node_modules/node/bin:$PATH" npm install')
    assert package.identity() != before


@pytest.mark.parametrize(
    "package", [Npm(package="@me/agent", version="1", program="a"), Pip(package="b", version="1", program="b")]
)
def test_what_is_run_in_a_sandbox_is_a_shell_script(package: Package) -> None:
    script = package.sandbox_script("1", "/opt/agent")
    done = subprocess.run(["sh", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


SEAT = Seat(
    instruction="do it",
    workdir="/app",
    home="/home/agent",
    base_url="http://127.0.0.1:1/v1",
    address="http://127.0.0.1:1",
    api_key="key",
    model="mine",
    max_turns=5,
    context_length=70_001,
    max_tokens=701,
)


@pytest.mark.parametrize("option", ["context_length", "max_tokens"])
@pytest.mark.parametrize("name", agents())
def test_an_option_changes_what_a_program_is_told_or_is_refused(name: str, option: str) -> None:
    kind = load(agents()[name])
    if option in kind.untold:
        with pytest.raises(ConfigError, match=rf"harness.{option}: {name} has no setting"):
            kind(kind.Options(**{option: 70_002}))
        return
    agent = kind(kind.Options(**{option: 70_002}))
    told = [
        (agent.environment(seat), agent.files(seat), agent.arguments(seat), agent.stdin(seat))
        for seat in (SEAT, dataclasses.replace(SEAT, **{option: 70_002}))
    ]
    assert told[0] != told[1]


@pytest.mark.parametrize("options", [{"version": "2.0"}, {"install_env": {"A": "b"}}])
def test_what_is_not_installed_is_not_told_how(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is in the sandbox already"):
        own(install="present", **options).adapt(SandboxCapabilities(mounts=True))


def test_a_sandbox_whose_python_is_too_old_is_told_by_the_set_up_step() -> None:
    script = Pip(package="b", version="1", program="b", python=(3, 99)).sandbox_script("1", "/nowhere/b")
    nothing = "command() { return 1; }\n"  # by which this machine's package manager would be found
    done = subprocess.run(["sh"], input=nothing + script, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "b needs Python 3.99 or newer, and the sandbox has Python 3." in done.stderr


def test_what_this_machine_lacks_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(Unavailable, match=r"no npm\n.*harness.install=sandbox"):
        Npm(package="@me/agent", version="1", program="a").preflight()
    with pytest.raises(Unavailable, match=r"needs Python 3.99 or newer"):
        Pip(package="b", version="1", program="b", python=(3, 99)).preflight()


@pytest.mark.needs("userns")
async def test_what_no_command_line_can_hold_is_the_harness_s_failure(job, provider, gateway) -> None:
    episode = await attempt(own(args=("x" * 130_000,)), job, provider, gateway)
    assert episode.unscored is UnscoredReason.HARNESS_ERROR
    assert "longer than 120000 bytes" in episode.detail
