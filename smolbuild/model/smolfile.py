"""The Smolfile as frozen values.

Upstream keys (smolvm's schema) come first, smolbuild's own follow. Every value is already checked
and normalised by ``model.parse``; nothing here touches the file system.
"""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Literal

from smolbuild.core.digest import Digest
from smolbuild.core.values import dataclass

__all__ = [
    "Base",
    "CachePolicy",
    "Copy",
    "Dockerfile",
    "ExecProbe",
    "FileProbe",
    "Health",
    "HttpProbe",
    "Network",
    "Notice",
    "Policy",
    "PortProbe",
    "Probe",
    "Restart",
    "RestoreContract",
    "Scrub",
    "SecretSource",
    "Service",
    "Smolfile",
    "Step",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PortProbe:
    """Ready when a TCP connection to ``host:port`` in the guest is accepted."""

    port: int
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpProbe:
    """Ready when an HTTP GET answers with ``status`` and a body that holds ``contains``."""

    port: int
    path: str = "/"
    host: str = "127.0.0.1"
    status: int = 200
    contains: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileProbe:
    """Ready when ``path`` exists in the guest."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecProbe:
    """Ready when ``argv`` (never a shell line) exits 0 in the guest, inside the image's root."""

    argv: tuple[str, ...]


Probe = PortProbe | HttpProbe | FileProbe | ExecProbe


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The health check: a probe and upstream's retry semantics; all times in seconds.

    The check fails after ``retries`` consecutive failures; failures inside ``startup_grace`` do not
    count. One attempt may take ``timeout``, and ``interval`` passes between attempts.
    """

    probe: Probe
    interval: float = 5.0
    timeout: float = 5.0
    startup_grace: float = 0.0
    retries: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretSource:
    """Where the host finds a secret's value: exactly one field is set."""

    from_env: str | None = None
    from_file: str | None = None
    """In ``[secrets]`` absolute; in ``[smolbuild.secrets]`` it may be relative to the Smolfile."""
    from_command: tuple[str, ...] | None = None
    """An argument list, run on the host without a shell; its standard output is the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrub:
    """``[smolbuild.scrub]``: what cleans the machine before its checkpoint, and what may stay."""

    run: tuple[str, ...] | None = None
    """Commands, run as root once the services are ready; None: nothing is cleaned at all."""
    allow: tuple[str, ...] = ()
    """Keys and tokens that are no finding: ``sha256:`` fingerprints, and guest paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What the machine may reach. ``mode`` off: no network device at all."""

    mode: Literal["off", "allow", "full"] = "off"
    allow_hosts: tuple[str, ...] = ()
    """Lower-case names; each allows the host and its subdomains, as upstream has it."""
    allow_host_patterns: tuple[str, ...] = ()
    """Lower-case; a bare name is that host only, ``*.name`` its subdomains only."""
    allow_cidrs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A file or directory of the Smolfile's directory that is copied into the guest.

    ``to`` ending in ``/`` names a directory to copy into; else the exact target. With the source
    ``.`` it is always the directory that receives the content.
    """

    source: str
    """Relative, normalised, POSIX; ``.`` is the whole directory."""
    to: str
    mode: int | None = None
    """Of every file copied; None: 0644, or 0755 where the owner may execute the source."""
    owner: str | None = None
    """``user`` or ``user:group``, names or numbers; None: root."""
    key: str = field(default="", compare=False)
    """Where in the file it stands, for ``Smolfile.where``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One set-up command, run in the guest with ``sh -c`` as ``user``."""

    name: str
    run: str
    line: int = field(default=0, compare=False)
    key: str = field(default="", compare=False)
    """Where in the file it stands (``init[0]``, ``smolbuild.step[1]``), for ``Smolfile.where``."""
    inputs: tuple[str, ...] = ()
    copy: tuple[Copy, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    workdir: str | None = None
    user: str | None = None
    network: bool | tuple[str, ...] | None = None
    """None or True: as ``[network]`` says; False: none at all; a tuple: these hosts only."""
    secrets: tuple[str, ...] = ()
    timeout: float = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A process that is alive in the checkpoint, run with ``sh -c``."""

    name: str
    run: str
    line: int = field(default=0, compare=False)
    key: str = field(default="", compare=False)
    """Where in the file it stands, for ``Smolfile.where``."""
    ready: Probe | None = None
    ready_timeout: float = 120.0
    env: tuple[tuple[str, str], ...] = ()
    workdir: str | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """``[smolbuild.base]``: a Debian root made on the spot."""

    debian: str
    """Suite: ``bookworm``, for example."""
    packages: tuple[str, ...] = ()
    variant: str = "minbase"
    mirror: str | None = None
    """None: the mirror that the host's own apt configuration names for Debian."""
    snapshot: str | None = None
    """``20261101T000000Z``: what stands for ``{snapshot}`` in ``mirror``."""
    components: tuple[str, ...] = ("main",)

    @property
    def archive(self) -> str | None:
        """The mirror with the snapshot's date in it, as apt gets it."""
        if self.mirror is None or self.snapshot is None:
            return self.mirror
        return self.mirror.replace("{snapshot}", self.snapshot)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dockerfile:
    """``[smolbuild.base]``: an image that a Docker engine builds from a Dockerfile.

    Paths are relative to the Smolfile's directory, normalised, POSIX.
    """

    dockerfile: str
    target: str | None = None
    """The stage to stop at; None: the last one."""
    args: tuple[tuple[str, str], ...] = ()
    """Values for its ``ARG`` instructions, sorted by name."""
    context: str = "."
    """The directory that its ``COPY`` instructions see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreContract:
    """``[smolbuild.restore]``: what makes a fork fresh before it is handed out."""

    regenerate: tuple[str, ...] = ("machine-id", "hostname")
    """Of ``machine-id``, ``hostname``, ``ssh-host-keys``."""
    run: tuple[str, ...] = ()
    hold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """``[smolbuild.policy]``."""

    max_age: float | None = None
    on_base_drift: Literal["rebuild", "warn", "fail"] | None = None
    """None: the lock is followed, and nobody asks whether tag and suite still name the same."""
    undeclared: Literal["warn", "fail"] = "warn"
    max_ready_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePolicy:
    """``[smolbuild.cache]``."""

    max_size: int = 20 * 1024**3
    """Bytes."""
    registry: str | None = None
    """Repository of the remote cache, ``registry.example.com/team/env``; None: there is none."""
    push: bool = False
    """Whether builds are published to the remote cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """``[restart]``, upstream's; carried along, applied by smolvm and not by smolbuild."""

    policy: Literal["never", "always", "on-failure", "unless-stopped"] = "never"
    max_retries: int = 0
    max_backoff: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something in the file that does not become part of the artifact, or deserves a loud word."""

    key: str
    line: int
    text: str
    loud: bool = False
    file: str = ""
    undeclared: bool = False
    """Whether it is about an input that comes from outside of the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Smolfile:
    """A parsed, checked Smolfile (and its sibling ``smolbuild.toml`` when there is one)."""

    path: Path
    """The file read; its directory is the context that relative paths refer to."""

    # upstream, at top level
    image: str | None = None
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None
    env: tuple[tuple[str, str], ...] = ()
    imported_env: tuple[str, ...] = ()
    """Bare names in ``env`` whose value comes from the host; each has a notice."""
    workdir: str | None = None
    user: str | None = None
    cpus: int = 4
    memory: int = 8192
    """MiB."""
    storage: int = 20
    """GiB; parsed for compatibility."""
    overlay: int = 10
    """GiB: the size of the root disk."""
    ports: tuple[tuple[int, int], ...] = ()
    """(host, guest); of a fork's host, not of the artifact."""
    volumes: tuple[str, ...] = ()
    network: Network = Network()
    ca_files: tuple[str, ...] = ()
    """Paths of PEM files of this host, as given: certificates that the guest trusts."""
    health: Health | None = None
    restart: Restart = Restart()
    secrets: Mapping[str, SecretSource] = field(default_factory=dict)
    """By name; a name that only a step uses comes from the host variable of that name."""
    platform: str | None = None
    """``[artifact] oci_platform``: ``linux/amd64``, for example; None: the host's."""

    # smolbuild's own
    name: str | None = None
    use_dev: bool = False
    resume: Literal["memory", "disk"] = "memory"
    """What the step cache keeps after each step."""
    kernel: str | None = None
    """Path of a kernel image the user gives; None: Debian's cloud kernel."""
    base: Base | Dockerfile | None = None
    copy: tuple[Copy, ...] = ()
    steps: tuple[Step, ...] = ()
    """``init`` entries first (named ``init-1`` …), then ``[[smolbuild.step]]`` in file order."""
    services: tuple[Service, ...] = ()
    restore: RestoreContract = RestoreContract()
    policy: Policy = Policy()
    cache: CachePolicy = CachePolicy()
    scrub: Scrub = Scrub()

    sources: tuple[tuple[str, Digest], ...] = field(default=(), compare=False)
    """Name and digest of the file, and of its sibling when there is one."""
    sibling: Path | None = field(default=None, compare=False)
    """The ``smolbuild.toml`` that holds the ``[smolbuild]`` part, when there is one."""
    positions: Mapping[str, int] = field(default_factory=dict, compare=False)
    """1-based line of each key, by dotted path (``env``, ``smolbuild.step[1].run``)."""
    notices: tuple[Notice, ...] = field(default=(), compare=False)

    def where(self, key: str) -> tuple[str, int]:
        """Return the file that holds ``key`` and its line there; 0 when the line is not known."""
        ours = self.sibling is not None and key.split(".", 1)[0] == "smolbuild"
        return str(self.sibling if ours else self.path), self.positions.get(key, 0)

    @property
    def kernel_path(self) -> Path | None:
        """Where the kernel is that the user gives, absolute; None: Debian's is used."""
        return None if self.kernel is None else (self.path.parent / self.kernel).absolute()

    @property
    def guarded(self) -> bool:
        """Whether freed memory must be zeroed: a step is given secrets, or the machine scrubbed."""
        return self.scrub.run is not None or any(step.secrets for step in self.steps)

    def network_of(self, step: Step) -> Network:
        """Return what ``step`` may reach: its own ``network`` on top of ``[network]``."""
        if step.network is False:
            return Network()
        if isinstance(step.network, tuple):
            return Network(mode="allow", allow_hosts=step.network)
        return self.network
