"""What a build asked of the network, as values: for errors, the cache, the provenance."""

from smolbuild.core.values import dataclass

__all__ = ["EgressRecord", "StepEgress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressRecord:
    """Alike requests of one machine: same host, URL and outcome."""

    host: str
    """Name or address that was asked for; ``*``: of more hosts than are told apart."""
    port: int
    """53: a name that was looked up and denied; names that are allowed leave no record."""
    url: str = ""
    """Of plain HTTP, without its query (which may hold a secret); empty where it is not visible."""
    status: int
    """Of the answer; 200 for a connection; 403: denied; 0: none yet when it was looked at."""
    sent: int = 0
    """Bytes from the guest, heads of HTTP not counted."""
    received: int = 0
    """Bytes to the guest, heads of HTTP not counted."""
    denied: bool = False
    requests: int = 1

    @property
    def target(self) -> str:
        """The URL where it is visible, else ``host:port``; a looked-up name alone."""
        if self.url or self.port == 53:
            return self.url or self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEgress(EgressRecord):
    """A record of one step of the build; ``services``: of the services and the health check."""

    step: str
