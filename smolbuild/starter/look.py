"""Looks at a directory: what kind of project it is, how it starts, where it listens."""

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from smolbuild.core.values import dataclass
from smolbuild.starter.reading import read_start

__all__ = ["Kind", "Project", "Serves", "look_at"]

Kind = Literal["python", "node", "go", "rust", "plain"]

_PYTHON_MANIFESTS = ("pyproject.toml", "requirements.txt", "setup.py")
_PYTHON_LOCKS = ("uv.lock", "poetry.lock", "Pipfile.lock", "pdm.lock")
_NODE_LOCKS = ("package-lock.json", "yarn.lock", "pnpm-lock.yaml")
_PYTHON_STARTS = ("app.py", "main.py", "server.py", "api.py", "run.py")
_IMPORTABLE = (
    "devcontainer.json",
    ".devcontainer/devcontainer.json",
    ".devcontainer.json",
    "Dockerfile",
)
_PORT = re.compile(
    r"(?:\bport\b[\"']?\s*[:=,]\s*|\blisten\(\s*|\(\s*[\"'][\d.]*[\"']\s*,\s*|--port[= ]\s*"
    r"|[\"'](?:[\d.]*|localhost):|\bPORT\b\W{1,12})(\d{4,5})\b",
    re.IGNORECASE,
)
_HEALTH_PATH = re.compile(r"[\"'](/(?:healthz?|health-check|readyz?|livez|ping|status))[\"']")
_ROOT_PATH = re.compile(r"[\"']/[\"']|http\.server|SimpleHTTP")


@dataclass(frozen=True, slots=True, kw_only=True)
class Serves:
    """Where the started program listens and a page that it answers, as far as that is evident."""

    port: int | None = None
    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """What is known of a directory without running anything in it."""

    kind: Kind
    manifests: tuple[str, ...] = ()
    """Files that say what is to be installed; relative, all there."""
    dependencies: bool = False
    """Whether anything has to be fetched from a package index."""
    modules: tuple[str, ...] = ()
    """Python packages and modules of its own."""
    source: str = ""
    """``src`` where Python packages lie below it."""
    start: str = ""
    """Command that starts it, seen from its directory; empty: none is evident."""
    serves: Serves = Serves()
    check: str = ""
    """A file of the project that must be there, for a check of last resort."""
    importable: tuple[str, ...] = ()
    """Files that `smolbuild import` reads."""


def look_at(directory: Path) -> Project:
    """Return what ``directory`` holds. Reads a few files of it, bounded; never fails on content."""
    project = _of_its_kind(directory)
    return dataclasses.replace(
        project,
        check=project.check or _first_file(directory),
        importable=tuple(name for name in _IMPORTABLE if (directory / name).is_file()),
    )


def _of_its_kind(directory: Path) -> Project:
    if any((directory / name).is_file() for name in _PYTHON_MANIFESTS):
        return _python(directory)
    if (directory / "package.json").is_file():
        return _node(directory)
    if (directory / "go.mod").is_file():
        return _go(directory)
    if (directory / "Cargo.toml").is_file():
        return _rust(directory)
    if any(directory.glob("*.py")):
        return _python(directory)
    return Project(kind="plain", start=_procfile(directory), serves=_serves(directory, ()))


def _python(directory: Path) -> Project:
    project = _toml(directory / "pyproject.toml")
    declared = project.get("project")
    table = declared if isinstance(declared, dict) else {}
    requirements = read_start(directory / "requirements.txt")
    tools = project.get("tool")
    needed = (
        bool(table.get("dependencies"))
        or (isinstance(tools, dict) and "poetry" in tools)
        or re.search(r"^\s*[^#\s]", requirements, re.MULTILINE) is not None
    )
    manifests = tuple(
        name
        for name in ("pyproject.toml", "requirements.txt", *_PYTHON_LOCKS)
        if (directory / name).is_file()
    )
    source = "src" if any((directory / "src").glob("*/__init__.py")) else ""
    start, read = _python_start(directory)
    return Project(
        kind="python",
        manifests=manifests,
        dependencies=needed,
        modules=tuple(_python_modules(directory / source if source else directory)),
        source=source,
        start=start,
        serves=_serves(directory, read),
    )


