"""Which addresses a webhook may be delivered to.

Asked of the address that is about to be connected to, after DNS: a name proves nothing, and may
answer otherwise the next time.
"""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# Special by the registries of IANA, whatever the release of Python has in its own lists.
# Source: https://www.iana.org/assignments/iana-ipv4-special-registry, ...ipv6-special-registry
_SPECIAL = tuple(
    ip_network(text)
    for text in (
        *("0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.0.2.0/24", "198.18.0.0/15"),
        *("198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4", "64:ff9b:1::/48", "100::/64"),
        *("2001:2::/48", "2001:db8::/32", "3fff::/20", "5f00::/16", "fec0::/10"),
    )
)
# Public by its number, but answered by the cloud's own platform: Azure's metadata and DNS.
_PLATFORM = frozenset({ip_address("168.63.129.16")})
# Prefixes whose last 32 bits are the IPv4 address that a translator connects to.
_TRANSLATED = (
    ip_network("64:ff9b::/96"),  # NAT64, RFC 6052: ipaddress calls it global
    ip_network("::/96"),  # IPv4-compatible, RFC 4291, deprecated
    ip_network("::ffff:0:0:0/96"),  # SIIT, RFC 2765
)


def parse_networks(text: str) -> tuple[Network, ...]:
    """Networks in CIDR notation, separated by commas. Errors: ValueError."""
    return tuple(ip_network(part.strip()) for part in text.split(",") if part.strip())


def is_allowed(address: str, allowed: Sequence[Network] = ()) -> bool:
    """Whether this literal address is of the public internet, or inside one of `allowed`.

    Every IPv4 address that an IPv6 form stands for is judged as well: the form must not open what
    the address itself does not.
    """
    forms = _forms(ip_address(address.partition("%")[0]))
    return all(_public(form) or any(form in network for network in allowed) for form in forms)


def _forms(address: Address) -> list[Address]:
    """The IPv4 addresses hidden in an IPv6 one, and it itself where it is a place of its own."""
    if isinstance(address, IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    for network in _TRANSLATED:
        # :: and ::1 are the unspecified address and the loopback, not IPv4 addresses.
        if address in network and int(address) > 1:
            return [IPv4Address(int(address) & 0xFFFF_FFFF)]
    if address.sixtofour is not None:
        return [address, address.sixtofour]
    if address.teredo is not None:
        return [address, *address.teredo]
    return [address]


def _public(address: Address) -> bool:
    """Global unicast: not private, loopback, link-local, shared, multicast or reserved."""
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and address not in _PLATFORM
        and not any(address in network for network in _SPECIAL)
    )
