"""A task's allowed hosts as Modal's two lists: address ranges and domain names."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from rl_harness.errors import Unsupported

_DOMAIN = re.compile(r"(\*\.)?([A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?\.)*[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?")


def allow_lists(hosts: Iterable[str]) -> tuple[list[str], list[str]]:
    """Ranges and domains. Raises Unsupported for what is neither, such as a host with a port."""
    ranges, domains = [], []
    for host in hosts:
        try:
            ranges.append(str(ipaddress.ip_network(host, strict=False)))
            continue
        except ValueError:
            pass
        if not _DOMAIN.fullmatch(host):
            raise Unsupported(
                f"allowed host {host!r}: Modal takes addresses, ranges such as 10.0.0.0/8, and domain names, "
                "with *. in front for every name below one"
            )
        domains.append(host.lower())
    return ranges, domains
