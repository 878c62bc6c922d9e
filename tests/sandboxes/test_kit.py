"""The kit finds what it is there to find: providers with one fault each, and the check that has to fail."""

from __future__ import annotations

import asyncio
import builtins
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rl_harness.contracts.sandbox import (
    ExecResult,
    NetworkPolicy,
    Sandbox,
    SandboxCapabilities,
    SandboxInfo,
    SandboxSpec,
)
from rl_harness.sandboxes.local import LocalProvider
from rl_harness.sandboxes.local.sandbox import LocalSandbox
from rl_harness.sandboxes.process import ProcessProvider
from rl_harness.testing.sandbox import CHECKS, Rig, kit

pytestmark = pytest.mark.needs("userns")

CHECK = {check.name: check for check in CHECKS}


class Faulty(LocalProvider):
    """The local provider, whose sandboxes go through :meth:`spoil`."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await super().create(spec)
        assert isinstance(sandbox, LocalSandbox)
        self.spoil(sandbox)
        return sandbox

    def spoil(self, sandbox: Any) -> None:
        pass


class Results(Faulty):
    """Commands have another result than they had."""

    def change(self, result: ExecResult) -> ExecResult:
        raise NotImplementedError

    def spoil(self, sandbox: Any) -> None:
        real = sandbox.exec

        async def spoilt(*arguments: Any, **options: Any) -> ExecResult:
            return self.change(await real(*arguments, **options))

        sandbox.exec = spoilt


class SignalsAreTimeouts(Results):
    def change(self, result: ExecResult) -> ExecResult:
        return msgspec.structs.replace(result, timed_out=result.signal is not None)


class TruncationIsSilent(Results):
    def change(self, result: ExecResult) -> ExecResult:
        return msgspec.structs.replace(result, stdout_truncated=False)


class StreamsAreOne(Results):
    def change(self, result: ExecResult) -> ExecResult:
        return msgspec.structs.replace(result, stdout=result.stdout + result.stderr, stderr=b"")


class TextIsDecoded(Results):
    def change(self, result: ExecResult) -> ExecResult:
        return msgspec.structs.replace(result, stdout=result.stdout.decode("utf-8", "replace").encode())


class TimeoutsKillNothing(Faulty):
    def spoil(self, sandbox: Any) -> None:
        real = sandbox.exec

        async def spoilt(command: Any, timeout: float | None = None, **options: Any) -> ExecResult:
            running = asyncio.ensure_future(real(command, **options))
            done, _ = await asyncio.wait([running], timeout=timeout)
            if done:
                return running.result()
            running.add_done_callback(lambda task: task.cancelled() or task.exception())
            return ExecResult(exit_code=137, stdout=b"first\n", stderr=b"error\n", timed_out=True)

        sandbox.exec = spoilt


class SnapshotsAreLate(Faulty):
    """What the parent does after the snapshot is part of it."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.parents: dict[str, Any] = {}

    def spoil(self, sandbox: Any) -> None:
        async def promise(**_: Any) -> str:
            self.parents[sandbox.id] = sandbox
            return str(sandbox.id)

        sandbox.snapshot = promise

    async def create(self, spec: SandboxSpec) -> Sandbox:
        if spec.snapshot is not None:
            snapshot = await LocalSandbox.snapshot(self.parents[spec.snapshot])
            spec = msgspec.structs.replace(spec, snapshot=snapshot)
        return await super().create(spec)


class SnapshotsForgetTheirKey(Faulty):
    def spoil(self, sandbox: Any) -> None:
        real = sandbox.snapshot

        async def spoilt(*, key: str = "", labels: Mapping[str, str] | None = None) -> str:
            return str(await real(labels=labels))

        sandbox.snapshot = spoilt


class ForksAreTheParent(Faulty):
    def spoil(self, sandbox: Any) -> None:
        async def spoilt(count: int) -> builtins.list[Sandbox]:
            return list(itertools.repeat(sandbox, count))

        sandbox.fork = spoilt


class DeathIsNotTold(Faulty):
    def spoil(self, sandbox: Any) -> None:
        async def never() -> str:
            await asyncio.Event().wait()
            return "never"

        sandbox.died = never


class DeathIsToldTooSoon(Faulty):
    def spoil(self, sandbox: Any) -> None:
        async def always() -> str:
            return "dead"

        sandbox.died = always