def _python_start(directory: Path) -> tuple[str, tuple[str, ...]]:
    named = _procfile(directory)
    if named:
        return named, tuple(name for name in _PYTHON_STARTS if name in named)
    for name in _PYTHON_STARTS:
        text = read_start(directory / name)
        if text and _PORT.search(text):  # a program that listens goes on; others may just end
            return f"python3 {name}", (name,)
    return "", ()


def _python_modules(directory: Path) -> Iterator[str]:
    for path in sorted(directory.iterdir()):
        if (path / "__init__.py").is_file() and path.name.isidentifier():
            if path.name not in ("tests", "test", "docs"):
                yield path.name
        elif path.suffix == ".py" and path.stem.isidentifier() and path.stem != "setup":
            text = read_start(path)
            if "__main__" in text or not _PORT.search(text):
                yield path.stem


def _node(directory: Path) -> Project:
    try:
        value = json.loads(read_start(directory / "package.json"))
    except (ValueError, RecursionError):
        value = {}
    value = value if isinstance(value, dict) else {}
    scripts = value.get("scripts")
    scripts = scripts if isinstance(scripts, dict) else {}
    main = value.get("main") if isinstance(value.get("main"), str) else ""
    main = next(
        (n for n in (main, "server.js", "index.js", "app.js") if n and (directory / n).is_file()),
        "",
    )
    start = _procfile(directory)
    if not start and isinstance(scripts.get("start"), str):
        start = "npm start"
    if not start and main and _PORT.search(read_start(directory / main)):
        start = f"node {main}"
    return Project(
        kind="node",
        manifests=tuple(n for n in ("package.json", *_NODE_LOCKS) if (directory / n).is_file()),
        dependencies=bool(value.get("dependencies") or value.get("devDependencies")),
        start=start,
        serves=_serves(directory, (main,) if main else (), str(scripts.get("start", ""))),
        check=main,
    )


def _go(directory: Path) -> Project:
    mains = [
        p for p in ("main.go", *_names(directory, "cmd/*/main.go")) if (directory / p).is_file()
    ]
    listening = [name for name in mains if _PORT.search(read_start(directory / name))]
    return Project(
        kind="go",
        manifests=tuple(n for n in ("go.mod", "go.sum") if (directory / n).is_file()),
        dependencies="require" in read_start(directory / "go.mod"),
        start="/usr/local/bin/app" if listening else "",
        modules=tuple(mains),
        serves=_serves(directory, tuple(listening)),
    )


def _rust(directory: Path) -> Project:
    manifest = _toml(directory / "Cargo.toml")
    package = manifest.get("package")
    name = package.get("name") if isinstance(package, dict) else None
    has_main = (directory / "src" / "main.rs").is_file()
    listening = has_main and bool(_PORT.search(read_start(directory / "src" / "main.rs")))
    program = f"/app/target/release/{name}" if isinstance(name, str) and has_main else ""
    return Project(
        kind="rust",
        manifests=tuple(n for n in ("Cargo.toml", "Cargo.lock") if (directory / n).is_file()),
        dependencies=bool(manifest.get("dependencies")),
        modules=(program,) if program else (),
        start=program if listening else "",
        serves=_serves(directory, ("src/main.rs",) if listening else ()),
    )


def _serves(directory: Path, files: tuple[str, ...], more: str = "") -> Serves:
    text = "\n".join(
        [read_start(directory / "Procfile"), more, *(read_start(directory / f) for f in files)]
    )
    port = next((int(m[1]) for m in _PORT.finditer(text) if 1024 <= int(m[1]) < 65536), None)
    if port is None:
        return Serves()
    found = _HEALTH_PATH.search(text)
    return Serves(port=port, path=found[1] if found else "/" if _ROOT_PATH.search(text) else None)


def _procfile(directory: Path) -> str:
    match = re.search(r"^web:\s*(.+)$", read_start(directory / "Procfile"), re.MULTILINE)
    return match[1].strip() if match else ""


def _first_file(directory: Path) -> str:
    names = sorted(p.name for p in directory.iterdir() if p.is_file() and not p.is_symlink())
    shown = [name for name in names if not name.startswith(".") and not name.startswith("Smolfile")]
    return shown[0] if shown else ""


def _names(directory: Path, pattern: str) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.glob(pattern))


def _toml(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(read_start(path))
    except tomllib.TOMLDecodeError:
        return {}
