"""Gives a provider that isolates, and can do without a network, the policy of an allow-list that it lacks."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Mapping
from typing import ClassVar

import msgspec

from rl_harness.contracts.common import Options
from rl_harness.contracts.sandbox import (
    BuildInfo,
    NetworkPolicy,
    Sandbox,
    SandboxCapabilities,
    SandboxInfo,
    SandboxProvider,
    SandboxSpec,
    SnapshotInfo,
)
from rl_harness.sandboxes.allowlist.hosts import EVERY_PUBLIC_HOST, AllowedHosts
from rl_harness.sandboxes.allowlist.proxy import Dialer
from rl_harness.sandboxes.allowlist.sandbox import AllowListSandbox, proxy_variables
from rl_harness.sandboxes.flights import finished
from rl_harness.sandboxes.resident import HelperUnavailable

log = logging.getLogger("rl_harness.sandboxes.allowlist")


def with_allow_lists(provider: SandboxProvider) -> SandboxProvider:
    """``provider``, with core's allow-list where it has none of its own and what it takes for one."""
    return AllowListProvider(provider)


class AllowListProvider(SandboxProvider):
    """``inner`` in everything but sandboxes with an allow-list, where ``inner`` has no such policy: these are created
    without a network, and a proxy of this process is at a port of their loopback."""

    api: ClassVar[int] = 1

    def __init__(self, inner: SandboxProvider) -> None:
        super().__init__(Options())
        self.inner = inner
        self._dialer = Dialer()

    @property
    def proxied(self) -> bool:
        """Whether allow-lists are core's here."""
        able = self.inner.capabilities
        return able.isolated and NetworkPolicy.NONE in able.network and NetworkPolicy.ALLOW_LIST not in able.network

    @property
    def capabilities(self) -> SandboxCapabilities:
        able = self.inner.capabilities
        if not self.proxied:
            return able
        return msgspec.structs.replace(able, network=able.network | {NetworkPolicy.ALLOW_LIST})

    async def preflight(self) -> None:
        await self.inner.preflight()

    def _inner_spec(self, spec: SandboxSpec) -> SandboxSpec:
        environment = msgspec.structs.replace(spec.environment, env=proxy_variables(spec.environment.env))
        return msgspec.structs.replace(spec, environment=environment, network=NetworkPolicy.NONE, network_allow=())

    def _is_ours(self, spec: SandboxSpec) -> bool:
        return spec.network is NetworkPolicy.ALLOW_LIST and self.proxied

    async def create(self, spec: SandboxSpec) -> Sandbox:
        if not self._is_ours(spec):
            return await self.inner.create(spec)
        hosts = AllowedHosts(spec.network_allow)
        sandbox = AllowListSandbox(await self.inner.create(self._inner_spec(spec)), hosts, self._dialer)
        try:
            await sandbox.ready()
        except HelperUnavailable as error:
            if spec.network_allow == EVERY_PUBLIC_HOST:  # set-up, which may need no network at all
                log.info("set-up has no network: %s", error)
                return sandbox
            await finished(sandbox.close())
            raise HelperUnavailable(
                f"network_mode = 'allowlist' takes a Python in the sandbox: {error.message}", remedy=error.remedy
            ) from None
        except BaseException:
            await finished(sandbox.close())
            raise
        return sandbox

    async def check(self, spec: SandboxSpec) -> None:
        if self._is_ours(spec):
            AllowedHosts(spec.network_allow)
            spec = self._inner_spec(spec)
        await self.inner.check(spec)

    async def list(self, labels: Mapping[str, str] | None = None) -> builtins.list[SandboxInfo]:
        return await self.inner.list(labels)

    async def reap(self, labels: Mapping[str, str] | None = None, *, force: bool = False) -> int:
        return await self.inner.reap(labels, force=force)

    async def fingerprint(self, spec: SandboxSpec) -> Mapping[str, str]:
        return await self.inner.fingerprint(spec)

    async def snapshots(self, labels: Mapping[str, str] | None = None) -> builtins.list[SnapshotInfo]:
        return await self.inner.snapshots(labels)

    async def delete_snapshot(self, snapshot: str) -> None:
        await self.inner.delete_snapshot(snapshot)

    async def builds(self) -> builtins.list[BuildInfo]:
        return await self.inner.builds()

    async def delete_build(self, build: str) -> bool:
        return await self.inner.delete_build(build)

    async def connect(self, sandbox: str) -> Sandbox:
        """Without a way to the hosts it was created with: the list went with the process that made it."""
        return await self.inner.connect(sandbox)

    async def close(self) -> None:
        try:
            await self.inner.close()
        finally:
            self._dialer.close()
