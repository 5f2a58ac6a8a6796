"""The provenance key: one digest over everything that can change the result of a build.

A key tree is an ordered mapping of named leaves; each leaf's digest is SHA-256 over the canonical
JSON of its value under a versioned domain prefix, and the key is the digest of names and digests in
order. The tree travels with the artifact, so that a later build can say which leaf changed.

Never in a tree: time, absolute paths, host names, the user, secret values, mtimes, the order of a
directory listing. Which fields of a Smolfile stay out, and why, is in ``EXCLUDED``.
"""

from collections.abc import Iterable, Iterator, Mapping

from smolbuild.core.canon import Json
from smolbuild.core.digest import Digest, digest_value
from smolbuild.core.values import dataclass
from smolbuild.model.contract import Contract
from smolbuild.model.declared import DeclaredFiles, FileEntry
from smolbuild.model.durations import milliseconds
from smolbuild.model.keytree import KeyTree, leaf
from smolbuild.model.smolfile import (
    Copy,
    ExecProbe,
    FileProbe,
    Health,
    HttpProbe,
    Network,
    Probe,
    Scrub,
    Service,
    Smolfile,
    Step,
)

__all__ = ["EXCLUDED", "KEY_FORMAT", "KeyInputs", "build_key_tree", "provenance_key", "step_chain"]

KEY_FORMAT = 1
"""Raised whenever the same inputs must give another key."""

_KEY_DOMAIN = "smolbuild.key.v1"
_FILES_DOMAIN = "smolbuild.key.files.v1"
_CHAIN_DOMAIN = "smolbuild.key.chain.v1"

