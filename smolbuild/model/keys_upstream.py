"""The keys of smolvm's Smolfile, with its types, defaults and rules (crate ``smolvm-smolfile``)."""

from collections.abc import Mapping

from smolbuild.model.keys import GUEST_PATH, USER, Key, Kind, Shape

__all__ = ["UPSTREAM"]

_U32 = 2**32 - 1
_RUN = "Not part of the artifact, and not yet applied by `smolbuild run`."
_SMOLVM = "Not part of the artifact; smolvm's own."
_PORT_PATTERN = r" *[0-9]{1,5}(-[0-9]{1,5})?(:[0-9]{1,5}(-[0-9]{1,5})?)? *"
_VOLUME_PATTERN = r"[^:\x00]+:/[^:\x00]*(:(ro|rw|staged))?"
_USER_WORDS = "a user name or uid, with an optional :group"


def _text(about: str, pattern: str = r"[^\x00]*", expected: str = "") -> Key:
    return Key(kind=Kind.TEXT, about=about, pattern=pattern, expected=expected)


def _texts(about: str, pattern: str = r"[^\x00]*", expected: str = "") -> Key:
    return Key(kind=Kind.TEXTS, about=about, pattern=pattern, expected=expected, default=[])


def _flag(about: str) -> Key:
    return Key(kind=Kind.FLAG, about=about, default=False)


def _duration(about: str, default: str) -> Key:
    return Key(kind=Kind.DURATION, about=about, default=default)


def _table(about: str, shape: str) -> Key:
    return Key(kind=Kind.TABLE, about=about, shape=shape)


_WORKDIR = _text("Working directory in the guest.", GUEST_PATH, "an absolute path in the guest")
_CPUS = Key(kind=Kind.INTEGER, about="Number of virtual CPUs.", default=4, low=1, high=255)
_MEMORY = Key(kind=Kind.INTEGER, about="Memory in MiB.", default=8192, low=64, high=_U32)
_ENTRYPOINT = _texts("Program and its fixed arguments; replaces the image's ENTRYPOINT.")
_CMD = _texts("Arguments after the entrypoint; replaces the image's CMD.")
_ENV = _texts("Variables as `KEY=VALUE`; a bare `KEY` takes the host's value, with a notice.")
_PORTS = _texts(
    f"Ports `HOST:GUEST`, `PORT`, or ranges of equal length. {_RUN}",
    _PORT_PATTERN,
    'ports such as "8080", "8080:80" or "5173-5180:5173-5180"',
)
_VOLUMES = _texts(
    f"Host directories `HOST:GUEST[:ro|rw|staged]`. {_RUN}",
    _VOLUME_PATTERN,
    'a volume such as "./src:/app" or "./src:/app:ro", with an absolute path in the guest',
)
_INIT = _texts("Set-up commands, each run once with `sh -c` as root: the build's first steps.")
_DEV_ONLY = "Used with `smolbuild.use_dev = true` only."
_BRANCH = _table(f"Branchable launch and its capacity. {_SMOLVM}", "branch")
_ARTIFACT = _table("Overrides for the artifact.", "artifact")

_ROOT: Shape = {
    "image": _text(
        "Base image: a registry reference, `docker-daemon:NAME`, or a path starting with `/`, "
        "`./` or `../` of an archive, an OCI layout or an unpacked root.",
        r"[^\s\x00]+",
        "an image reference or path without spaces",
    ),
    "entrypoint": _ENTRYPOINT,
    "cmd": _CMD,
    "env": _ENV,
    "workdir": _WORKDIR,
    "user": _text("User that services and commands run as.", USER, _USER_WORDS),
    "cpus": _CPUS,
    "memory": _MEMORY,
    "storage": Key(
        kind=Kind.INTEGER,
        about="Size of smolvm's data disk in GiB; smolbuild's machine has one disk, see `overlay`.",
        default=20,
        low=1,
        high=1 << 20,
    ),
    "overlay": Key(
        kind=Kind.INTEGER, about="Size of the root disk in GiB.", default=10, low=1, high=1 << 14
    ),
    "net": _flag("Outbound network. A non-empty `[network]` turns it on."),
    "net_backend": Key(
        kind=Kind.TEXT, about=f"Network backend. {_SMOLVM}", choices=("tsi", "virtio-net")
    ),
    "block_io": Key(
        kind=Kind.TEXT, about=f"Host block I/O engine. {_SMOLVM}", choices=("sync", "async")
    ),
    "gpu": _flag(f"GPU through virtio-gpu. {_SMOLVM}"),
    "gpu_vram": Key(
        kind=Kind.INTEGER, about=f"GPU memory in MiB. {_SMOLVM}", default=4096, low=1, high=_U32
    ),
    "cuda": _flag(f"The host's NVIDIA GPU over vsock. {_SMOLVM}"),
    "auto_graph": _flag(f"CUDA graphs; implies `cuda`. {_SMOLVM}"),
    "rosetta": _flag(f"Rosetta 2 on Apple hosts. {_SMOLVM}"),
    "docker_socket": _flag(f"The guest's Docker socket on the host. {_SMOLVM}"),
    "stop_on_exit": _flag(f"Stop the machine when its workload ends. {_SMOLVM}"),
    "ports": _PORTS,
    "volumes": _VOLUMES,
    "init": _INIT,
    "dev": _table(f"Local development profile. {_DEV_ONLY}", "dev"),
    "artifact": _ARTIFACT,
    "pack": _table("Another name of `[artifact]`, which wins when both are there.", "artifact"),
    "network": _table("What the machine may reach.", "network"),
    "branch": _BRANCH,
    "fork": _table("Another name of `[branch]`; both at once is an error.", "branch"),
    "health": _table("Health check; the artifact is published only when it passes.", "health"),
    "restart": _table(f"Restart policy. {_SMOLVM}", "restart"),
    "auth": _table(f"Credential forwarding. {_SMOLVM}", "auth"),
    "service": _table(f"Deployment metadata. {_SMOLVM}", "service"),
    "secrets": Key(
        kind=Kind.TABLE_OF_TABLES,
        about="Where the host finds secrets, by name. Values never enter an artifact or its key.",
        shape="secret",
    ),
}

