"""Putting certificates into the trust store of a guest, whatever distribution it is."""

import io
import tarfile
from collections.abc import Iterator

from smolbuild.build.authorities import AUTHORITY_DIRECTORY, Authority
from smolbuild.core.errors import BuildError
from smolbuild.machine.base import ExecRequest, Machine

__all__ = ["install_authorities"]

_STAGE = "run/smolbuild/authorities"
_MTIME = 315532800
_SECONDS = 120.0

_SCRIPT = r"""
set -eu
root=${1-}
cd "$root/run/smolbuild/authorities"
run() { if [ "$root" ]; then "$@" "$root"; else "$@"; fi >/dev/null; }
if command -v update-ca-trust >/dev/null && [ -d "$root/etc/pki/ca-trust" ]; then
    store=etc/pki/ca-trust/source/anchors update=update-ca-trust
elif [ -d "$root/etc/pki/trust/anchors" ]; then
    store=etc/pki/trust/anchors update=update-ca-certificates
else  # Debian, Ubuntu, Alpine: also where ca-certificates is installed by a later step
    store=usr/local/share/ca-certificates update=update-ca-certificates
fi
mkdir -p "$root/$store"
cp smolbuild-*.crt "$root/$store/"
bundles='etc/ssl/certs/ca-certificates.crt etc/pki/tls/certs/ca-bundle.crt etc/ssl/ca-bundle.pem
etc/ssl/cert.pem'
bundle=
if command -v $update >/dev/null; then
    run $update
else
    for file in $bundles; do
        if [ -f "$root/$file" ] && ! [ -L "$root/$file" ]; then
            cat smolbuild-*.crt >> "$root/$file"
            bundle=$file
        fi
    done
    if ! [ "$bundle" ]; then
        mkdir -p "$root/etc/ssl/certs"
        cat smolbuild-*.crt > "$root/etc/ssl/certs/ca-certificates.crt"
    fi
fi
for file in $bundles; do
    if [ -f "$root/$file" ]; then bundle=$file; break; fi
done
mkdir -p "$root/etc/smolbuild"
cat smolbuild-*.crt > "$root/etc/smolbuild/ca-files.pem"
ln -sf "/$bundle" "$root/etc/smolbuild/ca-bundle.pem"
cd "$root/"
rm -r "$root/run/smolbuild/authorities"
"""
"""With an argument it works below that directory, for tests."""


def install_authorities(machine: Machine, authorities: tuple[Authority, ...]) -> None:
    """Make the guest trust ``authorities``; once for a disk, which is nothing to do twice.

    Raises:
        BuildError: the image has no shell, or its own program for this failed.

    """
    if not authorities:
        return
    machine.put(_archive(authorities), "/", timeout=_SECONDS)
    said = bytearray()
    result = machine.exec(
        ExecRequest(argv=("/bin/sh", "-c", _SCRIPT), timeout=_SECONDS),
        lambda _, data: said.extend(data),
    )
    if result.status != 0:
        raise BuildError(
            f"the certificates of network.ca_files could not be installed in the guest (status "
            f"{result.status})",
            hint=f"they go into its trust store by /bin/sh; see {AUTHORITY_DIRECTORY} in "
            "docs/network.md",
            code="ca-files",
            details=said[-4000:].decode(errors="backslashreplace"),
        )


def _archive(authorities: tuple[Authority, ...]) -> Iterator[bytes]:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for authority in authorities:
            member = tarfile.TarInfo(f"{_STAGE}/{authority.name}")
            member.mode, member.size, member.mtime = 0o644, len(authority.pem), _MTIME
            tar.addfile(member, io.BytesIO(authority.pem))
    yield data.getvalue()
