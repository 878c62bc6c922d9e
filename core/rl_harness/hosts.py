"""What an entry of a list of allowed hosts may be: an address, a range of them, a domain name, or ``*.`` and one."""

from __future__ import annotations

import ipaddress
import re

Range = ipaddress.IPv4Network | ipaddress.IPv6Network

DOMAIN = re.compile(r"([A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?\.)*[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?")
#: How a last label looks that makes a whole name an address, written in one of the ways of old: 0x7f.1, 2130706433.
_NUMBER = re.compile(r"(0[xX][0-9A-Fa-f]*|[0-9]+)")
_LONGEST_NAME, _LONGEST_LABEL = 253, 63

FORMS = "addresses, ranges such as 10.0.0.0/8, and domain names, with *. in front for every name below one"


def parse(entry: str) -> Range | str:
    """A range, or a lower-case domain. Raises ``ValueError`` for what is neither, such as a host with a port."""
    try:
        if "%" not in entry:  # a zone belongs to a machine, not to an address
            return ipaddress.ip_network(entry, strict=False)
    except ValueError:
        pass
    name = entry.removeprefix("*.")
    labels = name.split(".")
    if (
        not DOMAIN.fullmatch(name)
        or _NUMBER.fullmatch(labels[-1])
        or len(name) > _LONGEST_NAME
        or max(map(len, labels)) > _LONGEST_LABEL
    ):
        raise ValueError(f"{entry!r} is neither an address, a range of addresses nor a domain name")
    return entry.lower()
