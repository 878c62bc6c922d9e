"""What a container is allowed, seen from inside, and what a hostile one can do (nothing)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from rl_harness.contracts import Limits, NetworkPolicy, Sandbox, SandboxSpec
from rl_harness.errors import SandboxError
from rl_harness_docker.options import KEPT_CAPABILITIES, DockerOptions
from rl_harness_docker.provider import DockerProvider
from rl_harness_docker.sandbox import DockerSandbox
from rl_harness_docker.testing import BASE_IMAGE

pytestmark = pytest.mark.needs("docker")

# Linux' numbers of capabilities, by include/uapi/linux/capability.h.
_NUMBERS = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7}


async def output(sandbox: Sandbox, command: str, **more: Any) -> str:
    result = await sandbox.exec(command, **more)
    assert result.ok, result
    return result.stdout.decode()


async def test_rights_and_processes_seen_from_inside(provider: DockerProvider) -> None:
    sandbox = await provider.create(SandboxSpec(limits=Limits(pids=100, memory=64 << 20, cpus=0.5)))
    status = dict(line.split(":\t") for line in (await output(sandbox, "grep : /proc/self/status")).splitlines())
    kept = sum(1 << _NUMBERS[name] for name in KEPT_CAPABILITIES)
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == kept
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert "docker-init" in await output(sandbox, "tr '\\0' ' ' < /proc/1/cmdline")
    for refused in ("mount -t tmpfs x /mnt", "mknod /tmp/disk b 8 0", "ip link set lo down", "chroot / true"):
        assert not (await sandbox.exec(refused)).ok, refused
    assert await output(sandbox, "ls /var/run/docker.sock /run/docker.sock 2>&1 | grep -c 'No such'") == "2\n"
    await sandbox.close()


async def test_limits_are_the_engines(provider: DockerProvider, engine: Any) -> None:
    sandbox = await provider.create(SandboxSpec(limits=Limits(pids=77, memory=64 << 20, cpus=0.5)))
    assert isinstance(sandbox, DockerSandbox)
    host = engine.inspect_container(sandbox.container)["HostConfig"]
    assert (host["PidsLimit"], host["Memory"], host["MemorySwap"], host["NanoCpus"]) == (
        77,
        64 << 20,
        64 << 20,
        5 * 10**8,
    )
    await sandbox.close()


async def test_orphans_are_reaped(provider: DockerProvider) -> None:
    sandbox = await provider.create(SandboxSpec())
    await output(sandbox, "for n in 1 2 3; do (sh -c 'sleep 0.01 &' &); done; sleep 0.3")
    assert await output(sandbox, "grep -hs '^State:.*Z' /proc/[0-9]*/status | wc -l") == "0\n"
    await sandbox.close()


async def test_sandboxes_with_a_network_do_not_reach_each_other(provider: DockerProvider) -> None:
    spec = SandboxSpec(network=NetworkPolicy.FULL)
    one, two = await asyncio.gather(provider.create(spec), provider.create(spec))
    address = (await output(one, "hostname -i")).split()[0]
    server = await one.spawn(["python3", "-m", "http.server", "8000"])
    try:
        probe = f"import socket; socket.create_connection(('{address}', 8000), 2)"
        for _ in range(100):
            if (await one.exec(["python3", "-c", probe])).ok:
                break
        else:
            pytest.fail("the server did not start")
        assert not (await two.exec(["python3", "-c", probe])).ok
        assert await output(two, "cat /proc/sys/net/ipv6/conf/all/disable_ipv6") == "1\n"
    finally:
        await server.kill()
        await asyncio.gather(one.close(), two.close())


async def test_a_read_only_sandbox(engine: Any) -> None:
    provider = DockerProvider(DockerOptions(image=BASE_IMAGE, read_only=True))
    assert not provider.capabilities.changes
    sandbox = await provider.create(SandboxSpec())
    assert not (await sandbox.exec("echo x > /etc/x")).ok
    await output(sandbox, "echo x > /tmp/x; echo y > y; mkdir sub")
    await sandbox.write_file("/app/sub/given", b"given", mode=0o755)
    assert await sandbox.read_file("/app/sub/given") == b"given"
    with pytest.raises(SandboxError, match="read-only"):
        await sandbox.write_file("/etc/x", b"")
    volumes = {mount["Name"] for mount in engine.inspect_container(sandbox.container)["Mounts"]}  # type: ignore[attr-defined]
    await sandbox.kill_processes()
    assert await output(sandbox, "cat y /app/sub/given") == "y\ngiven"
    await provider.close()
    assert not volumes & {volume["Name"] for volume in engine.volumes()["Volumes"] or ()}


async def test_programs_replaced_by_an_agent_are_not_trusted(provider: DockerProvider) -> None:
    """Its shell, tar and kill answer what it likes; files, changes and kills do not ask them."""
    sandbox = await provider.create(SandboxSpec())
    fake = "#!/usr/bin/python3\nimport os; os._exit(0)\n"
    await sandbox.write_file("/app/true-secret", b"real")
    daemon = "while :; do sleep 0.1; done"
    await output(sandbox, f"(setsid sh -c '{daemon}' >/dev/null 2>&1 &)")
    script = f"cat > /tmp/fake <<'E'\n{fake}E\nchmod 755 /tmp/fake; for name in tar cat head sh bash busybox dash; do"
    await output(sandbox, f"{script} cp /tmp/fake /usr/bin/new; mv -f /usr/bin/new /usr/bin/$name; done")
    await sandbox.kill_processes()
    assert {"/usr/bin/tar", "/usr/bin/dash", "/usr/bin/cat"} <= set(await sandbox.changes())
    assert await sandbox.read_file("/app/true-secret") == b"real"
    await sandbox.write_file("/app/after", b"written")
    assert await sandbox.read_file("/app/after") == b"written"
    await sandbox.close()


async def test_running_python_changes_nothing(provider: DockerProvider) -> None:
    """An image may come without byte code; an agent that runs Python, or our helper, is no tamperer for it."""
    sandbox = await provider.create(SandboxSpec())
    await output(sandbox, "python3 -c 'import json, http.server'")
    assert [path for path in await sandbox.changes() if path.startswith("/usr")] == []
    await sandbox.close()


async def test_killing_starts_from_a_clean_slate(provider: DockerProvider, engine: Any) -> None:
    """Whatever an agent made of the container's first process, it is gone: nothing inside is asked to die."""
    sandbox = await provider.create(SandboxSpec())
    assert isinstance(sandbox, DockerSandbox)
    first = engine.inspect_container(sandbox.container)["State"]["Pid"]
    await output(sandbox, "echo kept > file; (trap '' TERM INT; setsid sleep 4242 >/dev/null 2>&1 &)")
    await sandbox.kill_processes()
    assert not engine.inspect_container(sandbox.container)["State"]["Running"]
    assert await sandbox.alive()
    assert await sandbox.read_file("/app/file") == b"kept\n"
    assert "4242" not in await output(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert engine.inspect_container(sandbox.container)["State"]["Pid"] != first
    await sandbox.close()


async def test_labels_say_whose_it_is(provider: DockerProvider, engine: Any) -> None:
    sandbox = await provider.create(SandboxSpec(labels={"run": "r:1", "episode": "e"}))
    assert isinstance(sandbox, DockerSandbox)
    labels = engine.inspect_container(sandbox.container)["Config"]["Labels"]
    assert json.loads(labels["rl-harness.labels"]) == {"run": "r:1", "episode": "e"}
    assert labels["rl-harness.kind"] == "sandbox"
    await sandbox.close()
