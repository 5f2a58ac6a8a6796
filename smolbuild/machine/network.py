"""What a machine with an allow-list may reach, and how its programs learn of the way out."""

import ipaddress

from smolbuild.machine.base import Machine
from smolbuild.model.smolfile import Network

__all__ = ["let_through", "proxy_env"]

_PROXY = "http://127.0.0.1:3128"
_LOCAL = "127.0.0.1,localhost,::1"


def let_through(machine: Machine, network: Network, *, within: Network) -> str:
    """Open to ``network`` a machine whose own network is ``within``. Idempotent.

    Without network, in a machine with an allow-list, what is asked for is denied and recorded; in
    one with a full network the device is cut from the outside.

    Returns what keeps an allow-list from holding for programs that know of no proxy; else empty.
    """
    if within.mode == "full":
        machine.plug(connected=network.mode == "full")
        return ""
    if network.mode != "allow":
        return machine.allow(() if within.mode == "allow" else None)
    subdomains = tuple(f"*.{host}" for host in network.allow_hosts if not _is_address(host))
    return machine.allow(
        network.allow_hosts + subdomains + network.allow_host_patterns, network.allow_cidrs
    )


def proxy_env(network: Network) -> tuple[tuple[str, str], ...]:
    """Return the variables that make programs use the guest's egress proxy, where there is one."""
    if network.mode != "allow":
        return ()
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    return (*((name, _PROXY) for name in names), ("no_proxy", _LOCAL), ("NO_PROXY", _LOCAL))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
