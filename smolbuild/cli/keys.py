"""``smolbuild key generate`` and ``key show``."""

import click

from smolbuild.cli.options import home, json_option, print_json
from smolbuild.core.errors import UsageError
from smolbuild.trust.keyring import make_key, signing_key
from smolbuild.trust.keys import PublicKey, load_public_key

__all__ = ["key"]


@click.group()
def key() -> None:
    """Generate and show signing keys (ECDSA P-256)."""


@key.command(epilog="Example:  smolbuild key generate")
@click.option("--name", default="default", show_default=True, help="Name of the key.")
@json_option
def generate(name: str, *, as_json: bool) -> None:
    """Make a key pair in the state directory; an existing one is never replaced."""
    _check_name(name)
    place = home()
    _show(name, make_key(place, name), str(signing_key(place, name)), as_json=as_json)


@key.command(epilog="Example:  smolbuild key show > ci.pub")
@click.option("--name", default="default", show_default=True, help="Name of the key.")
@json_option
def show(name: str, *, as_json: bool) -> None:
    """Print the public half of a key as PEM."""
    _check_name(name)
    path = signing_key(home(), name).with_suffix(".pub")
    if not path.exists():
        raise UsageError(
            f"there is no key {name}", hint="make it with `smolbuild key generate`", code="no-key"
        )
    _show(name, load_public_key(path), str(path), as_json=as_json)


def _show(name: str, public: PublicKey, path: str, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "name": name,
                "path": path,
                "fingerprint": public.fingerprint,
                "hint": public.hint,
                "publicKey": public.pem,
            }
        )
        return
    click.echo(f"{name}: {path} ({public.fingerprint})", err=True)
    click.echo(public.pem, nl=not public.pem.endswith("\n"))


def _check_name(name: str) -> None:
    if not name.replace("-", "").replace("_", "").isalnum():
        raise UsageError(
            f"{name!r} is no name for a key", hint="use letters, digits, - and _", code="key-name"
        )
