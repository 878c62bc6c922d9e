"""``rl-harness sandbox`` and ``bench build`` from the user's side."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rl_harness.tasks import new_task

EXAMPLE = Path(__file__).parents[2] / "examples/copying_sandbox.py"

BENCHMARK = """
from pathlib import Path
from rl_harness.contracts import Benchmark, Options, Prompts
from rl_harness.hookspecs import Extension, hookimpl

class Made(Benchmark):
    api = 1
    name = "made"
    version = "1"
    splits = {"all": 2}
    prompts = Prompts()

    def directories(self, split, cache):
        return [Path("task").absolute(), Path("other").absolute()]

@hookimpl
def rl_harness_benchmarks():
    return [Extension("made", f"{__name__}:Made", "two tasks")]
"""


class Shop:
    """Runs ``rl-harness`` with the example's sandbox, in a folder with two tasks that have something to set up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sandboxes = folder / "sandboxes"
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RL_HARNESS_")},
            "XDG_STATE_HOME": str(folder / "state"),
            "RL_HARNESS_SNAPSHOTS__ALLOW_UNISOLATED": "true",
            "XDG_CACHE_HOME": str(folder / "cache"),
            "DOCKER_HOST": f"unix://{folder}/no-engine.sock",  # what other tests have on a real one is not ours to list
        }
        for name in ("task", "other"):
            new_task(folder / name)
            (folder / name / "environment/setup.sh").write_text(f"echo {name} > made\n")

    def command(self, *arguments: str, sandbox: bool) -> list[str]:
        chosen = ("-p", str(EXAMPLE), "--sandbox", "copying", "-o", f"sandbox.state_dir={self.sandboxes}")
        return [sys.executable, "-m", "rl_harness", *arguments, *(chosen if sandbox else ())]

    def run(self, *arguments: str, expect: int = 0, sandbox: bool = False) -> str:
        command = self.command(*arguments, sandbox=sandbox)
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == expect, (done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        self.stderr = done.stderr
        return done.stdout

    def json(self, *arguments: str, expect: int = 0):
        return json.loads(self.run(*arguments, "--json", expect=expect, sandbox=True))


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def test_environments_are_built_ahead_once_and_used_by_runs(shop):
    first = shop.json("sandbox", "build", "task", "other")
    assert sorted((result["outcome"], result["tasks"]) for result in first) == [
        ("built", ["other"]),
        ("built", ["task"]),
    ]
    text = shop.run("sandbox", "build", "task", "other", sandbox=True)
    assert "0 built, 2 there already" in text
    report = shop.json("run", "task", "--harness", "oracle", "--samples", "2")
    assert report["sandboxes"]["snapshots_built"] == 0
    listed = shop.json("sandbox", "list")
    assert listed["sandboxes"] == []
    uses = {snapshot["labels"]["environment"]: snapshot for snapshot in listed["snapshots"]}
    assert set(uses) == {"task", "other"}
    assert uses["task"]["hits"] == report["sandboxes"]["snapshots_started"]
    assert uses["other"]["hits"] == 0
    assert uses["task"]["references"] == 0
    assert uses["task"]["build_seconds"] > 0


def test_a_mistake_with_one_environment_does_not_keep_the_others_from_being_built(shop):
    odd = """
class Odd(CopyingProvider):
    async def fingerprint(self, spec):
        if spec.environment.directory.parent.name == "other":
            raise ValueError("month must be in 1..12")
        return {}
"""
    text = EXAMPLE.read_text().replace('"copying", f"{__name__}:CopyingProvider"', '"odd", f"{__name__}:Odd"')
    (shop.folder / "odd.py").write_text(text + odd)
    chosen = ("-p", "odd.py", "--sandbox", "odd", "-o", f"sandbox.state_dir={shop.sandboxes}")
    results = json.loads(shop.run("sandbox", "build", "other", "task", *chosen, "--json", expect=1))
    assert {(result["tasks"][0], result["outcome"]) for result in results} == {("other", "failed"), ("task", "built")}
    assert "month must be in 1..12" in next(result["error"] for result in results if result["outcome"] == "failed")


def test_a_benchmarks_environments_are_built_and_failures_are_told_by_task(shop):
    (shop.folder / "bench.py").write_text(BENCHMARK)
    (shop.folder / "other/environment/setup.sh").write_text("echo looking; echo no such package >&2; exit 4\n")
    text = shop.run("bench", "build", "made", "-p", "bench.py", expect=1, sandbox=True)
    assert "2 environments" in text
    assert "built  task" in text
    assert "FAILED  other" in text
    assert "exit code 4" in text
    assert "no such package" in text
    assert "tasks that cannot run: other" in text
    (shop.folder / "other/environment/setup.sh").write_text("echo found\n")
    assert "1 built, 1 there already" in shop.run("bench", "build", "made", "-p", "bench.py", sandbox=True)


def test_pruning_removes_what_is_old_and_nothing_that_is_used(shop):
    shop.run("sandbox", "build", "task", sandbox=True)
    assert "nothing to remove" in shop.run("sandbox", "prune", sandbox=True)
    assert "would remove copying snapshot" in shop.run("sandbox", "prune", "--all", "--dry-run", sandbox=True)
    started = shop.command("run", "task", "--harness", "oracle", "--concurrency", "1", sandbox=True)
    (shop.folder / "task/solution/solve.sh").write_text("sleep 60\n")
    run = subprocess.Popen(started, cwd=shop.folder, env=shop.environment, stdout=subprocess.PIPE)
    try:
        wait_for(lambda: list(shop.sandboxes.glob("process-*/started-from")))
        assert "nothing to remove" in shop.run("sandbox", "prune", "--all", sandbox=True)
        assert shop.json("sandbox", "list")["snapshots"][0]["references"] >= 1
    finally:
        run.kill()
        run.communicate()
    shop.run("sandbox", "prune", "--ttl", "1h", sandbox=True)
    assert [path.name.split("-")[0] for path in shop.sandboxes.iterdir()] == ["snapshot"]
    time.sleep(0.01)
    pruned = shop.json("sandbox", "prune", "--ttl", "0s")
    assert len(pruned["snapshots"]) == 1
    assert list(shop.sandboxes.iterdir()) == []


def test_the_dead_owners_sandboxes_are_listed_as_such_and_said_to_be_removed(shop):
    (shop.folder / "task/solution/solve.sh").write_text("sleep 60\n")
    options = ("--harness", "oracle", "--concurrency", "1", "--name", "killed")
    run = subprocess.Popen(
        shop.command("run", "task", *options, sandbox=True),
        cwd=shop.folder,
        env=shop.environment,
        stdout=subprocess.PIPE,
    )
    wait_for(lambda: list(shop.sandboxes.glob("process-*/started-from")))
    run.kill()
    run.communicate()
    assert any(info["owner_alive"] is False for info in shop.json("sandbox", "list")["sandboxes"])
    assert " of run killed: its owner is dead" in shop.run("sandbox", "prune", "--all", sandbox=True)
    assert list(shop.sandboxes.iterdir()) == []


def test_what_cannot_be_asked_is_named_and_stops_nobody(shop):
    broken = "def rl_harness_sandboxes(): return [Extension('gone', 'no_such_module:X', 'broken')]\n"
    (shop.folder / "gone.py").write_text(f"from rl_harness.hookspecs import Extension, hookimpl\n@hookimpl\n{broken}")
    assert "local" in shop.run("sandbox", "list", "-p", "gone.py")
    assert "note: gone could not be asked" in shop.stderr
    shop.run("sandbox", "prune", "--dry-run", "-p", "gone.py")
    assert "note: gone could not be asked" in shop.stderr
    shop.run("sandbox", "list", "-p", "gone.py", "--sandbox", "gone", expect=1)
    shop.run("sandbox", "list", "--sandbox", "nowhere", expect=2)
    assert "nowhere" in shop.stderr


def test_an_age_that_is_none_is_a_usage_error(shop):
    shop.run("sandbox", "prune", "--ttl", "soon", expect=2)
    assert "7d" in shop.stderr


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("run", "task", "--harness", "oracle"), id="run"),
        pytest.param(("sandbox", "build", "task"), id="build"),
        pytest.param(("tasks", "check", "task"), id="check"),
    ],
)
def test_set_up_steps_run_on_this_machine_only_where_that_is_accepted(shop, command):
    """Where nothing is isolated, a task's set-up script ran as the user, who had not been told before."""
    ran = shop.folder / "ran"
    (shop.folder / "task/environment/setup.sh").write_text(f"touch {ran}\n")
    del shop.environment["RL_HARNESS_SNAPSHOTS__ALLOW_UNISOLATED"]
    refused = subprocess.run(
        shop.command(*command, sandbox=True), cwd=shop.folder, env=shop.environment, capture_output=True, text=True
    )
    assert refused.returncode in (1, 2)
    said = refused.stdout + refused.stderr
    assert "environment/setup.sh: the sandbox isolates nothing, so this set-up would run as you on this machine" in said
    assert "-o snapshots.allow_unisolated=true" in said
    assert not ran.exists()
    shop.run(*command, "-o", "snapshots.allow_unisolated=true", sandbox=True)
    assert ran.exists()
    if command[0] != "run":  # whose notes go where its report goes
        assert "note: sandbox copying: it isolates nothing: agents, graders and set-up steps run as you" in shop.stderr


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("run", "task", "--harness", "oracle"), id="run"),
        pytest.param(("sandbox", "build", "task"), id="build"),
        pytest.param(("tasks", "check", "task"), id="check"),
    ],
)
def test_a_capability_that_is_missing_names_sandboxes_that_have_it(shop, command):
    """The error said what a sandbox cannot, and not which one can."""
    (shop.folder / "task/environment/Dockerfile").write_text("FROM scratch\n")
    plugin = """
from rl_harness import Extension, hookimpl
from rl_harness.contracts import SandboxCapabilities, SandboxProvider

class Able(SandboxProvider):
    api = 1
    capabilities = SandboxCapabilities(dockerfile=True, changes=True)
    create = list = reap = close = None

@hookimpl
def rl_harness_sandboxes():
    return [Extension("able", f"{__name__}:Able", "builds")]
"""
    (shop.folder / "able.py").write_text(plugin)
    shop.environment["RL_HARNESS_DISABLE_PLUGINS"] = "rl-harness-docker,rl-harness-e2b,rl-harness-modal"
    refused = subprocess.run(
        shop.command(*command, sandbox=True), cwd=shop.folder, env=shop.environment, capture_output=True, text=True
    )
    said = refused.stdout + refused.stderr
    assert "no sandbox that is installed can; others may: docker (pip install rl-harness-docker)" in said
    assert said.count("Dockerfile: the sandbox cannot build an image") == 1
    assert "task.toml" not in said.replace("in task.toml", "")
    able = subprocess.run(
        shop.command(*command, "-p", "able.py", sandbox=True),
        cwd=shop.folder,
        env=shop.environment,
        capture_output=True,
        text=True,
    )
    assert "sandboxes that can: able (--sandbox able)" in able.stdout + able.stderr


