"""Which hosts a list of allowed hosts admits, and at which addresses: a name says nothing about where it leads."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from rl_harness.errors import Unsupported
from rl_harness.hosts import FORMS, Range, parse

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

#: The one entry of a list that admits every public host. No task can write it.
EVERY_PUBLIC_HOST = ("*",)

#: Reached under no policy: where clouds keep the credentials of this machine, and what is no host at all.
_NEVER = tuple(
    ipaddress.ip_network(each)
    for each in (
        "0.0.0.0/8",
        "100.100.100.192/27",
        "168.63.129.16/32",
        "169.254.0.0/16",
        "192.0.0.192/32",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "::/128",
        "fd00:ec2::/32",
        "fd20:ce::/32",
        "fe80::/10",
        "ff00::/8",
    )
)
#: Not public: reached only where an entry lies within one of them, so that it must have been meant.
_SPECIAL = tuple(
    ipaddress.ip_network(each)
    for each in (
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "::1/128",
        "64:ff9b:1::/48",
        "100::/64",
        "2001::/23",
        "2001:db8::/32",
        "2002::/16",
        "3fff::/20",
        "5f00::/16",
        "fc00::/7",
        "fec0::/10",
    )
)
_GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class AllowedHosts:
    """Raises ``Unsupported`` for an entry that is no host, or one that nothing may reach."""

    def __init__(self, entries: Iterable[str]) -> None:
        self.entries = tuple(entries)
        self._every = self.entries == EVERY_PUBLIC_HOST
        self._names: set[str] = set()
        self._below: set[str] = set()
        self._ranges: list[Range] = []
        for entry in () if self._every else self.entries:
            self._add(entry)

    def _add(self, entry: str) -> None:
        try:
            host = parse(entry)
        except ValueError:
            raise Unsupported(f"allowed_hosts: {entry!r}: an allow-list takes {FORMS}") from None
        if not isinstance(host, str):
            host = _meant_range(host)
            if any(_within(host, never) for never in _NEVER):
                raise Unsupported(
                    f"allowed_hosts: {entry!r}: addresses of metadata services, link-local and multicast addresses are "
                    "reached under no policy"
                )
            self._ranges.append(host)
        elif host.startswith("*."):
            self._below.add(host.removeprefix("*."))
        else:
            self._names.add(host)

    def names(self, host: str) -> bool:
        """Whether a lower-case domain name is on the list."""
        labels = host.split(".")
        return (
            self._every
            or host in self._names
            or any(".".join(labels[n:]) in self._below for n in range(1, len(labels)))
        )

    def admits(self, address: Address, *, named: bool) -> bool:
        """Whether ``address`` may be connected to; ``named``: a name on the list led there."""
        address = _meant(address)
        if any(address in never for never in _NEVER):
            return False
        ranges = [each for each in self._ranges if address in each]
        if is_public(address):
            return named or self._every or bool(ranges)
        return any(_within(each, special) for each in ranges for special in _SPECIAL)


def is_public(address: Address) -> bool:
    """Whether it is one of the internet's hosts."""
    if any(address in special for special in (*_NEVER, *_SPECIAL)):
        return False
    return address.version == 4 or address in _GLOBAL_IPV6


def _meant(address: Address) -> Address:
    """The address of version 4 that one of version 6 stands for, where it does."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _meant_range(host: Range) -> Range:
    if isinstance(host, ipaddress.IPv6Network) and host.subnet_of(_MAPPED):
        return ipaddress.IPv4Network((int(host.network_address) & 0xFFFFFFFF, host.prefixlen - 96))
    return host


def _within(inner: Range, outer: Range) -> bool:
    if isinstance(inner, ipaddress.IPv4Network):
        return isinstance(outer, ipaddress.IPv4Network) and inner.subnet_of(outer)
    return isinstance(outer, ipaddress.IPv6Network) and inner.subnet_of(outer)
