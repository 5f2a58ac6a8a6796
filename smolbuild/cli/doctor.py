"""``smolbuild doctor``."""

import functools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import click

from smolbuild.cli import render
from smolbuild.cli.options import home, json_option, print_json
from smolbuild.core.errors import SmolbuildError
from smolbuild.core.home import Home
from smolbuild.core.programs import find_program
from smolbuild.guest.compile import build_agent
from smolbuild.machine.accel import choose_acceleration
from smolbuild.source.kernel_package import resolve_kernel
from smolbuild.trust.keyring import trusted_keys

__all__ = ["doctor"]

_SPACE = 8 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Check:
    name: str
    ok: bool
    needed: bool
    """Whether builds fail without it."""
    text: str
    hint: str = ""


@click.command(epilog="Example:  smolbuild doctor --json")
@json_option
def doctor(*, as_json: bool) -> int:
    """Say what this host offers and what it lacks: QEMU, acceleration, tools, kernel, space, keys.

    The exit status is 1 when something that builds need is missing.
    """
    place = home()
    with render.progress("none"):
        checks = list(_checks(place))
    status = int(any(check.needed and not check.ok for check in checks))
    if as_json:
        print_json(
            {
                "ok": status == 0,
                "home": str(place.root),
                "checks": [
                    {
                        "name": check.name,
                        "ok": check.ok,
                        "needed": check.needed,
                        "text": check.text,
                        "hint": check.hint,
                    }
                    for check in checks
                ],
            }
        )
        return status
    for check in checks:
        mark = "ok  " if check.ok else ("FAIL" if check.needed else "none")
        click.echo(f"{mark} {check.name:<13} {check.text}")
        if check.hint and not check.ok:
            click.echo(f"     {'':<13} {check.hint}")
    return status


def _checks(place: Home) -> Iterator[_Check]:
    yield _try("acceleration", lambda: _acceleration(place))
    yield _try("kernel", _kernel)
    yield _try("guest agent", lambda: f"compiled: {build_agent(place.cache).name}")
    for program, why in (
        ("mmdebstrap", "[smolbuild.base] debian = …"),
        ("dpkg-deb", "unpacking the kernel"),
        ("setpriv", "machines that die with smolbuild"),
    ):
        yield _try(program, functools.partial(_program, program, why))
    yield _space(place)
    yield _try("keys", lambda: _keys(place), needed=False)


def _try(name: str, ask: Callable[[], str], *, needed: bool = True) -> _Check:
    try:
        return _Check(name=name, ok=True, needed=needed, text=ask())
    except SmolbuildError as error:
        return _Check(name=name, ok=False, needed=needed, text=error.message, hint=error.hint)


def _acceleration(place: Home) -> str:
    found = choose_acceleration(place)
    return (
        f"QEMU {found.engine_version}, {found.accelerator}, cpu {found.cpu_model}: {found.reason}"
    )


def _kernel() -> str:
    found = resolve_kernel()
    return f"{found.package} {found.version}"


def _program(program: str, why: str) -> str:
    return f"{find_program(program)} ({why})"


def _space(place: Home) -> _Check:
    free = shutil.disk_usage(place.root).free
    return _Check(
        name="disk space",
        ok=free >= _SPACE,
        needed=False,
        text=f"{free / 2**30:.1f} GiB free in {place.root}",
        hint="8 GiB are comfortable; set SMOLBUILD_HOME to a larger disk",
    )


def _keys(place: Home) -> str:
    trusted = trusted_keys(place)
    if not trusted:
        raise SmolbuildError(
            "no keys yet", hint="the first build makes one, or run `smolbuild key generate`"
        )
    return ", ".join(key.fingerprint for key in trusted.values())
