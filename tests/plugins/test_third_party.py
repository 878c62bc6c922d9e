"""A third party's package, from its wheel in a fresh environment to a finished run, with our own wheel beside it."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tests" / "fixtures" / "acme-echo"


def run(*command: str | Path, cwd: Path, code: int = 0) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["XDG_CACHE_HOME"] = str(cwd / "cache")
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, cwd=cwd, env=environment, check=False
    )
    assert done.returncode == code, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def wheel(source: Path, into: Path) -> Path:
    """Built from a copy, which leaves nothing behind in the repository."""
    project = tomllib.loads((source / "pyproject.toml").read_text())
    copy = into / "sources" / project["project"]["name"]
    copy.mkdir(parents=True)
    parts = project["tool"]["hatch"]["build"]["targets"].get("sdist", {}).get("only-include", ["src", "pyproject.toml"])
    for part in parts:
        if (source / part).is_dir():
            shutil.copytree(source / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source / part, copy / part)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q"]
    run(*pip, "--no-build-isolation", "--no-deps", "--no-index", "-w", into, copy, cwd=into)
    (built,) = into.glob(f"{project['project']['name'].replace('-', '_')}-[0-9]*.whl")
    return built


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of an environment with the two wheels installed; what they depend on comes from this one."""
    place = tmp_path_factory.mktemp("third-party")
    home = place / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    packages = next(home.glob("lib/python*/site-packages"))
    outer = [*site.getsitepackages(), *(entry for entry in sys.path if entry.endswith("site-packages"))]
    lines = [f"import site; site.addsitedir({entry!r})" for entry in dict.fromkeys(outer)]
    (packages / "outer.pth").write_text("\n".join(lines) + "\n")
    wheels = [wheel(ROOT, place), wheel(PACKAGE, place)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", home / "bin" / "python"]
    run(*pip, "install", "-q", "--no-index", "--no-deps", "--ignore-installed", *wheels, cwd=place)
    return home / "bin"


def test_the_core_runs_from_its_wheel(environment: Path, tmp_path: Path) -> None:
    where = run(environment / "python", "-c", "import rl_harness; print(rl_harness.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(environment.parent)
    listed = json.loads(run(environment / "rl-harness", "tasks", "list", "shell-basics", "--json", cwd=tmp_path))
    assert listed
    assert all(Path(task["directory"]).is_dir() for task in listed)


def test_the_installed_package_appears_in_the_list_and_passes_the_check(environment: Path, tmp_path: Path) -> None:
    plugins = json.loads(run(environment / "rl-harness", "plugins", "list", "--json", cwd=tmp_path))
    (acme,) = [plugin for plugin in plugins if plugin["distribution"] == "acme-echo"]
    assert (acme["version"], acme["problems"]) == ("0.4.2", [])
    assert {(item["kind"], item["name"]) for item in acme["provides"]} == {
        ("harnesses", "echo"),
        ("benchmarks", "echoes"),
    }
    checked = json.loads(run(environment / "rl-harness", "plugins", "check", "acme-echo", "--json", cwd=tmp_path))
    assert [row["error"] for row in checked] == [None, None]
    shown = run(environment / "rl-harness", "plugins", "show", "echo", cwd=tmp_path)
    assert "harness.shout" in shown
    assert "which is wrong" in shown


def test_a_run_goes_through_the_installed_package(environment: Path, tmp_path: Path) -> None:
    command = [environment / "rl-harness", "run", "echoes", "--harness", "echo"]
    run(*command, "--name", "right", cwd=tmp_path)
    run(*command, "--name", "wrong", "-o", "harness.shout=true", cwd=tmp_path)
    rows: list[dict[str, Any]] = json.loads(run(environment / "rl-harness", "runs", "list", "--json", cwd=tmp_path))
    assert {row["name"]: (row["status"], row["pass_rate"]) for row in rows} == {
        "right": ("done", 1.0),
        "wrong": ("done", 0.0),
    }


def test_a_wrong_option_of_it_is_a_usage_error(environment: Path, tmp_path: Path) -> None:
    command = [environment / "rl-harness", "run", "echoes", "--harness", "echo", "-o", "harness.shot=true"]
    assert "did you mean shout?" in run(*command, cwd=tmp_path, code=2)
