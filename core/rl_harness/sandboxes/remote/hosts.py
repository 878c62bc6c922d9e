"""A task's allowed hosts, told apart: address ranges and domain names."""

from __future__ import annotations

from collections.abc import Iterable

from rl_harness.errors import Unsupported
from rl_harness.hosts import FORMS, parse


def split_hosts(hosts: Iterable[str], service: str) -> tuple[list[str], list[str]]:
    """Ranges (of either version of addresses) and lower-case domains. Raises Unsupported, in the name of ``service``,
    for what is neither, such as a host with a port."""
    ranges, domains = [], []
    for host in hosts:
        try:
            entry = parse(host)
        except ValueError:
            raise Unsupported(f"allowed host {host!r}: {service} takes {FORMS}") from None
        if isinstance(entry, str):
            domains.append(entry)
        else:
            ranges.append(str(entry))
    return ranges, domains
