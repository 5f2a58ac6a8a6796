"""``smolbuild push``, ``pull`` and ``verify``."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import click

from smolbuild.attempt.verify import verify_local, verify_remote
from smolbuild.build.publish import Published, publish
from smolbuild.build.pull import pull_artifact
from smolbuild.cli import render
from smolbuild.cli.options import home, json_option, print_json, progress_option
from smolbuild.core.errors import UsageError
from smolbuild.core.events import Emit, silent
from smolbuild.model.reference import Reference, parse_reference
from smolbuild.registry.client import RegistryClient, connect
from smolbuild.store.artifact import open_artifact
from smolbuild.store.layout import Store
from smolbuild.store.materialise import materialise
from smolbuild.trust.keyring import trusted_keys

__all__ = ["pull", "push", "verify"]

_KEY_OPTION = click.option(
    "--key",
    "keys",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Trust this public key instead of those in the key directory; may be repeated.",
)
_PLAIN_OPTION = click.option(
    "--plain-http", is_flag=True, help="Speak HTTP without TLS; loopback does so by itself."
)


@click.command(
    epilog="Example:  smolbuild push notes:v1 registry.example.com/team/notes:v1",
)
@click.argument("name")
@click.argument("reference", metavar="REF")
@_PLAIN_OPTION
@json_option
@progress_option
def push(name: str, reference: str, *, plain_http: bool, as_json: bool, progress: str) -> None:
    """Push the artifact NAME with its signatures to REF.

    What the registry has already is skipped; the tag moves last.
    """
    place = home()
    with render.progress(progress) as emit:
        done = push_to(Store(place.store), name, reference, emit, plain_http=plain_http)
    value = {
        "reference": str(done.reference),
        "digest": done.digest,
        "bytes_pushed": done.bytes_pushed,
    }
    if as_json:
        print_json(value)
    else:
        click.echo(f"pushed {done.reference} ({done.bytes_pushed / 1e6:.1f} MB sent)")
        click.echo(f"{done.reference.registry}/{done.reference.repository}@{done.digest}")


def push_to(
    store: Store, name: str, reference: str, emit: Emit, *, plain_http: bool = False
) -> Published:
    """Push the local artifact ``name`` to ``reference``; also serves ``build --push``."""
    target = parse_reference(reference)
    artifact = open_artifact(store, name)
    with _client(target, emit, plain_http=plain_http) as client:
        return publish(store, artifact, target, client, emit=emit)


@click.command(
    epilog="""\b
Examples:
  smolbuild pull registry.example.com/team/notes:v1
  smolbuild pull registry.example.com/team/notes@sha256:4f1e... --key ci.pub
""",
)
@click.argument("reference", metavar="REF")
@_KEY_OPTION
@_PLAIN_OPTION
@json_option
@progress_option
def pull(
    reference: str, keys: tuple[Path, ...], *, plain_http: bool, as_json: bool, progress: str
) -> None:
    """Fetch the artifact REF, verify it, and materialise it for forks.

    Signature, subject, digests and lengths are checked before anything is opened.
    """
    place = home()
    store = Store(place.store)
    source = parse_reference(reference)
    started = time.monotonic()
    with render.progress(progress) as emit:
        trusted = trusted_keys(place, keys)
        with _client(source, emit, plain_http=plain_http) as client:
            done = pull_artifact(store, source, client, trusted, emit=emit)
        files = materialise(store, done.artifact, place.materialised, emit=emit)
    value = {
        "reference": str(source),
        "digest": done.artifact.index.descriptor.digest,
        "key": done.artifact.config.key,
        "signedBy": done.signed_by.fingerprint,
        "bytes_pulled": done.bytes_pulled,
        "seconds": round(time.monotonic() - started, 3),
        "path": str(files.directory),
    }
    if as_json:
        print_json(value)
    else:
        click.echo(f"pulled {source}: {done.bytes_pulled / 1e6:.1f} MB in {value['seconds']} s")
        click.echo(f"digest {value['digest']}, signed by {value['signedBy']}")


@click.command(
    epilog="""\b
Examples:
  smolbuild verify notes:v1
  smolbuild verify registry.example.com/team/notes:v1 --key ci.pub
""",
)
@click.argument("artifact", metavar="REF|NAME")
@_KEY_OPTION
@_PLAIN_OPTION
@json_option
def verify(artifact: str, keys: tuple[Path, ...], *, plain_http: bool, as_json: bool) -> None:
    """Check signatures, digests and lengths of REF|NAME without opening it.

    A name of the local store is checked there, blob by blob; anything else in its registry.
    """
    place = home()
    store = Store(place.store)
    trusted = trusted_keys(place, keys)
    if _is_local(store, artifact):
        done = verify_local(store, artifact, trusted)
    else:
        source = parse_reference(artifact)
        with _client(source, silent, plain_http=plain_http) as client:
            done = verify_remote(source, client, trusted)
    if as_json:
        print_json(
            {
                "reference": artifact,
                "digest": done.digest,
                "signedBy": done.signed_by.fingerprint,
                "where": done.where,
                "checks": list(done.checks),
            }
        )
        return
    for check in done.checks:
        click.echo(f"ok  {check}")
    click.echo(f"{artifact} is {done.digest}, signed by {done.signed_by.fingerprint}")


def _is_local(store: Store, text: str) -> bool:
    try:
        store.resolve(text)
    except UsageError:
        return False
    return True


@contextlib.contextmanager
def _client(reference: Reference, emit: Emit, *, plain_http: bool) -> Iterator[RegistryClient]:
    plain = True if plain_http else None
    with connect(reference.registry, os.environ, plain_http=plain, emit=emit) as client:
        yield client