class CancelledCreationsStay(Faulty):
    async def create(self, spec: SandboxSpec) -> Sandbox:
        return await asyncio.shield(super().create(spec))


class TheLivingAreReaped(Faulty):
    async def reap(self, labels: Mapping[str, str] | None = None, *, force: bool = False) -> int:
        return await super().reap(labels, force=True)


class LabelsAreIgnored(Faulty):
    async def list(self, labels: Mapping[str, str] | None = None) -> builtins.list[SandboxInfo]:
        return await super().list()


FAULTS = [
    (SignalsAreTimeouts, "a_quick_death_by_signal_is_not_a_timeout"),
    (TruncationIsSilent, "a_hundred_megabytes_of_output_are_cut_and_flagged"),
    (StreamsAreOne, "exit_code_and_separate_streams"),
    (TextIsDecoded, "output_is_bytes_whatever_they_are"),
    (TimeoutsKillNothing, "a_timeout_kills_all_descendants_and_keeps_the_output"),
    (SnapshotsAreLate, "what_the_parent_does_later_stays_out_of_the_snapshot"),
    (SnapshotsForgetTheirKey, "snapshots_are_listed_with_key_and_labels"),
    (ForksAreTheParent, "forks_do_not_see_each_other_nor_their_parent"),
    (DeathIsNotTold, "a_crash_is_noticed"),
    (DeathIsToldTooSoon, "the_living_are_alive_and_have_not_died"),
    (CancelledCreationsStay, "cancelling_create_leaves_nothing"),
    (TheLivingAreReaped, "reaping_spares_the_living_unless_forced"),
    (LabelsAreIgnored, "list_finds_by_labels"),
]