def test_a_benchmark_where_a_folder_belongs_is_answered_with_the_command_for_it(shop):
    shop.run("sandbox", "build", "shell-basics", sandbox=True, expect=2)
    assert "shell-basics is a benchmark, not a folder of tasks\n  remedy: rl-harness bench build" in shop.stderr


def test_a_list_is_about_what_is_used_here(shop):
    """Five lines of it were about services that nobody had set up, and runs were numbers."""
    plugin = """
import time
from rl_harness import Extension, hookimpl
from rl_harness.contracts import SandboxCapabilities, SandboxInfo, SandboxProvider, SnapshotInfo
from rl_harness.errors import Unavailable

class Away(SandboxProvider):
    api = 1
    capabilities = SandboxCapabilities(snapshot="filesystem")
    create = reap = None
    async def list(self, labels=None):
        raise Unavailable("there is no token")

class Small(Away):
    async def list(self, labels=None):
        labels = {"run": open("id").read()}
        return [SandboxInfo(id="box", provider="small", labels=labels, created_at=time.time(), owner_alive=True)]
    async def snapshots(self, labels=None):
        return [SnapshotInfo(id="tiny", provider="small", key="k", labels={}, created_at=time.time(), size=12)]

class Broken(Away):
    async def list(self, labels=None):
        return 1 / 0

@hookimpl
def rl_harness_sandboxes():
    return [Extension("away", f"{__name__}:Away", "not set up"), Extension("small", f"{__name__}:Small", "one box"),
        Extension("broken", f"{__name__}:Broken", "a mistake")]
"""
    (shop.folder / "odd.py").write_text(plugin)
    (shop.folder / "id").write_text("nobody's")
    (shop.folder / "task/environment/setup.sh").unlink()
    shop.run("run", "task", "--harness", "oracle", "--name", "solved", sandbox=True)
    (shop.folder / "id").write_text(json.loads(shop.run("runs", "show", "solved", "--json"))["id"])
    shop.environment["RL_HARNESS_DISABLE_PLUGINS"] = "rl-harness-docker,rl-harness-e2b,rl-harness-modal"
    text = shop.run("sandbox", "list", "-p", "odd.py")
    assert " solved " in text
    assert " 12 B" in text
    assert "away" not in shop.stderr
    assert "note: broken could not be asked: ZeroDivisionError" in shop.stderr
    (shop.folder / "mine.toml").write_text('sandbox = "away"\n')
    shop.run("sandbox", "list", "-p", "odd.py", "--config", "mine.toml")
    assert shop.stderr.count("note: away could not be asked: there is no token") == 1


