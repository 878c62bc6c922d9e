"""What the smaller commands print, for people and for programs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from rl_harness.cli.main import main


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]):
    def call(*arguments: str, code: int = 0) -> str:
        assert main(list(arguments)) == code, capsys.readouterr()
        return capsys.readouterr().out

    return call


def data(text: str) -> Any:
    return json.loads(text)


def test_plugins_list_names_packages_and_what_they_provide(cli) -> None:
    listed = {item["distribution"]: item for item in data(cli("plugins", "list", "--json"))}
    assert {"kind": "engines", "name": "torch"}.items() <= listed["rl-harness-torch"]["provides"][0].items()
    text = cli("plugins", "list")
    assert "rl-harness-torch 0.1.0 (rl_harness_torch.plugin)" in text
    assert "PROBLEM" not in text


def test_plugins_list_shows_problems_and_what_is_disabled(cli, monkeypatch, tmp_path: Path) -> None:
    site = tmp_path / "site"
    info = site / "acme_broken-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "entry_points.txt").write_text("[rl_harness]\nx = acme_no_such_module\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("RL_HARNESS_DISABLE_PLUGINS", "rl-harness-torch")
    text = cli("plugins", "list")
    assert "PROBLEM: ModuleNotFoundError: No module named 'acme_no_such_module'" in text
    assert "disabled by RL_HARNESS_DISABLE_PLUGINS" in text


def test_plugins_show_prints_every_option_with_type_default_and_meaning(cli) -> None:
    (shown,) = data(cli("plugins", "show", "rl-harness:python", "--json"))
    target = next(option for option in shown["options"] if option["key"] == "target")
    assert (target["type"], target["default"]) == ("text", "required")
    assert {"list of text", "text | none"} <= {option["type"] for option in shown["options"]}
    assert "module:function" in target["help"]
    assert "harness.target" in cli("plugins", "show", "python")


def test_plugins_check_survives_a_target_that_crashes_its_process(cli, tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text("import os\nos.kill(os.getpid(), 11)\n")
    (tmp_path / "mine.py").write_text(
        "import sys; sys.path.insert(0, '.')\nfrom rl_harness import Extension, hookimpl\n"
        "@hookimpl\ndef rl_harness_harnesses():\n"
        "    return [Extension('crash', 'crash:X', ''), Extension('gone', 'gone:X', '')]\n"
    )
    rows = data(cli("plugins", "check", "mine.py", "-p", "mine.py", "--json", code=1))
    assert "died of signal 11" in rows[0]["error"]
    assert "No module named 'gone'" in rows[1]["error"]


def test_config_show_prints_values_with_origins(cli, tmp_path: Path) -> None:
    (tmp_path / "rl-harness.toml").write_text("seed = 4\n[sandbox]\nname = 'process'\n")
    text = cli("config", "show", "--harness", "nop", "--limit", "3")
    line = {parts[0]: parts[1:] for parts in map(str.split, text.splitlines()) if parts}
    assert line["seed"] == ["4", f"{tmp_path}/rl-harness.toml:1"]
    assert line["limit"] == ["3", "--limit"]
    assert line["samples"] == ["1", "default"]
    as_data = data(cli("config", "show", "--harness", "nop", "--json"))
    assert {"key": "seed", "value": 4, "origin": f"{tmp_path}/rl-harness.toml:1"} in as_data["settings"]


def test_a_dry_run_shows_the_same_and_starts_nothing(cli, tmp_path: Path) -> None:
    text = cli("run", "shell-basics", "--harness", "nop", "--sandbox", "process", "--dry-run")
    assert "shell-basics" in text
    assert list(tmp_path.iterdir()) == []


def test_tasks_list_shows_benchmarks_and_their_tasks(cli) -> None:
    benchmarks = {row["name"]: row for row in data(cli("tasks", "list", "--json"))}
    assert benchmarks["shell-arithmetic"]["splits"]["heldout"] == 300
    assert benchmarks["humaneval"]["package"] == "rl-harness-humaneval"
    assert len(data(cli("tasks", "list", "shell-basics", "--json"))) == 16
    assert len(cli("tasks", "list", "shell-basics", "--limit", "3").splitlines()) == 3


@pytest.mark.needs("userns")
def test_a_new_task_is_sound_and_a_spoilt_one_is_not(cli, tmp_path: Path) -> None:
    cli("tasks", "new", "mine")
    assert "1 of 1 tasks are sound" in cli("tasks", "check", "mine", "--sandbox", "local")
    (tmp_path / "mine" / "solution" / "solve.sh").write_text("#!/bin/bash\ntrue\n")
    (report,) = data(cli("tasks", "check", "mine", "--sandbox", "local", "--json", code=1))
    assert report["problems"][0]["file"].endswith("solve.sh")


@pytest.mark.needs("userns")
def test_what_only_the_making_of_a_sandbox_refuses_is_its_tasks_fault_and_the_others_are_checked(
    cli, tmp_path: Path
) -> None:
    for name in ("folder/one", "folder/two"):
        cli("tasks", "new", name)
    file = tmp_path / "folder" / "one" / "task.toml"
    metadata = 'network_mode = "allowlist"\nallowed_hosts = ["169.254.169.254"]'
    file.write_text(file.read_text().replace('network_mode = "no-network"', metadata))
    refused, sound = data(cli("tasks", "check", "./folder", "--sandbox", "local", "--json", code=1))
    assert refused["problems"][0]["file"].endswith("one/task.toml")
    assert "169.254.169.254" in refused["problems"][0]["message"]
    assert sound["problems"] == []


def test_runs_list_is_empty_where_there_is_none(cli) -> None:
    assert cli("runs", "list") == "no runs yet\n"
    assert data(cli("runs", "list", "--json")) == []


def test_runs_list_shows_damaged_runs_with_their_paths(cli, tmp_path: Path) -> None:
    """A run whose run.json was cut off vanished from the list, though its episodes were all there."""
    task = tmp_path / "task"
    task.mkdir()
    (task / "instruction.md").write_text("Say 4.\n")
    (task / "task.toml").write_text("[rl_harness]\nanswer = '4'\n")
    for name in ("cut", "lost", "pipe", "whole"):
        cli("run", "./task", "--harness", "nop", "--name", name)
    info = tmp_path / "runs" / "cut" / "run.json"
    info.write_bytes(info.read_bytes()[:100])
    for name in ("lost", "pipe"):
        (tmp_path / "runs" / name / "run.json").unlink()
    os.mkfifo(tmp_path / "runs" / "pipe" / "run.json")
    (tmp_path / "runs" / "other").mkdir()
    rows = {row["name"]: row for row in data(cli("runs", "list", "--json"))}
    assert {name: row["status"] for name, row in rows.items()} == {
        **dict.fromkeys(("cut", "lost", "pipe"), "damaged"),
        "whole": "done",
    }
    assert rows["cut"]["path"] == "runs/cut"
    text = cli("runs", "list")
    assert "runs/cut: runs/cut/run.json: damaged" in text
    assert "runs/lost: not a run directory (it has no run.json)" in text


def test_doctor_tries_things_and_reports_each(cli, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RL_HARNESS_DISABLE_PLUGINS", "rl-harness-torch,rl-harness-humaneval")
    (tmp_path / "rl-harness.toml").write_text("harness = 'nop'\nsandbox = 'process'\n")
    findings = {item["what"]: item for item in data(cli("doctor", "--json"))}
    assert findings["sandbox process"]["status"] == "ok"
    assert "NOT isolated" in findings["sandbox process"]["detail"]
    assert findings["python"]["detail"].startswith("3.")


def test_doctor_of_the_core_alone_says_what_local_models_need_and_is_content(cli, monkeypatch, tmp_path: Path) -> None:
    """Somebody who only calls models behind an address was told to install torch, by a failure."""
    monkeypatch.setenv("RL_HARNESS_DISABLE_PLUGINS", "rl-harness-torch")
    (tmp_path / "rl-harness.toml").write_text("sandbox = 'process'\n")
    (engine,) = [item for item in data(cli("doctor", "--json")) if item["what"] == "engine torch"]
    assert engine["status"] == "missing"
    assert "--base-url" in engine["detail"]
    assert "rl-harness-torch" in engine["remedy"]
    for needs_it in ("engine = 'torch'", "model = './mine'"):
        (tmp_path / "rl-harness.toml").write_text(f"sandbox = 'process'\n{needs_it}\n")
        assert "FAIL    configuration: there is no engine 'torch'" in cli("doctor", code=1)


def test_doctor_fails_when_the_configuration_needs_what_is_missing(cli, tmp_path: Path) -> None:
    (tmp_path / "kit.py").write_text(
        "from rl_harness import Extension, hookimpl\nfrom rl_harness.contracts import SandboxProvider\n"
        "from rl_harness.errors import Unavailable\n"
        "class Gone(SandboxProvider):\n    api = 1\n    capabilities = create = list = reap = None\n"
        "    async def preflight(self):\n        raise Unavailable('no such machine', remedy='buy one')\n"
        "@hookimpl\ndef rl_harness_sandboxes():\n    return [Extension('gone', f'{__name__}:Gone', '')]\n"
    )
    (tmp_path / "rl-harness.toml").write_text("plugins = ['kit.py']\nharness = 'nop'\nsandbox = 'gone'\n")
    text = cli("doctor", code=1)
    assert "FAIL    sandbox gone: no such machine\n        remedy: buy one" in text
