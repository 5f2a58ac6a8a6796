#!/usr/bin/env python3
"""Write image.tar, a small Debian container image, the way `docker save` or skopeo would.

The root comes from mmdebstrap (which uses this host's own apt configuration), the archive around it
from this script, so that neither Docker nor a registry is needed.
"""

import argparse
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

IMAGE = "examples/plain-smolvm:1"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"


def make_root(target: Path, suite: str) -> None:
    """Write a tar of a Debian root with nothing but the essential packages."""
    command = ["mmdebstrap", "--quiet", "--variant=essential", suite, str(target)]
    # The same packages give the same bytes, whenever the image is made.
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run(command, check=True, timeout=900, env=environment)


def sha256_of(path: Path) -> str:
    """Return the hex digest of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def image_config(layer_hex: str) -> bytes:
    """Return the image's configuration: what a container of it would run, and its one layer."""
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"], "Cmd": ["/bin/sh"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_hex}"]},
    }
    return json.dumps(config).encode()


def add_bytes(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a file with a fixed time and owner."""
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def add_file(archive: tarfile.TarFile, name: str, path: Path) -> None:
    """Add the content of ``path`` with a fixed time and owner."""
    entry = tarfile.TarInfo(name)
    entry.size = path.stat().st_size
    with path.open("rb") as stream:
        archive.addfile(entry, stream)


def descriptor(media_type: str, digest_hex: str, size: int) -> dict[str, object]:
    """Return an OCI descriptor."""
    return {"mediaType": media_type, "digest": f"sha256:{digest_hex}", "size": size}


def write_docker_archive(target: Path, layer: Path) -> None:
    """Write the layout of `docker save`: manifest.json, the configuration, one layer."""
    layer_hex = sha256_of(layer)
    config = image_config(layer_hex)
    config_name = hashlib.sha256(config).hexdigest() + ".json"
    layer_name = f"{layer_hex}/layer.tar"
    manifest = [{"Config": config_name, "RepoTags": [IMAGE], "Layers": [layer_name]}]
    with tarfile.open(target, "w") as archive:
        add_bytes(archive, config_name, config)
        add_file(archive, layer_name, layer)
        add_bytes(archive, "manifest.json", json.dumps(manifest).encode())


def write_oci_archive(target: Path, layer: Path) -> None:
    """Write an OCI image layout as a tar."""
    layer_hex = sha256_of(layer)
    config = image_config(layer_hex)
    config_hex = hashlib.sha256(config).hexdigest()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": descriptor(CONFIG_TYPE, config_hex, len(config)),
            "layers": [descriptor(LAYER_TYPE, layer_hex, layer.stat().st_size)],
        }
    ).encode()
    manifest_hex = hashlib.sha256(manifest).hexdigest()
    entry = descriptor(MANIFEST_TYPE, manifest_hex, len(manifest))
    entry["platform"] = {"architecture": "amd64", "os": "linux"}
    entry["annotations"] = {"org.opencontainers.image.ref.name": IMAGE.split(":")[1]}
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]}
    with tarfile.open(target, "w") as archive:
        add_bytes(archive, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        add_bytes(archive, "index.json", json.dumps(index).encode())
        add_bytes(archive, f"blobs/sha256/{config_hex}", config)
        add_bytes(archive, f"blobs/sha256/{manifest_hex}", manifest)
        add_file(archive, f"blobs/sha256/{layer_hex}", layer)


WRITERS = {"docker": write_docker_archive, "oci": write_oci_archive}


def main() -> int:
    """Make the image; a finished one is left alone unless --force is given."""
    parser = argparse.ArgumentParser(description="Write image.tar, a small Debian image.")
    parser.add_argument("target", nargs="?", type=Path, default=Path(__file__).parent / "image.tar")
    parser.add_argument("--format", choices=sorted(WRITERS), default="docker")
    parser.add_argument("--suite", default="bookworm")
    parser.add_argument("--force", action="store_true", help="replace an image that is there")
    options = parser.parse_args()
    if options.target.exists() and not options.force:
        print(f"{options.target} is there already")
        return 0
    with tempfile.TemporaryDirectory(prefix="make-image-", dir=options.target.parent) as name:
        layer, image = Path(name) / "layer.tar", Path(name) / "image.tar"
        make_root(layer, options.suite)
        WRITERS[options.format](image, layer)
        image.replace(options.target)
    print(f"wrote {options.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
