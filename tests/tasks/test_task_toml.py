"""Every key of Harbor's schema is honoured or refused with file, line, key and reason (known faults 27, 43)."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from rl_harness.contracts.sandbox import NetworkPolicy, SandboxCapabilities
from rl_harness.errors import TaskError
from rl_harness.tasks import Artifact, load_task, new_task, tasks_from_directories, unsupported

HARBOR = """\
schema_version = "1.4"
source = "somewhere"
artifacts = ["/app/out", { source = "/var/log/app", exclude = ["*.tmp"], service = "main" }]

[task]
name = "acme/count-lines"
version = "2"
description = "Count"
keywords = ["files"]
authors = [{ name = "A", email = "a@example.org" }]

[metadata]
difficulty = "easy"
anything = { goes = [1, 2] }

[agent]
timeout_sec = 30
user = "root"

[verifier]
timeout_sec = 20.5
user = 1000
environment_mode = "separate"
network_mode = "no-network"

[verifier.env]
MODE = "strict"

[solution.env]
HINT = "look"

[environment]
os = "Linux"
build_timeout_sec = 100
docker_image = "debian:12"
cpus = 1.5
memory_mb = 512
storage_mb = 1024
gpus = 2
workdir = "/srv/work"
network_mode = "allowlist"
allowed_hosts = ["files.example.org"]

