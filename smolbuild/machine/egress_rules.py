"""What an allow-listed machine may reach: names, patterns and networks, as pure values.

A name on the list is not enough: whoever runs its DNS could point it at the host itself. So names
are resolved on the host, and the connection goes to an address that was checked.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Self

__all__ = ["Address", "Rules", "normal_host"]

Address = IPv4Address | IPv6Address
_Network = IPv4Network | IPv6Network

_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*")
_NARROW = 8
"""Bits of a network's prefix from which on it can mean the host's own or link-local addresses."""
_NUMERIC = re.compile(r"[0-9]+|0x[0-9a-f]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """An allow-list. An empty one lets nothing through."""

    names: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()
    networks: tuple[_Network, ...] = ()

    @classmethod
    def parse(cls, hosts: Iterable[str], cidrs: Iterable[str]) -> Self:
        """Return the rules of host names, patterns (``*.example.com``), addresses and networks.

        ``*`` stands for one or more characters of a name, dots included; ``*.example.com`` does not
        match ``example.com``. A bare address among the hosts is a network of one.

        Raises:
            ValueError: an entry is neither name, pattern, address nor network.

        """
        names, patterns, networks = set(), [], [ipaddress.ip_network(cidr) for cidr in cidrs]
        for entry in hosts:
            host = entry.strip().lower().removesuffix(".")
            if "*" in host:
                if not _NAME.fullmatch(host.replace("*", "x")):
                    raise ValueError(f"{entry!r} is no host name pattern")
                parts = (re.escape(part) for part in host.split("*"))
                patterns.append(re.compile("[a-z0-9_.-]+".join(parts)))
            elif (address := _address(host)) is not None:
                networks.append(ipaddress.ip_network(address))
            elif (name := normal_host(host)) is not None:
                names.add(name)
            else:
                networks.append(ipaddress.ip_network(host))
        return cls(names=frozenset(names), patterns=tuple(patterns), networks=tuple(networks))

    def allow_name(self, host: str) -> bool:
        """Return whether the normalised ``host`` is named by the list."""
        return host in self.names or any(pattern.fullmatch(host) for pattern in self.patterns)

    def allow_address(self, address: Address) -> bool:
        """Return whether a network of the list holds ``address``."""
        plain = _plain(address)
        return any(
            plain in network for network in self.networks if network.version == plain.version
        )

    def may_ask(self, host: str) -> bool:
        """Return whether ``host`` may be asked for at all: decided before anything is resolved.

        A name that is not on the list is not even looked up, for what it says would get out that
        way; but where every address is allowed, there is nothing to keep in.
        """
        address = _address(host)
        if address is not None:
            return self.allow_address(address)
        return self.allow_name(host) or any(network.prefixlen == 0 for network in self.networks)

    def choose(
        self, host: str, addresses: Iterable[Address], *, own: frozenset[Address]
    ) -> tuple[Address, ...]:
        """Return the addresses of ``host`` that may be connected to, in their order.

        Args:
            host: normalised name or address that the guest asked for.
            addresses: what it resolves to.
            own: those of them that belong to this host.

        """
        named = self.allow_name(host)
        return tuple(
            address
            for address in addresses
            if (
                self._names(address)
                if address in own or _special(_plain(address))
                else named or self.allow_address(address)
            )
        )

    def _names(self, address: Address) -> bool:
        """Return whether a network of the list means this very address, not just all there are."""
        plain = _plain(address)
        return any(
            plain in network and network.prefixlen >= _NARROW
            for network in self.networks
            if network.version == plain.version
        )


def normal_host(text: str) -> str | None:
    """Return the host part of a target in the one form that is compared, or None if it is none.

    Lower case, no trailing dot, addresses in canonical form without brackets. Names that some
    resolver would read as an address (``127.1``, ``0x7f000001``) are refused.
    """
    host = text.lower().removesuffix(".")
    if host.startswith("[") and host.endswith("]"):
        address = _address(host[1:-1])
        return str(address) if address is not None and address.version == 6 else None
    address = _address(host)
    if address is not None:
        return str(address)
    if not _NAME.fullmatch(host) or _NUMERIC.fullmatch(host.rpartition(".")[2]):
        return None
    return host


def _address(text: str) -> Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return None if isinstance(address, IPv6Address) and address.scope_id else address


def _plain(address: Address) -> Address:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped if mapped is not None else address


def _special(address: Address) -> bool:
    return (
        address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or (address.is_reserved and address.version == 4)
    )
