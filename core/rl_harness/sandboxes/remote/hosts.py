"""A task's allowed hosts, told apart: address ranges and domain names."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from rl_harness.errors import Unsupported

_DOMAIN = re.compile(r"(\*\.)?([A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?\.)*[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?")


def split_hosts(hosts: Iterable[str], service: str) -> tuple[list[str], list[str]]:
    """Ranges (of either version of addresses) and lower-case domains. Raises Unsupported, in the name of ``service``,
    for what is neither, such as a host with a port."""
    ranges, domains = [], []
    for host in hosts:
        try:
            ranges.append(str(ipaddress.ip_network(host, strict=False)))
            continue
        except ValueError:
            pass
        if not _DOMAIN.fullmatch(host):
            raise Unsupported(
                f"allowed host {host!r}: {service} takes addresses, ranges such as 10.0.0.0/8, and domain names, "
                "with *. in front for every name below one"
            )
        domains.append(host.lower())
    return ranges, domains
