"""The networks of sandboxes that have one: no way from one sandbox to another, none to metadata services."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from typing import Any

from rl_harness.contracts.sandbox import NetworkPolicy

from rl_harness_docker.containers import BRIDGE, labels
from rl_harness_docker.engine import Engine, EngineError

_ATTEMPTS = 20
_OPTION = "com.docker.network.bridge"

# Link-local addresses, where most clouds have it, and the one of Alibaba's.
_METADATA = ("169.254.0.0/16", "100.100.100.192/27")

# Networks on which nobody answers, with the addresses of clouds' metadata services: what is on them is not routed.
# The machine of the engine gets no address there and so loses nothing.
_NETWORKS: dict[str, dict[str, Any]] = {
    BRIDGE: {"Options": {f"{_OPTION}.enable_icc": "false"}},
    **{
        f"{BRIDGE}-none-{number}": {
            "Internal": True,
            "Options": {f"{_OPTION}.enable_icc": "false", f"{_OPTION}.inhibit_ipv4": "true"},
            "IPAM": {"Config": [{"Subnet": subnet}]},
        }
        for number, subnet in enumerate(_METADATA, 1)
    },
}


async def make_private(engine: Engine, name: str, closed: bool, given: dict[str, str]) -> None:
    """A network between the containers of one sandbox. A closed one leads nowhere, not even to the engine's machine,
    which has no address on it; so its addresses can be anybody's, and need not be of the few that the engine would
    choose from."""
    body: dict[str, Any] = {"Name": name, "Driver": "bridge", "Internal": closed, "Labels": given}
    for attempt in range(_ATTEMPTS):
        if closed:
            body["Options"] = {f"{_OPTION}.inhibit_ipv4": "true"}
            block = secrets.randbelow(1 << 11)
            body["IPAM"] = {"Config": [{"Subnet": f"10.213.{block >> 3}.{(block & 7) << 5}/27"}]}
        try:
            await engine.request("POST", "/networks/create", body=body)
        except EngineError as error:
            if not closed or "overlaps" not in error.message or attempt == _ATTEMPTS - 1:
                raise
        else:
            return


class Networks:
    """The engine's two networks for :attr:`NetworkPolicy.FULL`, made when first needed and shared by everyone."""

    def __init__(self, engine: Engine, owner: str) -> None:
        self._engine = engine
        self._owner = owner
        self._ready = False
        self._lock = asyncio.Lock()

    async def ready(self, policy: NetworkPolicy) -> None:
        if policy is NetworkPolicy.NONE or self._ready:
            return
        async with self._lock:
            filters = json.dumps({"name": [BRIDGE]})
            found = {
                each["Name"] for each in await self._engine.request("GET", "/networks", params={"filters": filters})
            }
            for name, form in _NETWORKS.items():
                if name in found:
                    continue
                body = {
                    "Name": name,
                    "CheckDuplicate": True,
                    "Driver": "bridge",
                    "Labels": labels("network", self._owner, {}),
                    **form,
                }
                try:
                    await self._engine.request("POST", "/networks/create", body=body)
                except EngineError as error:
                    if error.status != 409:  # somebody else was faster
                        raise
            self._ready = True

    def forget(self) -> None:
        """Look again whether they are there."""
        self._ready = False

    async def attach(self, container: str, policy: NetworkPolicy) -> None:
        for name in _NETWORKS if policy is NetworkPolicy.FULL else ():
            if name != BRIDGE:
                await self._engine.request("POST", f"/networks/{name}/connect", body={"Container": container})

    async def close(self) -> None:
        """Remove them unless somebody else uses them."""
        if not self._ready:
            return
        for name in _NETWORKS:
            with contextlib.suppress(EngineError):
                await self._engine.request("DELETE", f"/networks/{name}")
