"""From a Smolfile's text to its values: every problem of the file at once, each with its line."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from smolbuild.core.digest import Digest, digest_bytes
from smolbuild.core.errors import Problem, SmolfileError, UsageError
from smolbuild.core.values import dataclass
from smolbuild.model.parse_smolbuild import Ours, read_smolbuild
from smolbuild.model.parse_upstream import Upstream, read_upstream
from smolbuild.model.positions import NestingError, scan_positions
from smolbuild.model.smolfile import Notice, SecretSource, Smolfile, Step
from smolbuild.model.tables import Report, Table

__all__ = ["parse_smolfile", "parse_text", "sibling_path"]

MAX_BYTES = 1024 * 1024
_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


def sibling_path(path: Path) -> Path:
    """Return where the ``[smolbuild]`` part of ``path`` may stand on its own.

    ``smolbuild.toml`` beside ``Smolfile``, ``x.smolbuild.toml`` beside ``x.smolfile``.
    """
    if path.name == "Smolfile":
        return path.with_name("smolbuild.toml")
    return path.with_name(f"{path.name.removesuffix('.smolfile')}.smolbuild.toml")


def parse_smolfile(path: Path, *, environment: Mapping[str, str]) -> Smolfile:
    """Read and parse ``path`` and its sibling, when there is one.

    ``environment`` is the host's, for bare names in ``env``.

    Raises:
        SmolfileError: problems in the files, all of them.
        UsageError: the file is missing or cannot be read.

    """
    sibling = sibling_path(path)
    text = _read(path)
    ours = _read(sibling) if sibling.is_file() else None
    return parse_text(
        text,
        file=str(path),
        environment=environment,
        sibling=None if ours is None else (str(sibling), ours),
    )


def parse_text(
    text: str,
    *,
    file: str,
    environment: Mapping[str, str] | None = None,
    sibling: tuple[str, str] | None = None,
) -> Smolfile:
    """Parse the text of a Smolfile. Pure.

    ``sibling`` is the name and the text of its ``smolbuild.toml``.

    Raises:
        SmolfileError: problems in the text, all of them.

    """
    host = environment or {}
    problems: list[Problem] = []
    notices: list[Notice] = []
    root = _load(_Source(file, text, "root", ""), problems, notices)
    separate = None
    if sibling is not None:
        separate = _load(_Source(*sibling, "smolbuild", "smolbuild."), problems, notices)
    if root is None or (sibling is not None and separate is None):
        raise SmolfileError(_sorted(problems))
    table = root.table("smolbuild")
    if sibling is not None and root.has("smolbuild"):
        root.problem("smolbuild", f"{sibling[0]} holds the same table", "keep one of the two")
    table = separate or table
    ours = read_smolbuild(table, host)
    upstream = read_upstream(root, use_dev=ours.use_dev, environment=host)
    steps = (*_init_steps(root, upstream), *ours.steps)
    _check(root, table, upstream, ours, steps)
    if problems:
        raise SmolfileError(_sorted(problems))
    positions = dict(root.report.positions)
    if separate is not None:
        positions.update(
            {f"smolbuild.{key}": line for key, line in separate.report.positions.items()}
        )
    return _assemble(
        path=Path(file),
        sources=tuple(
            (Path(name).name, digest_bytes(content.encode()))
            for name, content in ((file, text), *([sibling] if sibling else []))
        ),
        sibling=Path(sibling[0]) if sibling else None,
        positions=positions,
        notices=tuple(dict.fromkeys(notices)),
        upstream=upstream,
        ours=ours,
        steps=steps,
    )


@dataclass(frozen=True, slots=True)
class _Source:
    file: str
    text: str
    shape: str
    prefix: str


def _read(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no {path}",
            hint="write a Smolfile, see Smolfile.example, or name another with -f",
            code="no-smolfile",
        ) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if len(data) > MAX_BYTES:  # cut off in the middle of a character, perhaps
            return data.decode(errors="replace")
        line = data.count(b"\n", 0, error.start) + 1
        raise SmolfileError(
            (Problem(file=str(path), line=line, key="", message="expected UTF-8 text"),)
        ) from error


def _load(source: _Source, problems: list[Problem], notices: list[Notice]) -> Table | None:
    """Return the root table of a document, or None after noting why there is none."""

    def problem(line: int, message: str, hint: str = "") -> None:
        problems.append(Problem(file=source.file, line=line, key="", message=message, hint=hint))

    text = source.text.removeprefix("\ufeff")
    if len(text) > MAX_BYTES:
        problem(0, f"the file has more than {MAX_BYTES:,} bytes", "copy large data in as files")
        return None
    try:
        text.encode()
        positions = scan_positions(text)
        content = tomllib.loads(text)
    except NestingError as error:
        problem(error.line, str(error))
    except UnicodeEncodeError:
        problem(0, "expected Unicode text without surrogates")
    except tomllib.TOMLDecodeError as error:
        place = _PLACE.search(str(error))
        line = int(place[1]) if place and place[1] else text.rstrip().count("\n") + 1
        problem(line, f"not valid TOML: {_PLACE.sub('', str(error))}")
    except (ValueError, RecursionError):
        # Numbers of thousands of digits, or nesting that the scanner did not follow.
        problem(0, "not usable TOML: a number is too long, or something nests too deep")
    else:
        report = Report(source.file, positions, problems, notices, source.prefix)
        return Table(report, content, "", source.shape)
    return None


def _init_steps(root: Table, upstream: Upstream) -> Iterator[Step]:
    for number, (command, key) in enumerate(upstream.init, start=1):
        yield Step(name=f"init-{number}", run=command, line=root.report.line(key), key=key)


def _check(
    root: Table, table: Table | None, upstream: Upstream, ours: Ours, steps: tuple[Step, ...]
) -> None:
    """Note problems between keys."""
    if upstream.image is not None and ours.base is not None:
        root.problem("image", "image and [smolbuild.base] are both there", "keep one of the two")
    if not root.has("image") and not (table and table.has("base")):
        root.report.problem(
            "",
            "neither image nor [smolbuild.base] is there",
            'write image = "./image.tar", or [smolbuild.base] with debian = "bookworm" '
            'or dockerfile = "Dockerfile"',
        )
    if table is None:
        return
    if upstream.health is not None and table.has("health"):
        table.problem("health", "[health] is there too", "keep one of the two")
    for name in sorted(set(upstream.secrets) & set(ours.secrets)):
        table.report.problem(
            f"{table.at('secrets')}.{name}",
            "[secrets] names it too",
            "keep one of the two",
        )
    _check_names(table, "step", tuple(step.name for step in steps), len(upstream.init))
    _check_names(table, "service", tuple(service.name for service in ours.services), 0)
    for index, step in enumerate(ours.steps):
        if step.network is True and upstream.network.mode == "off":
            table.report.problem(
                f"{table.at('step', index)}.network",
                "network = true, but the file allows no network",
                'set net = true, fill [network], or list hosts here: network = ["example.com"]',
            )


def _check_names(table: Table, kind: str, names: tuple[str, ...], first: int) -> None:
    seen: set[str] = set(names[:first])
    for index, name in enumerate(names[first:]):
        if name in seen:
            table.report.problem(
                f"{table.at(kind, index)}.name", f"there is another {kind} named {name}"
            )
        seen.add(name)


def _assemble(
    *,
    path: Path,
    sources: tuple[tuple[str, Digest], ...],
    sibling: Path | None,
    positions: Mapping[str, int],
    notices: tuple[Notice, ...],
    upstream: Upstream,
    ours: Ours,
    steps: tuple[Step, ...],
) -> Smolfile:
    named = {name for step in steps for name in step.secrets}
    implied = {name: SecretSource(from_env=name) for name in sorted(named)}
    return Smolfile(
        path=path,
        image=upstream.image,
        entrypoint=upstream.entrypoint,
        cmd=upstream.cmd,
        env=upstream.env,
        imported_env=upstream.imported_env,
        workdir=upstream.workdir,
        user=upstream.user,
        cpus=upstream.cpus,
        memory=upstream.memory,
        storage=upstream.storage,
        overlay=upstream.overlay,
        ports=upstream.ports,
        volumes=upstream.volumes,
        network=upstream.network,
        ca_files=upstream.ca_files,
        health=ours.health or upstream.health,
        restart=upstream.restart,
        secrets={**implied, **upstream.secrets, **ours.secrets},
        platform=upstream.platform,
        name=ours.name,
        use_dev=ours.use_dev,
        resume=ours.resume,
        kernel=ours.kernel,
        base=ours.base,
        copy=ours.copy,
        steps=steps,
        services=ours.services,
        restore=ours.restore,
        policy=ours.policy,
        cache=ours.cache,
        scrub=ours.scrub,
        sources=sources,
        sibling=sibling,
        positions=positions,
        notices=notices,
    )


def _sorted(problems: list[Problem]) -> tuple[Problem, ...]:
    unique = dict.fromkeys(problems)
    return tuple(sorted(unique, key=lambda problem: (problem.file, problem.line)))
