"""What a machine with an allow-list may reach, and how its programs learn of the way out."""

import ipaddress

from smolbuild.machine.base import Machine
from smolbuild.model.smolfile import Network

__all__ = ["let_through", "proxy_env"]

_PROXY = "http://127.0.0.1:3128"
_LOCAL = "127.0.0.1,localhost,::1"


def let_through(machine: Machine, network: Network) -> None:
    """Open the machine's egress for what ``network`` allows; anything but an allow-list closes it.

    A full network has a device of its own and needs nothing here. Idempotent.
    """
    if network.mode != "allow":
        machine.allow(None)
        return
    subdomains = tuple(f"*.{host}" for host in network.allow_hosts if not _is_address(host))
    machine.allow(
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
