"""A network policy as what E2B is asked for when a sandbox is created."""

from __future__ import annotations

import ipaddress
from typing import Any

from rl_harness.contracts.sandbox import NetworkPolicy, SandboxSpec
from rl_harness.errors import Unsupported
from rl_harness.sandboxes.remote import split_hosts

_EVERYTHING = "0.0.0.0/0"
#: Addresses at which clouds hand out credentials to machines.
_METADATA = ["169.254.0.0/16", "100.100.100.200/32"]

#: What E2B lets no sandbox reach, whatever is asked for.
_PRIVATE = [
    ipaddress.IPv4Network(text)
    for text in (
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.168.0.0/16",
    )
]


def network_options(spec: SandboxSpec) -> dict[str, Any]:
    """Arguments of the SDK's ``create``. Nothing inside is ever served to the internet. Raises Unsupported."""
    if spec.network is NetworkPolicy.NONE:
        return {
            "allow_internet_access": False,
            "network": {"deny_out": [_EVERYTHING], "allow_public_traffic": False},
        }
    if spec.network is NetworkPolicy.FULL:
        return {
            "allow_internet_access": True,
            "network": {"deny_out": _METADATA, "allow_public_traffic": False},
        }
    ranges, domains = split_hosts(spec.network_allow, "E2B")
    for allowed in map(ipaddress.ip_network, ranges):
        if not isinstance(allowed, ipaddress.IPv4Network):
            raise Unsupported(f"allowed host {allowed}: sandboxes on E2B have no IPv6")
        if any(allowed.subnet_of(private) for private in _PRIVATE):
            raise Unsupported(f"allowed host {allowed}: E2B lets no sandbox reach private addresses")
    return {
        "network": {
            "allow_out": [*ranges, *domains],
            "deny_out": [_EVERYTHING],
            "allow_public_traffic": False,
        },
    }
