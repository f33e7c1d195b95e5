"""What an address is, and which a name may lead to (attack 13)."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.egress.addresses import Address, Kind, judge, literal, plain
from broker.egress.errors import BadRequestError
from broker.egress.rules import Destination, Facts, Rules, canonical, refusal

SPECIAL = (
    "0.0.0.0",  # noqa: S104 - an address that must be refused
    "0.1.2.3",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
    "169.254.170.2",
    "168.63.129.16",
    "192.0.0.192",
    "192.0.0.1",
    "100.100.100.200",
    "192.0.2.1",
    "198.18.0.1",
    "203.0.113.9",
    "224.0.0.1",
    "239.255.255.250",
    "255.255.255.255",
    "240.0.0.1",
    "::",
    "::1",
    "::127.0.0.1",
    "::8.8.8.8",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:0.0.0.0",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b::8.8.8.8",
    "64:ff9b:1::1",
    "64:ff9b:1:ffff::a9fe:a9fe",
    "2002:a9fe:a9fe::",
    "2002:808:808::1",
    "2001::1",
    "2001:db8::1",
    "fd00:ec2::254",
    "fe80::1",
    "fec0::1",
    "feff::1",
    "ff02::1",
    "ff0e::1",
    "4000::1",
    "100::1",
)
PRIVATE = ("10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1", "fd12::1", "::ffff:10.0.0.1")
PUBLIC = ("8.8.8.8", "1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:4700::1", "::ffff:8.8.8.8", "192.0.1.1")


@pytest.mark.parametrize("text", SPECIAL)
def test_attack_13_no_name_and_no_policy_leads_to_a_special_address(text: str) -> None:
    """Metadata, loopback, link-local, multicast and embedded addresses are refused for names, whatever policy names."""
    address = plain(ip_address(text))
    assert judge(address)[0] is Kind.SPECIAL
    spelt = Destination(str(address), 80)
    name = Destination("api.example.com", 80)
    everything = Rules(frozenset({name}), named=frozenset({name, spelt}))
    assert refusal(name, address, everything, Facts()) != ""
    assert refusal(spelt, address, Rules(frozenset({spelt})), Facts()) != ""
    assert refusal(spelt, address, Rules(frozenset({spelt}), named=frozenset({name})), Facts()) != ""


@pytest.mark.parametrize("text", SPECIAL)
def test_a_special_address_is_reached_if_grant_and_policy_name_it(text: str) -> None:
    """Named by grant and policy alike, an address may be connected to, unless Ringfence itself is served there."""
    spelt = Destination(str(plain(ip_address(text))), 80)
    rules = Rules(frozenset({spelt}), named=frozenset({spelt}))
    assert refusal(spelt, plain(ip_address(text)), rules, Facts()) == ""
    assert refusal(spelt, plain(ip_address(text)), rules, Facts(never=True)) != ""


@pytest.mark.parametrize("text", PRIVATE)
def test_a_private_address_needs_the_policy_s_word(text: str) -> None:
    """A name may lead to a private address only if policy names that address and port."""
    address = plain(ip_address(text))
    name = Destination("db.internal", 5432)
    rules = Rules(frozenset({name}), named=frozenset({name}))
    assert judge(address)[0] is Kind.PRIVATE
    assert "must name that address" in refusal(name, address, rules, Facts())
    other = Rules(rules.granted, named=frozenset({Destination(str(address), 5433)}))
    assert refusal(name, address, other, Facts()) != ""
    named = Rules(rules.granted, named=frozenset({Destination(str(address), 5432)}))
    assert refusal(name, address, named, Facts()) == ""
    # An address of this host is loopback by another name.
    assert refusal(name, address, named, Facts(own=True)) != ""


@pytest.mark.parametrize("text", PUBLIC)
def test_a_public_address_needs_nothing_more(text: str) -> None:
    """A public address is fit, unless it is one of this host."""
    name = Destination("api.example.com", 443)
    rules = Rules(frozenset({name}))
    assert refusal(name, plain(ip_address(text)), rules, Facts()) == ""
    assert "one of this host" in refusal(name, plain(ip_address(text)), rules, Facts(own=True))


def test_localhost_is_reached_only_if_policy_says_so() -> None:
    """``localhost`` leads to loopback if policy names it with its port, and to nothing else."""
    here = Destination("localhost", 80)
    asked = Rules(frozenset({here}))
    named = Rules(frozenset({here}), named=frozenset({here}))
    assert refusal(here, IPv4Address("127.0.0.1"), asked, Facts(own=True)) != ""
    assert refusal(here, IPv4Address("127.0.0.1"), named, Facts(own=True)) == ""
    assert refusal(here, IPv4Address("169.254.169.254"), named, Facts()) != ""
    assert refusal(here, IPv4Address("10.0.0.1"), named, Facts()) != ""


@given(st.ip_addresses(v=4) | st.ip_addresses(v=6))
def test_every_address_has_one_kind_and_one_form(address: Address) -> None:
    """Any address is judged; a mapped one is judged as what the kernel connects to."""
    kind, what = judge(address)
    assert what
    assert literal(str(address)) == plain(address)
    if isinstance(address, IPv4Address):
        mapped = IPv6Address(f"::ffff:{address}")
        assert judge(mapped) == (kind, what)
        for prefix in ("64:ff9b::", "::", "2002:"):
            inner = int(address)
            text = f"2002:{inner >> 16:x}:{inner & 0xFFFF:x}::" if prefix == "2002:" else f"{prefix}{address}"
            assert judge(ip_address(text))[0] is Kind.SPECIAL


@pytest.mark.parametrize(
    "host",
    [
        "2130706433",
        "0x7f.1",
        "127.1",
        "0x7f000001",
        "127.0.0.1.",
        "1.2.3.0x4",
        "a..b",
        "",
        ".",
        "-a.b",
        "a b",
        "fe80::1%lo",
    ],
)
def test_what_some_resolvers_take_for_an_address_is_no_name(host: str) -> None:
    """Numbers that inet_aton would read, empty labels and zones are refused."""
    with pytest.raises(BadRequestError):
        canonical(host, 80)


def test_a_destination_has_one_form() -> None:
    """Case, the last dot, brackets and a mapped IPv4 address make no difference."""
    assert canonical("API.Example.COM.", 443) == canonical("api.example.com", 443)
    assert canonical("[::FFFF:127.0.0.1]", 80) == canonical("127.0.0.1", 80)
    assert canonical("[2606:4700:0::1]", 80) == canonical("2606:4700::1", 80)
    with pytest.raises(BadRequestError):
        canonical("example.com", 0)
    with pytest.raises(BadRequestError):
        canonical("example.com", 65536)
