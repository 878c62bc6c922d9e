"""Which names and addresses a list of allowed hosts admits."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rl_harness.errors import Unsupported
from rl_harness.sandboxes.allowlist import EVERY_PUBLIC_HOST
from rl_harness.sandboxes.allowlist.hosts import AllowedHosts, is_public


@pytest.mark.parametrize(
    ("entries", "name", "admitted"),
    [
        (["example.org"], "example.org", True),
        (["Example.ORG"], "example.org", True),
        (["example.org"], "www.example.org", False),
        (["example.org"], "example.org.evil.net", False),
        (["example.org"], "notexample.org", False),
        (["*.example.org"], "www.example.org", True),
        (["*.example.org"], "a.b.example.org", True),
        (["*.example.org"], "example.org", False),
        (["*.example.org"], "wwwexample.org", False),
        (["127.0.0.0/8"], "localhost", False),
        ([], "example.org", False),
        (EVERY_PUBLIC_HOST, "example.org", True),
    ],
)
def test_a_name_is_on_the_list_or_below_a_wildcard(entries: list[str], name: str, admitted: bool) -> None:
    assert AllowedHosts(entries).names(name) is admitted


@pytest.mark.parametrize(
    ("entries", "address", "named", "admitted"),
    [
        (["8.8.8.0/24"], "8.8.8.8", False, True),
        (["8.8.8.8"], "8.8.4.4", False, False),
        (["example.org"], "8.8.8.8", False, False),
        (["example.org"], "8.8.8.8", True, True),
        (["2600:1234::/32"], "2600:1234::1", False, True),
        (["example.org"], "2600::1", True, True),
        # A listed name that leads to this network, to this machine or to where clouds keep keys.
        (["example.org"], "10.0.0.1", True, False),
        (["example.org"], "127.0.0.1", True, False),
        (["example.org"], "::1", True, False),
        (["example.org"], "::ffff:127.0.0.1", True, False),
        (["example.org"], "64:ff9b::7f00:1", True, False),
        (["example.org"], "2002:7f00:1::", True, False),
        (["example.org"], "fd00::1", True, False),
        (["example.org"], "0.0.0.0", True, False),
        (["example.org"], "169.254.169.254", True, False),
        (["example.org"], "168.63.129.16", True, False),
        (["example.org"], "224.0.0.1", True, False),
        (["example.org", "10.0.0.0/8"], "10.0.0.1", True, True),
        # An entry must mean the private range, not only contain it.
        (["10.0.0.1"], "10.0.0.1", False, True),
        (["10.0.0.1"], "::ffff:10.0.0.1", False, True),
        (["::ffff:10.0.0.0/104"], "10.0.0.1", False, True),
        (["127.0.0.2"], "127.0.0.2", False, True),
        (["127.0.0.2"], "127.0.0.1", False, False),
        (["fd12::/16"], "fd12::1", False, True),
        (["0.0.0.0/0"], "10.0.0.1", False, False),
        (["0.0.0.0/0"], "8.8.8.8", False, True),
        (["8.0.0.0/5"], "10.0.0.1", False, False),
        (["::/0"], "::1", False, False),
        # Never.
        (["100.64.0.0/10"], "100.100.100.200", False, False),
        (["0.0.0.0/0"], "169.254.169.254", False, False),
        (["0.0.0.0/0"], "0.0.0.0", False, False),
        (["fd00::/8"], "fd00:ec2::254", False, False),
        (EVERY_PUBLIC_HOST, "8.8.8.8", False, True),
        (EVERY_PUBLIC_HOST, "192.168.1.1", True, False),
        (EVERY_PUBLIC_HOST, "127.0.0.1", False, False),
    ],
)
def test_an_address_is_admitted_if_it_is_listed_or_public_and_a_listed_name_leads_there(
    entries: list[str], address: str, named: bool, admitted: bool
) -> None:
    assert AllowedHosts(entries).admits(ipaddress.ip_address(address), named=named) is admitted


@pytest.mark.parametrize(
    "entry",
    [
        "example.com:443",
        "http://example.com",
        "a b",
        "",
        "2130706433",
        "0x7f.1",
        "10.1",
        "1.2.3.4.5",
        "010.0.0.1",
        "a" * 64 + ".org",
        "a." * 127 + "org",
        "fe80::1%eth0",
        "[::1]",
        "169.254.169.254",
        "169.254.0.0/16",
        "0.0.0.0",
        "fe80::/64",
    ],
)
def test_what_is_no_host_and_what_nothing_may_reach_is_refused(entry: str) -> None:
    with pytest.raises(Unsupported, match="allowed_hosts"):
        AllowedHosts([entry])


@given(st.ip_addresses())
def test_nothing_is_public_that_python_knows_to_be_private(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    if address.is_loopback or address.is_link_local or address.is_multicast or address.is_unspecified:
        assert not is_public(address)
    if is_public(address) and address not in ipaddress.ip_network(
        "192.0.0.0/24" if address.version == 4 else "2001::/23"
    ):
        assert address.is_global


@given(st.text("abcxyz019.-*:/_[]%", max_size=24))
def test_whatever_is_taken_for_a_name_is_no_address_to_the_resolver(entry: str) -> None:
    """inet_aton reads 0x7f.1 and 2130706433 as addresses; a list of names must not hold such."""
    try:
        AllowedHosts([entry])
        ipaddress.ip_network(entry, strict=False)
    except Unsupported:
        return
    except ValueError:
        with pytest.raises(OSError, match="illegal"):
            socket.inet_aton(entry.removeprefix("*."))