UPSTREAM: Mapping[str, Shape] = {
    "root": _ROOT,
    "dev": {
        "volumes": _VOLUMES,
        "env": _texts(f"Variables appended to `env`. {_DEV_ONLY}"),
        "init": _texts(f"Replaces `init` when not empty. {_DEV_ONLY}"),
        "workdir": _WORKDIR,
        "user": _text(f"Replaces `user`. {_DEV_ONLY}", USER, _USER_WORDS),
        "ports": _PORTS,
    },
    "artifact": {
        "cpus": _CPUS,
        "memory": _MEMORY,
        "entrypoint": _ENTRYPOINT,
        "cmd": _CMD,
        "oci_platform": _text(
            "Platform of the base image, `linux/amd64` for example.",
            r"linux/[a-z0-9_]+(/[a-z0-9]+)?",
            "a platform such as linux/amd64",
        ),
    },
    "network": {
        "allow_hosts": _texts("Host names; each allows its subdomains too."),
        "allow_host_patterns": _texts("Exact host names, or `*.name` for the subdomains only."),
        "allow_cidrs": _texts("Address ranges; a bare address is a range of one."),
        "ca_files": _texts(
            "PEM files of this host whose certificates the guest trusts besides its own."
        ),
        "credentials": Key(
            kind=Kind.TABLES, about=f"Credential substitution. {_SMOLVM}", shape="credential"
        ),
    },
    "credential": {
        "name": Key(kind=Kind.TEXT, about="Name of the binding.", required=True),
        "environment_variable": Key(
            kind=Kind.TEXT, about="Guest variable that receives the placeholder.", required=True
        ),
        "allowed_hosts": Key(
            kind=Kind.TEXTS, about="Hosts that the credential may be sent to.", required=True
        ),
        "methods": _texts("HTTP methods that may carry it; empty: all."),
    },
    "branch": {
        "enabled": _flag("Start as a copy-on-write branch source."),
        "pool_size": Key(
            kind=Kind.INTEGER, about="Planned children; needs `cuda`.", low=1, high=_U32
        ),
        "cuda_vram_limit_mib": Key(
            kind=Kind.INTEGER, about="Memory limit for each, in MiB; needs `pool_size`.", low=1
        ),
    },
    "health": {
        "exec": _texts("Command, as an argument list, run inside the image's root; 0 is healthy."),
        "interval": _duration("Time between attempts.", "5s"),
        "timeout": _duration("Time that one attempt may take.", "5s"),
        "startup_grace": _duration("Failures in this first time do not count.", "0s"),
        "retries": Key(
            kind=Kind.INTEGER,
            about="Failures in a row that make it unhealthy.",
            default=3,
            low=1,
            high=_U32,
        ),
    },
    "restart": {
        "policy": Key(
            kind=Kind.TEXT,
            about="When smolvm restarts the machine.",
            default="never",
            choices=("never", "always", "on-failure", "unless-stopped"),
            any_case=True,
        ),
        "max_retries": Key(
            kind=Kind.INTEGER, about="Restarts at most; 0: no limit.", default=0, high=_U32
        ),
        "max_backoff": _duration("Longest time between restarts, at most 300 s.", "300s"),
    },
    "auth": {"ssh_agent": _flag("Forward the host's SSH agent.")},
    "service": {
        "port": Key(kind=Kind.INTEGER, about="Port of the service.", high=65535),
        "protocol": _text("`http` or `tcp`; smolvm does not check it."),
        "listen": Key(kind=Kind.INTEGER, about="Another name of `port`.", high=65535),
    },
    "secret": {
        "from_env": _text("Host variable that holds the value.", r"[^=\x00]+", "a variable's name"),
        "from_file": _text("Host file that holds the value.", r"/[^\x00]*", "an absolute path"),
    },
}
"""Shapes of smolvm's tables by name; ``root`` is the top level."""
