"""What an IP address is: public, private, or one that no name may lead to. Pure.

Called by rules.py. Must never judge by Python's ``is_global`` or ``is_private``: both let metadata services and
addresses with another address inside pass (attack 13).

Source: RFC 6890 and IANA's special-purpose registries; the metadata addresses of the large clouds.
"""

from __future__ import annotations

from enum import StrEnum
from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

__all__ = ["Address", "Kind", "judge", "literal", "plain"]

Address = IPv4Address | IPv6Address


class Kind(StrEnum):
    """What a grant must say before an address is connected to.

    PUBLIC: nothing more. PRIVATE: policy names the address. SPECIAL: policy names it, and so does the grant.
    """

    PUBLIC = "public"
    PRIVATE = "private"
    SPECIAL = "special"


#: The first entry that holds an address decides.
_TABLE: Final[tuple[tuple[str, Kind, str], ...]] = (
    ("0.0.0.0/8", Kind.SPECIAL, "this host"),
    ("127.0.0.0/8", Kind.SPECIAL, "loopback"),
    ("169.254.0.0/16", Kind.SPECIAL, "link-local or a metadata service"),
    ("168.63.129.16/32", Kind.SPECIAL, "a metadata service"),
    ("100.100.100.200/32", Kind.SPECIAL, "a metadata service"),
    ("192.0.0.0/24", Kind.SPECIAL, "set aside for protocols, or a metadata service"),
    ("192.0.2.0/24", Kind.SPECIAL, "documentation"),
    ("192.88.99.0/24", Kind.SPECIAL, "a relay"),
    ("198.18.0.0/15", Kind.SPECIAL, "benchmarks"),
    ("198.51.100.0/24", Kind.SPECIAL, "documentation"),
    ("203.0.113.0/24", Kind.SPECIAL, "documentation"),
    ("224.0.0.0/4", Kind.SPECIAL, "multicast"),
    ("240.0.0.0/4", Kind.SPECIAL, "reserved or broadcast"),
    ("10.0.0.0/8", Kind.PRIVATE, "private"),
    ("100.64.0.0/10", Kind.PRIVATE, "shared inside a provider"),
    ("172.16.0.0/12", Kind.PRIVATE, "private"),
    ("192.168.0.0/16", Kind.PRIVATE, "private"),
    ("::/96", Kind.SPECIAL, "this host, loopback or an embedded IPv4 address"),
    ("64:ff9b::/96", Kind.SPECIAL, "an embedded IPv4 address"),
    ("64:ff9b:1::/48", Kind.SPECIAL, "an embedded IPv4 address"),
    ("2002::/16", Kind.SPECIAL, "an embedded IPv4 address"),
    ("2001::/23", Kind.SPECIAL, "set aside for protocols, or an embedded IPv4 address"),
    ("2001:db8::/32", Kind.SPECIAL, "documentation"),
    ("3fff::/20", Kind.SPECIAL, "documentation"),
    ("fd00:ec2::254/128", Kind.SPECIAL, "a metadata service"),
    ("fd20:ce::254/128", Kind.SPECIAL, "a metadata service"),
    ("fe80::/10", Kind.SPECIAL, "link-local"),
    ("fec0::/10", Kind.SPECIAL, "site-local"),
    ("ff00::/8", Kind.SPECIAL, "multicast"),
    ("fc00::/7", Kind.PRIVATE, "private"),
    ("2000::/3", Kind.PUBLIC, "public"),
    ("::/0", Kind.SPECIAL, "not in use"),
    ("0.0.0.0/0", Kind.PUBLIC, "public"),
)


def _network(text: str) -> IPv4Network | IPv6Network:
    return IPv6Network(text) if ":" in text else IPv4Network(text)


_NETWORKS: Final = tuple((_network(text), kind, what) for text, kind, what in _TABLE)


def literal(text: str) -> Address | None:
    """Return the address that a host part spells out, with or without brackets; None if it is a name.

    Only the full dotted form and RFC 4291's forms count. Zones (``fe80::1%eth0``) name nothing.
    """
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if "%" in inner:
        return None
    try:
        return plain(ip_address(inner))
    except (ValueError, AddressValueError):
        return None


def plain(address: Address) -> Address:
    """Return the address that the kernel connects to: an IPv4-mapped one is that IPv4 address."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def judge(address: Address) -> tuple[Kind, str]:
    """Return the kind of an address and a few words on it."""
    address = plain(address)
    for network, kind, what in _NETWORKS:
        if network.version == address.version and address in network:
            return kind, what
    return Kind.SPECIAL, "not known"