@pytest.mark.parametrize(("fault", "name"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
async def test_a_fault_is_found(
    fault: type[Faulty], name: str, tmp_path: Path, local_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit, "SECONDS", 3.0)
    provider = fault(LocalProvider.Options(state_dir=tmp_path / "state"))
    folder = tmp_path / "host"
    folder.mkdir()
    with pytest.raises(AssertionError):
        await CHECK[name].run(provider, folder, local_rig)
    await provider.close()


#: What a connection can be made to, as far as these providers say; nobody listens there but what they put there.
RIG = Rig(reachable=("127.0.0.2", 8081), unlisted=("127.0.0.3", 8082))
LISTEN = (
    "import socket, sys, time\n"
    "open = [socket.create_server((host, int(port))) for host, port in (each.split(':') for each in sys.argv[1:])]\n"
    "print('listening', flush=True); time.sleep(600)\n"
)


class Networked(LocalProvider):
    """Its sandboxes' own loopback stands for the network of an allow-list: what can be reached listens there."""

    @property
    def capabilities(self) -> SandboxCapabilities:
        return msgspec.structs.replace(super().capabilities, network=frozenset(NetworkPolicy))

    def reached(self, spec: SandboxSpec) -> list[tuple[str, int]]:
        """Honest about every policy."""
        servers = [server for server in (RIG.reachable, RIG.unlisted) if server is not None]
        full = spec.network is NetworkPolicy.FULL
        return [server for server in servers if full or server[0] in spec.network_allow]

    async def create(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await super().create(msgspec.structs.replace(spec, network=NetworkPolicy.NONE, network_allow=()))
        servers = [f"{host}:{port}" for host, port in self.reached(spec)]
        process = await sandbox.spawn(["python3", "-c", LISTEN, *servers])
        async for _ in process.output():
            break  # it listens
        return sandbox


class AllowListsAreIgnored(Networked):
    def reached(self, spec: SandboxSpec) -> list[tuple[str, int]]:
        return super().reached(msgspec.structs.replace(spec, network=NetworkPolicy.FULL))


class AllowListsAllowNothing(Networked):
    def reached(self, spec: SandboxSpec) -> list[tuple[str, int]]:
        return []


class AllowListsAllowTheOther(Networked):
    def reached(self, spec: SandboxSpec) -> list[tuple[str, int]]:
        allowed = super().reached(spec)
        everything = super().reached(msgspec.structs.replace(spec, network=NetworkPolicy.FULL))
        return [server for server in everything if server not in allowed]


ALLOW_LIST, FULL = "an_allow_list_lets_nothing_else_through", "a_full_network_reaches_every_host"


@pytest.mark.parametrize(
    ("provider", "name", "found"),
    [
        (Networked, ALLOW_LIST, False),
        (Networked, FULL, False),
        (AllowListsAreIgnored, ALLOW_LIST, True),
        (AllowListsAllowNothing, ALLOW_LIST, True),
        (AllowListsAllowNothing, FULL, True),
        (AllowListsAllowTheOther, ALLOW_LIST, True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
async def test_networks_that_let_through_too_much_or_too_little_are_found(
    provider: type[Networked], name: str, found: bool, tmp_path: Path
) -> None:
    """The fault is in the provider, and the check finds it."""
    made = provider(Networked.Options(state_dir=tmp_path / "state"))
    assert CHECK[name].inapplicable(made.capabilities, RIG) is None
    try:
        if found:
            with pytest.raises(AssertionError, match="what was reached"):
                await CHECK[name].run(made, tmp_path, RIG)
        else:
            await CHECK[name].run(made, tmp_path, RIG)
    finally:
        await made.close()


class VariablesAreForgotten(LocalProvider):
    """Programs inside are not told of the proxy."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        bare = msgspec.structs.replace(spec.environment, env={})
        return await super().create(msgspec.structs.replace(spec, environment=bare))


async def test_an_allow_list_of_cores_that_does_not_hold_or_work_is_found(tmp_path: Path) -> None:
    check = CHECK["an_allow_list_by_proxy_lets_nothing_else_through"]
    assert check.inapplicable(SandboxCapabilities(network=frozenset(NetworkPolicy))) is not None
    forgets = VariablesAreForgotten(VariablesAreForgotten.Options(state_dir=tmp_path / "state"))
    try:
        with pytest.raises(AssertionError):
            await check.run(forgets, tmp_path)
    finally:
        await forgets.close()
    leaks = SaysItIsolates(SaysItIsolates.Options(state_dir=tmp_path / "leaking"))
    try:
        with pytest.raises(AssertionError):
            await check.run(leaks, tmp_path)
    finally:
        await leaks.close()


def test_the_kit_says_why_a_check_does_not_apply(local: LocalProvider) -> None:
    reasons = {name: check.inapplicable(local.capabilities) for name, check in CHECK.items()}
    assert reasons["exit_code_and_separate_streams"] is None
    assert reasons["pausing_keeps_files_and_resuming_works"] == "no capability pause"
    assert reasons["a_crash_is_noticed"] == "the kit was given no crash (rl_harness.testing.sandbox.Rig)"
    assert len(CHECKS) == len(CHECK) >= 60


class SaysItIsolates(ProcessProvider):
    """Claims what it does not do. Only ever given to the check's guard: see the test."""

    @property
    def capabilities(self) -> SandboxCapabilities:
        network = frozenset({NetworkPolicy.NONE})
        return msgspec.structs.replace(super().capabilities, isolated=True, changes=True, network=network)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        return await super().create(msgspec.structs.replace(spec, network=NetworkPolicy.FULL))


async def test_a_false_claim_of_isolation_is_found_before_the_machine_is_damaged(tmp_path: Path) -> None:
    provider = SaysItIsolates(SaysItIsolates.Options(state_dir=tmp_path / "state"))
    check = kit.Checks()
    harmless = tmp_path / "would-be-damage"

    @check.check
    async def damages(context: kit.Context) -> None:
        sandbox = await context.disposable()
        harmless.write_text("done")
        await sandbox.exec("true")

    with pytest.raises(AssertionError, match="sees the files of this machine"):
        await check[0].run(provider, tmp_path)
    assert not harmless.exists()
    await provider.close()


def test_checks_that_damage_the_system_ask_for_a_disposable_one() -> None:
    source = "".join(path.read_text("utf-8") for path in Path(kit.__file__).parent.glob("*.py"))
    bodies = re.findall(r"async def \w+\(context: Context\).*?(?=\n\n\n|\Z)", source, re.DOTALL)
    damaging = [body for body in bodies if re.search(r"\brm (-\w+ )?(/|\$d/)|> /(usr|etc)/", body)]
    assert len(damaging) >= 4
    assert [body for body in damaging if not re.search(r"context\.disposable\(\)|_root_of_its_own\(", body)] == []