[environment.env]
LANG = "C"
"""


def test_a_harbor_task_with_every_supported_key(write_task):
    task = load_task(write_task(HARBOR))
    assert task.name == "job"
    assert task.package == "acme/count-lines"
    assert task.metadata["anything"] == {"goes": [1, 2]}
    assert task.agent_timeout == 30
    assert task.environment.image == "debian:12"
    assert task.environment.workdir == "/srv/work"
    assert task.environment.env == {"LANG": "C"}
    assert task.environment.build_timeout == 100
    assert (task.limits.memory, task.limits.disk, task.limits.cpus) == (512 << 20, 1 << 30, 1.5)
    assert (task.network, task.network_allow) == (NetworkPolicy.ALLOW_LIST, ("files.example.org",))
    assert task.gpus == 2
    assert task.solution_env == {"HINT": "look"}
    verifier = task.verifier
    assert (verifier.mode, verifier.timeout, verifier.user) == ("separate", 20.5, "1000")
    assert verifier.env == {"MODE": "strict"}
    assert verifier.network is NetworkPolicy.NONE
    assert verifier.artifacts == (Artifact(source="/app/out"), Artifact(source="/var/log/app", exclude=("*.tmp",)))
    assert task.sandbox_spec({"run": "r"}).limits == task.limits
    assert task.verifier_spec({"run": "r"}).network is NetworkPolicy.NONE


def test_old_spellings_still_read(write_task):
    task = load_task(
        write_task('version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false')
    )
    assert (task.limits.memory, task.limits.disk) == (2 << 30, 512 << 20)
    assert task.network is NetworkPolicy.NONE


def test_defaults_are_harbors_without_our_table_and_ours_with_it(write_task):
    harbor = load_task(write_task("", name="harbor"))
    assert (harbor.verifier.mode, harbor.network) == ("shared", NetworkPolicy.FULL)
    own = load_task(write_task("[rl_harness]", name="own"))
    assert (own.verifier.mode, own.network) == ("separate", NetworkPolicy.NONE)
    assert own.verifier.artifacts == (Artifact(source="/app"),)


def test_our_table(write_task):
    toml = "[rl_harness]\nverifier = 'shared'\nmax_turns = 3\nallow_tampered = true\nartifact_limit_mb = 2"
    task = load_task(write_task(toml))
    assert (task.verifier.mode, task.max_turns, task.allow_tampered) == ("shared", 3, True)
    assert task.verifier.artifact_limit == 2 << 20


def test_answer_tasks_need_neither_sandbox_nor_tests(write_task):
    task = load_task(write_task("[rl_harness]\nanswer = ['4', 'four']", {"tests/test.sh": None}))
    assert not task.needs_sandbox
    assert (task.verifier.mode, task.verifier.answers) == ("answer", ("4", "four"))


def test_a_verifier_with_an_environment_of_its_own(write_task):
    toml = "[verifier.environment]\ndocker_image = 'grader:1'\nmemory_mb = 64"
    verifier = load_task(write_task(toml)).verifier
    assert (verifier.mode, verifier.bundled, verifier.environment.image) == ("separate", True, "grader:1")
    assert verifier.limits.memory == 64 << 20


def test_tests_with_a_dockerfile_are_an_image(write_task):
    toml = "[verifier]\nenvironment_mode = 'separate'"
    verifier = load_task(write_task(toml, {"tests/Dockerfile": "FROM scratch"})).verifier
    assert verifier.bundled
    assert verifier.environment.dockerfile.parent.name == "tests"


@pytest.mark.parametrize(
    ("toml", "line", "says"),
    [
        # misspelt, misplaced, mistyped
        ("[environment]\n\nmemmory_mb = 1", 3, ["[environment] memmory_mb", "did you mean 'memory_mb'?"]),
        ("[environment]\nmemory = 512", 2, ["[environment] memory", "'2G'", "memory_mb"]),
        ("[environment]\nmemory = '1G'\nmemory_mb = 5", 2, ["memory", "memory_mb says 5"]),
        ("cpus = 2", 1, ["cpus", "write it as [environment] cpus"]),
        ("timeout_sec = 2", 1, ["write it as [agent] timeout_sec or [verifier] timeout_sec"]),
        ("difficulty = 'easy'", 1, ["write it as [metadata] difficulty"]),
        ("environment = 'debian'", 1, ["environment", "must be a table, written [environment]"]),
        ("[environment]\ncpus = true", 2, ["[environment] cpus", "a boolean"]),
        ("[environment]\ncpus = '2'", 2, ["[environment] cpus", "a string"]),
        ("[environment]\ncpus = nan", 2, ["[environment] cpus", "above 0"]),
        ("[environment]\nmemory_mb = 0", 2, ["at least 1"]),
        ("[agent]\ntimeout_sec = -1", 2, ["[agent] timeout_sec", "above 0"]),
        ("[agent]\ntimeout_sec = inf", 2, ["[agent] timeout_sec", "above 0"]),
        ("[environment.env]\nA = 1", 2, ["[environment.env] A", "string"]),
        ("[environment]\nenv = { A = 1 }", 2, ["[environment.env] A", "string"]),
        ("[environment]\nworkdir = 'app'", 2, ["[environment] workdir", "absolute"]),
        ("artifacts = ['/a/../etc']", 1, ["artifacts", "'..'"]),
        ("[task]\nname = 'plain'", 2, ["[task] name", "org/name"]),
        ("[task]\ndescription = 'x'", 1, ["[task] name", "is missing"]),
        ("schema_version = '1.5'", 1, ["schema_version", "1.0 to 1.4"]),
        ("schema_version = 1.4", 1, ["schema_version", "must be a string"]),
        ("[environment]\nos = 'windows'", 2, ["only linux"]),
        ("[environment]\nnetwork_mode = 'open'", 2, ["no-network, public, allowlist"]),
        ("[environment]\nallowed_hosts = ['a.b']", 2, ["allowlist"]),
        ("[environment]\nallow_internet = true\nnetwork_mode = 'no-network'", 2, ["keep network_mode"]),
        # in the schema, and cannot be honoured
        ("[environment.tpu]\ntype = 'v4'\ntopology = '2x2'", 1, ["[environment] tpu", "TPU"]),
        ("[environment]\ngpu_types = ['H100']", 2, ["gpu_types"]),
        ("[[environment.mcp_servers]]\nname = 'x'", 1, ["mcp_servers"]),
        ("[environment]\nskills_dir = '/skills'", 2, ["skills_dir"]),
        ("[environment.healthcheck]\ncommand = 'true'", 1, ["healthcheck"]),
        ("[[steps]]\nname = 'one'", 1, ["steps", "several steps"]),
        ("multi_step_reward_strategy = 'mean'", 1, ["multi_step_reward_strategy"]),
        ("[[verifier.collect]]\ncommand = 'true'", 1, ["[verifier] collect"]),
        ("artifacts = [{ source = '/a', destination = 'b' }]", 1, ["destination"]),
        ("artifacts = [{ source = '/a', service = 'db' }]", 1, ["several containers"]),
        ("[agent]\nuser = 'bob'", 2, ["[agent] user"]),
        ("[verifier]\nnetwork_mode = 'no-network'", 2, ["share one sandbox", "environment_mode = 'separate'"]),
        # a variable of the host would enter the sandbox
        ("[verifier.env]\nKEY = '${OPENAI_API_KEY}'", 2, ["[verifier.env] KEY", "never enters a sandbox"]),
        # our own table
        ("[rl_harness]\nmax_turns = 0", 2, ["[rl_harness] max_turns", "at least 1"]),
        ("[rl_harness]\nverifier = 'host'", 2, ["separate, shared, answer"]),
        ("[rl_harness]\nverifier = 'answer'", 2, ["needs the answer"]),
        ("[rl_harness]\nanswer = ''", 2, ["[rl_harness] answer"]),
        ("[rl_harness]\nmax_turn = 2", 2, ["did you mean 'max_turns'?"]),
        (
            "[verifier]\nenvironment_mode = 'shared'\n[rl_harness]\nverifier = 'separate'",
            2,
            ["environment_mode", "keep one of them"],
        ),
        # not TOML at all
        ("[agent]\ntimeout_sec = \n", 2, ["not valid TOML"]),
        ("a = 1\na = 2\n", 2, ["not valid TOML"]),
    ],
)
def test_what_is_wrong_is_named_with_file_line_key_and_reason(write_task, toml, line, says):
    directory = write_task(toml)
    with pytest.raises(TaskError) as error:
        load_task(directory)
    assert f"{directory / 'task.toml'}:{line}:" in error.value.message
    for part in says:
        assert part in str(error.value)


def test_lines_are_found_past_values_that_span_lines(write_task):
    toml = '[metadata]\ntext = """\n[environment]\ncpus = 9\n"""\nlist = [\n  "# ]",\n  1, # [\n]\n'
    toml += "[environment]\ncpus = 0\n"
    with pytest.raises(TaskError, match=r"task\.toml:11: \[environment\] cpus"):
        load_task(write_task(toml))


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("tests/test.sh", "there is no verifier"),
        ("instruction.md", "there is no such file"),
        ("task.toml", "there is no such file"),
    ],
)
def test_a_missing_file_is_named(write_task, file, says):
    directory = write_task()
    (directory / file).unlink()
    with pytest.raises(TaskError) as error:
        load_task(directory)
    assert f"{directory / file}: {says}" in str(error.value)


def test_nested_too_deeply_is_not_valid(write_task):
    with pytest.raises(TaskError, match=r"task\.toml: not valid TOML: nested too deeply"):
        load_task(write_task("metadata = " + "[" * 5000))


@pytest.mark.parametrize("file", ["instruction.md", "task.toml"])
def test_a_pipe_is_refused_and_not_waited_for(write_task, file):
    directory = write_task()
    (directory / file).unlink()
    os.mkfifo(directory / file)
    with pytest.raises(TaskError, match="is not a regular file"):
        load_task(directory)


@pytest.mark.parametrize(
    "file", ["steps/one/instruction.md", "trajectory.json", "tests/docker-compose.yaml", "tests/.harborignore"]
)
def test_files_that_would_be_ignored_are_refused(write_task, file):
    directory = write_task(files={file: "x"})
    with pytest.raises(TaskError, match=r"support|cannot"):
        load_task(directory)


def test_a_compose_file_is_for_sandboxes_of_several_containers(write_task):
    task = load_task(write_task(files={"environment/docker-compose.yaml": "services: {}\n"}))
    assert task.environment.compose == task.directory / "environment/docker-compose.yaml"
    said = unsupported(task, SandboxCapabilities(network=frozenset(NetworkPolicy), changes=True))
    assert said == [f"{task.environment.compose}: the sandbox cannot start several containers"]
    able = SandboxCapabilities(network=frozenset(NetworkPolicy), changes=True, compose=True)
    assert unsupported(task, able) == []


def test_an_empty_instruction_is_refused(write_task):
    with pytest.raises(TaskError, match=r"instruction\.md: the instruction is empty"):
        load_task(write_task(files={"instruction.md": " \n"}))


def test_what_the_sandbox_cannot_give_is_said_before_the_run(write_task):
    task = load_task(write_task(HARBOR))
    said = "\n".join(unsupported(task, SandboxCapabilities()))
    for key in ("docker_image", "network_mode", "memory_mb", "storage_mb", "cpus", "[verifier] user", "gpus"):
        assert key in said
    able = SandboxCapabilities(
        image=True,
        users=True,
        network=frozenset(NetworkPolicy),
        limits=frozenset({"memory", "disk", "cpus"}),
    )
    (without,) = unsupported(task, able)
    assert without == "[environment] gpus: the sandbox has none; modal's have with -o sandbox.gpu=TYPE"
    (several,) = unsupported(task, msgspec.structs.replace(able, gpu=True))
    assert "only 1 can be asked for" in several
    assert unsupported(msgspec.structs.replace(task, gpus=1), msgspec.structs.replace(able, gpu=True)) == []


def test_a_shared_verifier_needs_a_sandbox_that_lists_changes(write_task):
    task = load_task(write_task("[rl_harness]\nverifier = 'shared'"))
    assert "tampering" in unsupported(task, SandboxCapabilities())[0]
    assert unsupported(task, SandboxCapabilities(changes=True)) == []
    assert unsupported(task, SandboxCapabilities(isolated=False)) == []  # such a run is marked as a whole


def test_tasks_come_from_a_folder_or_one_by_one(write_task, tmp_path: Path):
    one, two = write_task(name="b"), write_task(name="a")
    assert [task.name for task in tasks_from_directories([tmp_path])] == ["a", "b"]
    assert [task.name for task in tasks_from_directories([one, two, one])] == ["b", "a"]
    with pytest.raises(TaskError, match="no such directory"):
        tasks_from_directories([tmp_path / "c"])
    with pytest.raises(TaskError, match=r"holds no task\.toml"):
        tasks_from_directories([one / "tests"])


def test_two_tasks_of_one_name_are_refused(write_task, tmp_path: Path):
    write_task(name="x")
    (tmp_path / "other").mkdir()
    (tmp_path / "x").rename(tmp_path / "other" / "x")
    again = write_task(name="x")
    with pytest.raises(TaskError, match="two tasks are named 'x'"):
        tasks_from_directories([again, tmp_path / "other"])


def test_a_new_task_never_overwrites(tmp_path: Path):
    new_task(tmp_path, "fresh")
    with pytest.raises(TaskError, match="already exists and is not empty"):
        new_task(tmp_path, "fresh")
    with pytest.raises(TaskError, match="no name for a task"):
        new_task(tmp_path, "../x y")


def test_a_network_mode_that_is_misspelt_names_the_nearest(write_task):
    with pytest.raises(TaskError, match=r"network_mode.*must be one of .*\n.*did you mean 'no-network'\?"):
        load_task(write_task("[rl_harness]\n[environment]\nnetwork_mode = 'no_network'\n"))