EXCLUDED: Mapping[str, str] = {
    "Smolfile.path": "where the checkout lies does not change what is built",
    "Smolfile.image": "the base digest says what the reference stood for",
    "Smolfile.platform": "it selects the base; the base digest and the architecture count",
    "Smolfile.base": "the base digest covers suite and packages, or what the Dockerfile gave",
    "Smolfile.kernel": "the kernel digest counts, not its path",
    "Smolfile.ca_files": "the certificates count, not where they lie: see KeyInputs.authorities",
    "Smolfile.imported_env": "the value counts, in env, not where it came from",
    "Smolfile.storage": "parsed for smolvm only: the machine has one disk",
    "Smolfile.ports": "about the host that runs a fork, outside of the artifact",
    "Smolfile.volumes": "about the host that runs a fork, outside of the artifact",
    "Smolfile.restart": "applied by smolvm only",
    "Smolfile.secrets": "names count in the steps that use them; sources and values never do",
    "Smolfile.name": "the same build under another name is the same build",
    "Smolfile.use_dev": "what [dev] changes counts in steps, env, user and workdir",
    "Smolfile.policy": "decides whether to build and what to accept, not what is built",
    "Smolfile.cache": "housekeeping of the host",
    "Smolfile.resume": "what the step cache keeps; the same build either way",
    "Smolfile.sources": "what they say counts, not their bytes",
    "Smolfile.sibling": "where the text stands does not change what it says",
    "Smolfile.positions": "for messages only",
    "Smolfile.notices": "for messages only",
    "Step.line": "for messages only",
    "Step.key": "for messages only",
    "Step.timeout": "decides when to give up; a step that ends in time is the same",
    "Service.line": "for messages only",
    "Service.key": "for messages only",
    "Service.ready_timeout": "decides when to give up; a service that is ready in time is the same",
    "Copy.key": "for messages only",
}
"""``Class.field`` of what is not in the key, with the reason; every other field is in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyInputs:
    """Everything a key is made of."""

    base: Digest
    """Of the resolved base: image manifest, Debian root, rootfs."""
    kernel: Digest
    initramfs: Digest
    agent: Digest
    contract: Contract
    smolfile: Smolfile
    files: DeclaredFiles
    authorities: tuple[Digest, ...] = ()
    """Of the certificates that the guest trusts besides its own."""


def build_key_tree(inputs: KeyInputs) -> KeyTree:
    """Return the key tree of ``inputs``. Pure: equal inputs give equal trees everywhere.

    Raises:
        KeyError: a source that the Smolfile declares was not collected.

    """
    return KeyTree(leaves={name: leaf(value) for name, value in _leaves(inputs)})


def provenance_key(tree: KeyTree) -> Digest:
    """Return the provenance key of ``tree``."""
    return digest_value(_KEY_DOMAIN, [[name, item.digest] for name, item in tree.leaves.items()])


def step_chain(inputs: KeyInputs) -> tuple[Digest, ...]:
    """Return the keys of the disk: after base and copies, then after each step.

    Each depends on everything that can have influenced the disk by then, and on nothing later: not
    on later steps, services, health or the restore contract. A step's name does not count here, so
    that a renamed step is not run again.
    """
    smolfile = inputs.smolfile
    contract = inputs.contract
    chain = [
        digest_value(
            _CHAIN_DOMAIN,
            {
                "format": KEY_FORMAT,
                "architecture": contract.architecture,
                "machineType": contract.machine_type,
                "cpuModel": contract.cpu_model,
                "base": inputs.base,
                "kernel": inputs.kernel,
                "initramfs": inputs.initramfs,
                "agent": inputs.agent,
                "cpus": smolfile.cpus,
                "memory": smolfile.memory,
                "overlay": smolfile.overlay,
                "env": dict(smolfile.env),
                "user": smolfile.user,
                "workdir": smolfile.workdir,
                "copies": [_copy(copy, inputs.files) for copy in smolfile.copy],
                "files": _contents(inputs.files, (copy.source for copy in smolfile.copy)),
                **({"authorities": _authorities(inputs)} if inputs.authorities else {}),
            },
        )
    ]
    for step in smolfile.steps:
        sources = (*step.inputs, *(copy.source for copy in step.copy))
        value: Json = {
            "before": chain[-1],
            "step": _step(step, smolfile, inputs.files),
            "files": _contents(inputs.files, sources),
        }
        chain.append(digest_value(_CHAIN_DOMAIN, value))
    return tuple(chain)


def _leaves(inputs: KeyInputs) -> Iterator[tuple[str, Json]]:
    smolfile, contract = inputs.smolfile, inputs.contract
    yield "format", KEY_FORMAT
    yield "architecture", contract.architecture
    yield "base", inputs.base
    yield "kernel", inputs.kernel
    yield "initramfs", inputs.initramfs
    yield "agent", inputs.agent
    yield (
        "contract",
        {
            "engine": contract.engine,
            "engineVersion": contract.engine_version,
            "machineType": contract.machine_type,
            "cpuModel": contract.cpu_model,
            "accelerator": contract.accelerator,
        },
    )
    yield (
        "machine",
        {
            "cpus": smolfile.cpus,
            "memory": smolfile.memory,
            "overlay": smolfile.overlay,
        },
    )
    yield "network", _network(smolfile.network)
    if inputs.authorities:
        yield "authorities", _authorities(inputs)
    yield "env", dict(smolfile.env)
    yield (
        "run",
        {
            "entrypoint": _list(smolfile.entrypoint),
            "cmd": _list(smolfile.cmd),
            "user": smolfile.user,
            "workdir": smolfile.workdir,
        },
    )
    for number, copy in enumerate(smolfile.copy, start=1):
        yield f"copy {number}", _copy(copy, inputs.files)
    for step in smolfile.steps:
        yield f"step {step.name}", _step(step, smolfile, inputs.files)
    for service in smolfile.services:
        yield f"service {service.name}", _service(service)
    yield "health", _health(smolfile.health)
    yield "restore", _restore(smolfile)
    if smolfile.scrub != Scrub():  # what is allowed counts, too: it is what the scan let through
        yield "scrub", {"run": _list(smolfile.scrub.run), "allow": sorted(smolfile.scrub.allow)}
    for entry in inputs.files.entries():
        yield f"file {entry.path}", entry.identity()


def _copy(copy: Copy, files: DeclaredFiles) -> Json:
    return {
        "from": copy.source,
        "to": copy.to,
        "mode": None if copy.mode is None else f"{copy.mode:04o}",
        "owner": copy.owner,
        "files": _membership(files.under(copy.source)),
    }


def _step(step: Step, smolfile: Smolfile, files: DeclaredFiles) -> Json:
    found = {entry.path: entry for source in step.inputs for entry in files.under(source)}
    return {
        "run": step.run,
        "env": dict(step.env),
        "user": step.user,
        "workdir": step.workdir,
        "network": _network(smolfile.network_of(step)),
        "secrets": sorted(set(step.secrets)),
        "inputs": sorted(set(step.inputs)),
        "copy": [_copy(copy, files) for copy in step.copy],
        "files": _membership(found.values()),
    }


def _service(service: Service) -> Json:
    return {
        "run": service.run,
        "env": dict(service.env),
        "user": service.user,
        "workdir": service.workdir,
        "ready": None if service.ready is None else _probe(service.ready),
    }


def _health(health: Health | None) -> Json:
    if health is None:
        return None
    return {
        "probe": _probe(health.probe),
        "intervalMs": milliseconds(health.interval),
        "timeoutMs": milliseconds(health.timeout),
        "startupGraceMs": milliseconds(health.startup_grace),
        "retries": health.retries,
    }


def _restore(smolfile: Smolfile) -> Json:
    restore = smolfile.restore
    return {
        "regenerate": sorted(set(restore.regenerate)),
        "run": list(restore.run),
        "hold": restore.hold,
    }


def _probe(probe: Probe) -> Json:
    match probe:
        case ExecProbe():
            return {"exec": list(probe.argv)}
        case FileProbe():
            return {"file": probe.path}
        case HttpProbe():
            return {
                "http": {
                    "host": probe.host,
                    "port": probe.port,
                    "path": probe.path,
                    "status": probe.status,
                    "contains": probe.contains,
                }
            }
        case _:
            return {"port": {"host": probe.host, "port": probe.port}}


def _network(network: Network) -> Json:
    return {
        "mode": network.mode,
        "allowHosts": sorted(set(network.allow_hosts)),
        "allowHostPatterns": sorted(set(network.allow_host_patterns)),
        "allowCidrs": sorted(set(network.allow_cidrs)),
    }


def _authorities(inputs: KeyInputs) -> Json:
    return sorted({str(digest) for digest in inputs.authorities})


def _list(texts: tuple[str, ...] | None) -> Json:
    return None if texts is None else list(texts)


def _membership(entries: Iterable[FileEntry]) -> Digest:
    """Return a digest of which paths a source covers; their contents are leaves of their own."""
    return digest_value(_FILES_DOMAIN, sorted(entry.path for entry in entries))


def _contents(files: DeclaredFiles, sources: Iterable[str]) -> Json:
    entries = {entry.path: entry for source in sources for entry in files.under(source)}
    return {path: entry.identity() for path, entry in entries.items()}
