"""A good first Smolfile for each kind of project, from what was seen of it."""

from collections.abc import Mapping

from smolbuild.core.values import dataclass
from smolbuild.model.toml_text import TomlValue
from smolbuild.starter.draft import Block, Draft
from smolbuild.starter.look import Kind, Project

__all__ = ["IGNORED", "first_draft"]

_HOME = "/app"
_SUITE = "bookworm"
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

IGNORED: Mapping[Kind, tuple[str, ...]] = {
    "python": ("__pycache__/", "*.pyc", ".venv/", "venv/", ".pytest_cache/", ".mypy_cache/",
               ".ruff_cache/", "*.egg-info/", "/build/", "/dist/"),
    "node": ("node_modules/", "/dist/", "npm-debug.log*"),
    "go": ("/bin/",),
    "rust": ("/target/",),
    "plain": (),
}  # fmt: skip
"""What a first .smolbuildignore leaves out, besides editors' files and the Smolfile itself."""

_PACKAGES: Mapping[Kind, tuple[str, ...]] = {
    "python": ("python3",),
    "node": ("nodejs", "npm"),
    "go": ("golang-go", "ca-certificates"),
    "rust": ("cargo", "ca-certificates"),
    "plain": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What differs between the kinds."""

    packages: tuple[str, ...] = ()
    path: str = ""
    """Directory that goes to the front of PATH."""
    install: str = ""
    """Fetches the dependencies; needs the network."""
    build: str = ""
    """Makes something of the project's own files; needs none."""
    check: tuple[str, ...] = ()
    """A command that fails when the environment is broken."""
    why: str = ""
    """What the check finds out."""


def first_draft(project: Project, *, name: str, hosts: tuple[str, ...]) -> Draft:
    """Return the draft of a first Smolfile for ``project``.

    Args:
        project: what was seen.
        name: of the artifact.
        hosts: of the package index that this host is configured to use; none: not known, and the
            step that needs it is written as a comment.

    """
    parts = _parts(project)
    off = not hosts
    env = ["PYTHONUNBUFFERED=1"] if project.kind == "python" else []
    if parts.path:
        env.append(f"PATH={parts.path}:{_DEFAULT_PATH}")
    top: dict[str, TomlValue] = {"cpus": 2, "memory": 1024, "overlay": 4, "workdir": _HOME}
    network = None
    if parts.install:
        network = Block(
            values={"allow_hosts": list(hosts) or ["packages.example.com"]},
            comment="The package index that this host uses; nothing else can be reached."
            if hosts
            else "The dependencies come from a package index, and this host's configuration names "
            "none: write its hosts here, and take the # away here and at the step below.",
            off=off,
        )
    return Draft(
        header=f"Written by `smolbuild init`: {_SEEN[project.kind]}. Every key is explained in "
        "Smolfile.example.\n`smolbuild plan` says what a build would do; `smolbuild build` builds.",
        top=(
            Block(values=top, comment="The machine: MiB of memory, GiB of disk."),
            *([Block(values={"env": env})] if env else []),
        ),
        network=network,
        name=name,
        base=Block(
            values={
                "debian": _SUITE,
                "packages": [*_PACKAGES[project.kind], *parts.packages],
            },
            comment="A Debian root made on the spot. `smolbuild lock` pins each package.",
        ),
        steps=tuple(_steps(project, parts, off=off)),
        services=tuple(_services(project)),
        health=_health(project, parts),
    )


_SEEN: Mapping[Kind, str] = {
    "python": "a Python project",
    "node": "a Node.js project",
    "go": "a Go module",
    "rust": "a Rust package",
    "plain": "no project of a kind that it knows, so its files are copied as they are",
}


def _parts(project: Project) -> _Parts:
    match project.kind:
        case "python":
            return _python(project)
        case "node":
            return _node(project)
        case "go":
            return _go(project)
        case "rust":
            return _rust(project)
        case _:
            return _plain(project)


def _python(project: Project) -> _Parts:
    install = ""
    if project.dependencies:
        requirements = "requirements.txt" in project.manifests
        what = "-r requirements.txt" if requirements else "."
        install = f"python3 -m venv /opt/venv\n/opt/venv/bin/pip install --no-cache-dir {what}\n"
    code = f"import sys; sys.path.insert(0, '{_HOME}/{project.source}'.rstrip('/'))"
    modules = project.modules[:3]
    check: tuple[str, ...]
    if modules:
        check = ("python3", "-c", f"{code}; import {', '.join(modules)}")
        why = "Importing what the project is made of fails when a file or a dependency is missing."
    else:
        check = ("python3", "-m", "compileall", "-q", _HOME)
        why = "Compiling every file fails when one is damaged."
    return _Parts(
        packages=("python3-venv",) if install else (),
        path="/opt/venv/bin" if install else "",
        install=install,
        build="python3 -m compileall -q .",
        check=check,
        why=why,
    )


def _node(project: Project) -> _Parts:
    locked = "package-lock.json" in project.manifests
    install = f"npm {'ci' if locked else 'install'} --no-audit --no-fund\n"
    target = f"{_HOME}/{project.check}" if project.check else f"{_HOME}/package.json"
    parse = f"JSON.parse(require('fs').readFileSync('{_HOME}/package.json'))"
    check = ("node", "--check", target) if target.endswith(("js", "ts")) else ("node", "-e", parse)
    return _Parts(
        install=install if project.dependencies else "",
        check=check,
        why="It fails when Node.js or the program is missing or damaged. Better: the program's own "
        "check of itself.",
    )


def _go(project: Project) -> _Parts:
    package = "./" + (project.modules[0].rpartition("/")[0] or ".") if project.modules else "./..."
    build = f"GOFLAGS=-mod=mod go build -o /usr/local/bin/app {package}"
    fetch = "go mod download\n" if project.dependencies else ""
    program = bool(project.modules)
    return _Parts(
        install=fetch,
        build=build if program else "go build ./... && go vet ./...",
        check=("test", "-x", "/usr/local/bin/app") if program else ("go", "version"),
        why="It fails when the program was not built. Better: a flag of it that does something.",
    )


def _rust(project: Project) -> _Parts:
    locked = " --locked" if "Cargo.lock" in project.manifests else ""
    program = project.modules[0] if project.modules else ""
    return _Parts(
        install=f"cargo fetch{locked}\n" if project.dependencies else "",
        build=f"cargo build --release --offline{locked}",
        check=("test", "-x", program) if program else ("test", "-d", f"{_HOME}/target/release"),
        why="It fails when the program was not built. Better: a flag of it that does something.",
    )


def _plain(project: Project) -> _Parts:
    target = f"{_HOME}/{project.check}" if project.check else f"{_HOME}/installed"
    return _Parts(
        build="" if project.check else "date --utc > installed",
        check=("test", "-s", target),
        why="It fails when the files did not arrive. Better: a command that uses them.",
    )


def _steps(project: Project, parts: _Parts, *, off: bool) -> list[Block]:
    steps = []
    manifests: list[TomlValue] = [{"from": name, "to": f"{_HOME}/"} for name in project.manifests]
    if parts.install:
        whole = parts.install.rstrip().endswith(" .")  # it installs the project itself
        values: dict[str, TomlValue] = {"name": "dependencies", "run": f"set -eu\n{parts.install}"}
        values["copy"] = [{"from": ".", "to": _HOME}] if whole else manifests
        steps.append(
            Block(
                values=values,
                comment="Runs again only when these files change, and not for every edit of the "
                "source. The steps before a change come from the cache.",
                off=off,
            )
        )
    if project.check or project.manifests:
        values = {"name": "files", "run": parts.build or "true"}
        values["copy"] = [{"from": ".", "to": _HOME}]
        needs_index = parts.build and parts.install and project.kind in ("go", "rust")
        if not needs_index:
            values["network"] = False
        steps.append(
            Block(
                values=values,
                comment="The project itself, without what .smolbuildignore names.",
                off=bool(needs_index and off),
            )
        )
    elif parts.build:
        values = {"name": "first", "run": parts.build, "network": False}
        steps.append(Block(values=values, comment="What has to be done once goes into steps."))
    return steps


def _services(project: Project) -> list[Block]:
    if not project.start:
        return []
    values: dict[str, TomlValue] = {
        "name": "main",
        "run": f"exec {project.start}",
        "workdir": _HOME,
    }
    comment = "Alive in the checkpoint: a fork of the machine has it running already."
    if project.serves.port is not None:
        values["ready"] = {"port": project.serves.port}
    return [Block(values=values, comment=comment)]


def _health(project: Project, parts: _Parts) -> Block:
    times: dict[str, TomlValue] = {"interval": "500ms", "timeout": "10s", "retries": 20}
    serves = project.serves
    if project.start and serves.port is not None and serves.path is not None:
        return Block(
            values={"http": {"port": serves.port, "path": serves.path}, **times},
            comment="A page must answer with status 200; `contains` can demand a word of it.",
        )
    return Block(values={"exec": list(parts.check), **times}, comment=parts.why)
