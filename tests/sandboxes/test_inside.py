"""What providers of machines share: allowed hosts, other users, and which processes are a task's."""

from __future__ import annotations

import pytest
from rl_harness.contracts.sandbox import SandboxSpec
from rl_harness.errors import Unsupported
from rl_harness.sandboxes.local import LocalProvider
from rl_harness.sandboxes.remote import as_user, list_processes, signal_processes, split_hosts


def test_ranges_are_told_from_domains() -> None:
    hosts = ["10.1.2.3", "192.168.1.1/16", "2001:db8::/32", "Example.com", "*.example.org", "_srv.x-y.org"]
    assert split_hosts(hosts, "X") == (
        ["10.1.2.3/32", "192.168.0.0/16", "2001:db8::/32"],
        ["example.com", "*.example.org", "_srv.x-y.org"],
    )


@pytest.mark.parametrize("host", ["", "http://x.org", "a b", "*", "x.org/path", "[::1]:80", "-x.org", "*.*.org"])
def test_a_host_that_is_neither_address_nor_name_is_refused_in_the_services_name(host: str) -> None:
    with pytest.raises(Unsupported, match="Some Cloud takes addresses"):
        split_hosts([host], "Some Cloud")


@pytest.mark.needs("root", "userns")
async def test_what_ran_before_is_spared_and_everything_else_is_signalled(tmp_path) -> None:
    provider = LocalProvider(LocalProvider.Options(state_dir=tmp_path))
    sandbox = await provider.create(SandboxSpec())
    await sandbox.exec("sleep 600 & echo $! > service; echo $$")
    spare = (await sandbox.exec(list_processes())).stdout.decode().split()
    await sandbox.exec("(setsid sleep 600 &) ; sleep 600 & echo $! > task")
    state = "cut -d' ' -f3 /proc/$(cat {0})/stat 2>/dev/null || echo gone"
    for signal, wanted in (("STOP", b"T\n"), ("CONT", b"S\n"), ("KILL", b"gone\n")):
        assert (await sandbox.exec(signal_processes(signal, spare))).ok
        assert (await sandbox.exec(state.format("service"))).stdout == b"S\n"
        assert (await sandbox.exec(state.format("task"))).stdout == wanted
    await provider.close()


@pytest.mark.needs("root", "userns")
async def test_a_command_is_run_as_another_user_or_not_at_all(tmp_path) -> None:
    provider = LocalProvider(LocalProvider.Options(state_dir=tmp_path))
    sandbox = await provider.create(SandboxSpec())
    for user, wanted in ((None, b"0 0\n"), ("nobody", b"65534 65534\n"), ("1234", b"1234 1234\n")):
        assert (await sandbox.exec(as_user(user, ["sh", "-c", "echo $(id -u) $(id -g)"]))).stdout == wanted
    missing = await sandbox.exec(as_user("nobody-there", ["touch", "made"]))
    assert (missing.exit_code, missing.stderr) == (126, b"no user nobody-there in the sandbox\n")
    await provider.close()
