"""The key of a prepared environment changes with everything that decides its content, and with nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rl_harness.contracts import EnvironmentSpec, SetupStep
from rl_harness.sandboxes.environments import environment_key

STEP = SetupStep(name="one", script="make", env={"A": "1", "B": "2"})
FINGERPRINT = {"base": "sha256:1", "argument": "x"}


def environment(folder: Path) -> EnvironmentSpec:
    folder.mkdir(parents=True)
    (folder / "Dockerfile").write_text("FROM --platform=linux/amd64 python:3.11\nARG V=1\nCOPY tool /tool\n")
    (folder / "compose.yaml").write_text("services: {}\n")
    (folder / "tool").write_text("#!/bin/sh\n")
    (folder / "workspace/deep").mkdir(parents=True)
    (folder / "workspace/deep/data").write_bytes(b"\0\xff")
    (folder / "workspace/link").symlink_to("deep/data")
    return EnvironmentSpec(
        directory=folder,
        dockerfile=folder / "Dockerfile",
        compose=folder / "compose.yaml",
        image="python:3.12",
        workdir="/app",
        env={"X": "1", "Y": "2"},
        setup=(STEP, SetupStep(name="two", script="make install")),
    )


def key(spec: EnvironmentSpec, identity: str = "copying 1.0", fingerprint: dict[str, str] = FINGERPRINT) -> str:
    return environment_key(spec, identity, fingerprint)


# Each changes one input of the environment it is given, whose folder is its own.
REPLACED = {
    "image": {"image": "python:3.13"},
    "no image": {"image": None},
    "workdir": {"workdir": "/work"},
    "a variable": {"env": {"X": "1", "Y": "3"}},
    "a variable's name": {"env": {"X": "1", "Z": "2"}},
    "one variable more": {"env": {"X": "1", "Y": "2", "Z": ""}},
    "no set-up": {"setup": ()},
    "one step less": {"setup": (STEP,)},
    "the order of steps": {"setup": (SetupStep(name="two", script="make install"), STEP)},
    "no compose file": {"compose": None},
    "no Dockerfile": {"dockerfile": None},
    "no directory": {"directory": None},
}
FILES = {
    "the Dockerfile": lambda f: (f / "Dockerfile").write_text("FROM python:3.11\n"),
    "an ARG of the Dockerfile": lambda f: (f / "Dockerfile").write_text(
        (f / "Dockerfile").read_text().replace("V=1", "V=2")
    ),
    "what the Dockerfile copies": lambda f: (f / "tool").write_text("#!/bin/bash\n"),
    "a mode": lambda f: (f / "tool").chmod(0o755),
    "a mode's other bits": lambda f: (f / "workspace/deep/data").chmod(0o600),
    "a folder's mode": lambda f: (f / "workspace/deep").chmod(0o700),
    "one byte of the workspace": lambda f: (f / "workspace/deep/data").write_bytes(b"\0\xfe"),
    "a name": lambda f: (f / "workspace/deep/data").rename(f / "workspace/deep/dat"),
    "where a link points": lambda f: _relink(f / "workspace/link", "deep/other"),
    "a link made a file": lambda f: _relink(f / "workspace/link", None),
    "a new empty file": lambda f: (f / "workspace/empty").touch(),
    "a new empty folder": lambda f: (f / "workspace/empty").mkdir(),
    "a file that went": lambda f: (f / "tool").unlink(),
    "the compose file": lambda f: (f / "compose.yaml").write_text("services: {db: {image: x}}\n"),
}


def _relink(link: Path, target: str | None) -> None:
    link.unlink()
    link.write_bytes(b"\0\xff") if target is None else link.symlink_to(target)


def test_every_single_change_gives_another_key(tmp_path):
    base = environment(tmp_path / "base/environment")
    keys = {"as it was": key(base)}
    for name, change in REPLACED.items():
        keys[name] = key(msgspec.structs.replace(base, **change))
    for name, edit in FILES.items():
        other = environment(tmp_path / name / "environment")
        assert key(other) == keys["as it was"]
        edit(other.directory)
        keys[name] = key(other)
    script = msgspec.structs.replace(STEP, script="make all")
    keys["a script"] = key(msgspec.structs.replace(base, setup=(script, *base.setup[1:])))
    variable = msgspec.structs.replace(STEP, env={"A": "1", "B": "3"})
    keys["a step's variable"] = key(msgspec.structs.replace(base, setup=(variable, *base.setup[1:])))
    keys["the provider's version"] = key(base, identity="copying 1.1")
    keys["a moved tag"] = key(base, fingerprint={**FINGERPRINT, "base": "sha256:2"})
    keys["a build argument"] = key(base, fingerprint={**FINGERPRINT, "argument": "y"})
    same = {(a, b) for a in keys for b in keys if a < b and keys[a] == keys[b]}
    assert not same


@pytest.mark.parametrize("name", ["__pycache__/x.pyc", ".DS_Store"])
def test_what_tools_leave_behind_counts_since_it_is_copied_in(tmp_path, name):
    base = environment(tmp_path / "base/environment")
    keys = {key(base)}
    file = base.directory / "workspace" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    for content in ("a", "b"):
        file.write_text(content)
        keys.add(key(base))
    assert len(keys) == 3


def test_nothing_else_gives_another_key(tmp_path):
    base = environment(tmp_path / "base/environment")
    expected = key(base)
    for path in base.directory.rglob("*"):
        os.utime(path, (1, 1), follow_symlinks=False)
    assert key(base) == expected
    shutil.copytree(base.directory, tmp_path / "elsewhere/environment", symlinks=True)
    shutil.rmtree(base.directory)
    again = environment(base.directory)  # made in another order of directory entries
    assert key(again) == expected
    moved = tmp_path / "elsewhere/environment"
    paths = {"directory": moved, "dockerfile": moved / "Dockerfile", "compose": moved / "compose.yaml"}
    assert key(msgspec.structs.replace(again, **paths)) == expected
    assert key(msgspec.structs.replace(again, env={"Y": "2", "X": "1"})) == expected
    assert key(again, fingerprint=dict(reversed(FINGERPRINT.items()))) == expected
    renamed = (msgspec.structs.replace(STEP, name="other", timeout=1.0), *again.setup[1:])
    assert key(msgspec.structs.replace(again, setup=renamed, build_timeout=1.0)) == expected


PATHS = st.lists(st.sampled_from(["a", "b", "ab", "a.b", "é"]), min_size=1, max_size=3).map("/".join)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    first=st.dictionaries(PATHS, st.tuples(st.binary(max_size=3), st.sampled_from([0o644, 0o755, 0o600])), max_size=4),
    second=st.dictionaries(PATHS, st.tuples(st.binary(max_size=3), st.sampled_from([0o644, 0o755, 0o600])), max_size=4),
)
def test_two_workspaces_have_one_key_exactly_when_they_are_the_same(tmp_path_factory, first, second):
    made = []
    for files in (first, second):
        folder = tmp_path_factory.mktemp("tree")
        there = {}
        for name, (data, mode) in files.items():
            target = folder / name
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
                target.chmod(mode)
            except OSError:  # a file where a folder should be, or the other way round
                continue
            there[name] = (data, mode)
        empty = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_dir()}
        made.append((there, empty, environment_key(EnvironmentSpec(directory=folder), "p", {})))
    assert (made[0][:2] == made[1][:2]) == (made[0][2] == made[1][2])