def test_a_task_that_is_given_twice_is_named_and_counts_once(shop):
    text = shop.run("sandbox", "build", "task", str(shop.folder / "task"), sandbox=True)
    assert text.startswith("1 environment\n")
    assert f"note: {shop.folder / 'task'} is given twice, and counts once" in shop.stderr


@pytest.mark.parametrize("command", ["list", "prune"])
def test_a_sandbox_without_a_name_is_a_usage_error(shop, command):
    shop.run("sandbox", command, "--sandbox", "", expect=2)
    assert "a name is missing" in shop.stderr


def test_what_a_set_up_printed_commands_no_terminal(shop):
    (shop.folder / "task/environment/setup.sh").write_text("printf '\\033]0;pwned\\007\\033[31mred'; exit 1\n")
    said = shop.run("sandbox", "build", "task", expect=1, sandbox=True) + shop.stderr
    assert "red" in said
    assert all(line.isprintable() for line in said.splitlines())


def test_built_images_are_listed_and_removed_when_old_and_unused(shop):
    """They stayed for ever, and no list showed them."""
    plugin = """
import time
from pathlib import Path
from rl_harness import Extension, hookimpl
from rl_harness.contracts import BuildInfo, SandboxCapabilities, SandboxInfo, SandboxProvider, SnapshotInfo

DAY = 86400

class Builder(SandboxProvider):
    api = 1
    capabilities = SandboxCapabilities(snapshot="filesystem", builds=True)
    create = None

    async def reap(self, labels=None, *, force=False):
        return 1

    async def list(self, labels=None):
        common = dict(provider="builder", labels={}, created_at=time.time())
        return [SandboxInfo(id="dead", owner_alive=False, **common), SandboxInfo(id="live", owner_alive=True, **common)]

    async def snapshots(self, labels=None):
        old = time.time() - 30 * DAY
        return [SnapshotInfo(id="layer", provider="builder", key="k", labels={}, created_at=old)]

    async def delete_snapshot(self, snapshot):
        pass

    async def builds(self):
        def build(id, *used_by, days=20):
            at = time.time() - days * DAY
            return BuildInfo(
                id=id, provider="builder", source="/tasks/x", created_at=at - DAY, last_used=at, used_by=used_by
            )
        return [
            build("old"), build("young", days=1), build("of-the-living", "live"), build("of-the-dead", "dead"),
            build("of-the-layer", "layer"), build("of-both", "live", "dead"), build("taken-since"),
        ]

    async def delete_build(self, build):
        Path("asked").open("a").write(build + " ")
        return build != "taken-since"

@hookimpl
def rl_harness_sandboxes():
    return [Extension("builder", f"{__name__}:Builder", "builds")]
"""
    (shop.folder / "builder.py").write_text(plugin)
    chosen = ("-p", "builder.py", "--sandbox", "builder")
    listed = {info["id"]: info for info in json.loads(shop.run("sandbox", "list", *chosen, "--json"))["builds"]}
    assert listed["of-both"]["used_by"] == ["live", "dead"]
    text = shop.run("sandbox", "list", *chosen)
    assert re.search(r"of-both +builder +/tasks/x +21d +20d +2 +-", text), text
    expected = ["of-the-dead", "of-the-layer", "old"]

    def removed(*arguments: str) -> list[str]:
        return sorted(info["id"] for info in json.loads(shop.run("sandbox", "prune", *arguments, "--json"))["builds"])

    assert removed(*chosen, "--dry-run") == [*expected, "taken-since"]
    assert not (shop.folder / "asked").exists()
    assert removed(*chosen) == expected
    assert sorted((shop.folder / "asked").read_text().split()) == [*expected, "taken-since"]
    assert removed(*chosen, "--ttl", "25d") == []
    assert removed(*chosen, "--all") == [*expected, "young"]
    assert "removed builder image old (built from /tasks/x): last used 20d ago" in shop.run("sandbox", "prune", *chosen)
