"""Grading in the process sandbox, whose commands see the host's files."""

from __future__ import annotations

from pathlib import Path

import pytest
from rl_harness.contracts import NetworkPolicy
from rl_harness.sandboxes.process import ProcessProvider
from rl_harness.tasks import load_task, unsupported, verify


@pytest.mark.parametrize("mode", ["separate", "shared"])
async def test_nothing_of_the_host_is_removed(write_task, tmp_path: Path, mode: str):
    """The task's working directory exists on the host as well; what is cleared is the sandbox's."""
    workdir = tmp_path / "host"
    workdir.mkdir()
    (workdir / "precious").write_text("the user's own")
    toml = f"""
artifacts = ["{workdir}/precious"]
[environment]
network_mode = "public"
workdir = "{workdir}"
[rl_harness]
verifier = "{mode}"
"""
    task = load_task(write_task(toml))
    provider = ProcessProvider(ProcessProvider.Options(state_dir=tmp_path / "sandboxes"))
    spec = task.sandbox_spec({"run": "r"})
    assert spec.network is NetworkPolicy.FULL
    sandbox = await provider.create(spec)
    try:
        await sandbox.write_file(f"{workdir}/precious", b"the agent's")
        await verify(task, sandbox, provider, None, {"run": "r"})
    finally:
        await provider.close()
    assert (workdir / "precious").read_text() == "the user's own"


async def test_root_is_who_runs_the_tests_where_nobody_else_can(write_task, tmp_path: Path):
    toml = "[verifier]\nuser = 'root'\n[rl_harness]\n"
    test = "echo 1 > $RL_HARNESS_LOGS/reward.txt"
    task = load_task(write_task(toml, {"tests/test.sh": test}))
    provider = ProcessProvider(ProcessProvider.Options(state_dir=tmp_path / "sandboxes"))
    try:
        assert unsupported(task, provider.capabilities) == []
        sandbox = await provider.create(task.sandbox_spec({"run": "r"}, isolated=False))
        assert (await verify(task, sandbox, provider, None, {"run": "r"})).reward == 1.0
    finally:
        await provider.close()
