"""Translates a devcontainer.json (containers.dev, "Dev Container metadata reference")."""

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from smolbuild.core.errors import UsageError
from smolbuild.core.values import dataclass
from smolbuild.model.keys import USER
from smolbuild.model.toml_text import TomlValue
from smolbuild.starter.draft import Block, Draft
from smolbuild.starter.jsonc import parse_jsonc

__all__ = ["translate_devcontainer"]

_COMMANDS = ("onCreateCommand", "updateContentCommand", "postCreateCommand")
"""Run once when a container is made, in this order."""
_TRANSLATED = {
    "name", "image", "build", "dockerFile", "context", "forwardPorts", "appPort", "containerEnv",
    "remoteEnv", "remoteUser", "containerUser", "workspaceFolder", *_COMMANDS,
}  # fmt: skip
_WHY_NOT = {
    "features": "install what they bring in a step or as Debian packages",
    "dockerComposeFile": "a Smolfile is one machine: make each program a [[smolbuild.service]]",
    "customizations": "of an editor",
    "mounts": "host directories are not part of an artifact; copy what is needed",
    "postStartCommand": "make it a [[smolbuild.service]], or `run` of [smolbuild.restore]",
    "postAttachCommand": "nobody attaches to a build",
    "initializeCommand": "it runs on the host, where a build runs nothing of yours",
    "runArgs": "options of docker run",
}
_VARIABLE = re.compile(r"\$\{(localEnv|containerEnv|[a-zA-Z]+)(?::([^}:]*)(?::([^}]*))?)?\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """The document, and what of it could not be translated."""

    value: Mapping[str, object]
    file: str
    left_out: list[str]

    def text(self, *names: str) -> str:
        for name in names:
            found = self.value.get(name)
            if isinstance(found, str) and found:
                return found
        return ""

    def leave_out(self, key: str, why: str) -> None:
        self.left_out.append(f"{key}: {why}")


def translate_devcontainer(text: str, *, file: Path, root: Path, name: str) -> Draft:
    """Return the draft of a Smolfile for the environment that ``text`` describes.

    Args:
        text: of the devcontainer.json.
        file: where it stands; paths in it are relative to that directory.
        root: the Smolfile's directory, which is what gets copied to the workspace folder.
        name: of the artifact.

    Raises:
        UsageError: not JSON, or it names no image and no Dockerfile.

    """
    reader = _Reader(value=parse_jsonc(text, file=str(file)), file=str(file), left_out=[])
    workspace = _expand(reader, "workspaceFolder", reader.text("workspaceFolder"), "")
    if not workspace.startswith("/"):
        workspace = f"/workspaces/{root.name}"
    image, base = _base(reader, file, root)
    top: dict[str, TomlValue] = {} if image is None else {"image": image}
    env = [
        f"{key}={value}"
        for key, value in _environment(reader, workspace)
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key)
    ]
    if env:
        top["env"] = env
    top["workdir"] = workspace
    user = reader.text("remoteUser", "containerUser")
    if user and re.fullmatch(USER, user):
        top["user"] = user
    else:
        user = ""
    ports = _ports(reader)
    if ports:
        top["ports"] = [str(port) for port in ports]
    for key in reader.value:
        if key not in _TRANSLATED and not key.startswith("$"):
            reader.leave_out(key, _WHY_NOT.get(key, "a Smolfile has no such thing"))
    return Draft(
        header=f"Translated from {file.name} by `smolbuild import`: a start, to be read before it "
        "is trusted.",
        top=(
            Block(values=top),
            Block(
                values={"cpus": 2, "memory": 2048, "overlay": 8},
                comment="MiB of memory, GiB of disk.",
            ),
        ),
        network=Block(
            comment="Without these lines the machine has no network at all. Name the hosts that "
            "the steps fetch from (package mirrors, package indexes) and take the # away.",
            values={"allow_hosts": ["packages.example.com"]},
            off=True,
        ),
        name=name,
        copies=Block(
            values={"copy": [_copy(workspace, user)]},
            comment="The project; .smolbuildignore names what stays out.",
        ),
        base=base,
        steps=tuple(
            Block(values=step | ({"user": user} if user else {}))
            for step in _steps(reader, workspace)
        ),
        health=Block(
            comment="A check that fails when the environment is broken: run what only works when "
            "everything is installed, then take the # away.",
            values={"exec": ["/bin/sh", "-c", f"cd {shlex.quote(workspace)} && make check"]},
            off=True,
        ),
        left_out=tuple(reader.left_out),
    )


def _copy(workspace: str, user: str) -> dict[str, TomlValue]:
    copy: dict[str, TomlValue] = {"from": ".", "to": workspace}
    return copy | ({"owner": user} if user else {})


def _base(reader: _Reader, file: Path, root: Path) -> tuple[str | None, Block | None]:
    image = reader.text("image")
    if image:
        return image, None
    build = reader.value.get("build")
    build = build if isinstance(build, dict) else {}
    dockerfile = build.get("dockerfile") or reader.text("dockerFile")
    if not isinstance(dockerfile, str) or not dockerfile:
        raise UsageError(
            f"{reader.file} names no image and no Dockerfile",
            hint="containers of a compose file cannot be imported: write a Smolfile with "
            "`smolbuild init`, and one [[smolbuild.service]] for each program",
            code="devcontainer-base",
        )
    values: dict[str, TomlValue] = {"dockerfile": _relative(file.parent / dockerfile, root)}
    context = build.get("context") or reader.text("context") or "."
    if isinstance(context, str):
        where = _relative(file.parent / context, root)
        if where != ".":
            values["context"] = where
    if isinstance(build.get("target"), str):
        values["target"] = build["target"]
    arguments = build.get("args")
    if isinstance(arguments, dict):
        values["args"] = {
            key: _expand(reader, f"build.args.{key}", value, "")
            for key, value in arguments.items()
            if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key)
        }
    for key in build:
        if key not in ("dockerfile", "context", "target", "args"):
            reader.leave_out(f"build.{key}", "the engine's own affair")
    return None, Block(
        values=values,
        comment="Built by the host's Docker engine; `smolbuild import --translate` of the "
        "Dockerfile makes steps of it.",
    )


def _relative(path: Path, root: Path) -> str:
    relative = posixpath.relpath(path.as_posix(), root.as_posix())
    if relative.startswith("../"):
        raise UsageError(
            f"{path} lies outside of {root}",
            hint="write the Smolfile into a directory that holds both: -o DIRECTORY/Smolfile",
            code="outside",
        )
    return relative


def _environment(reader: _Reader, workspace: str) -> Iterator[tuple[str, str]]:
    for member in ("containerEnv", "remoteEnv"):
        table = reader.value.get(member)
        for key, value in table.items() if isinstance(table, dict) else ():
            if isinstance(value, str):
                yield key, _expand(reader, f"{member}.{key}", value, workspace)


def _expand(reader: _Reader, key: str, text: str, workspace: str) -> str:
    """Return ``text`` with devcontainer variables replaced; what the host's would say is noted."""

    def value(match: re.Match[str]) -> str:
        if match[1] in ("containerWorkspaceFolder", "containerWorkspaceFolderBasename"):
            return workspace if match[1].endswith("Folder") else posixpath.basename(workspace)
        if match[1] == "localEnv":
            reader.leave_out(key, f"{match[0]} is a variable of the host; its default is written")
            return match[3] or ""
        if match[1] == "localWorkspaceFolderBasename":
            return posixpath.basename(workspace)
        reader.leave_out(key, f"{match[0]} is not known when the machine is built")
        return ""

    return _VARIABLE.sub(value, text)


def _ports(reader: _Reader) -> tuple[int, ...]:
    found: list[int] = []
    for member in ("forwardPorts", "appPort"):
        listed = reader.value.get(member)
        for item in listed if isinstance(listed, list) else [listed] if listed else []:
            number = str(item).rpartition(":")[2]
            if re.fullmatch("[0-9]{1,5}", number) and 0 < int(number) < 65536:
                found.append(int(number))
            else:
                reader.leave_out(member, f"{item!r} is not a port")
    return tuple(dict.fromkeys(found))


def _steps(reader: _Reader, workspace: str) -> Iterator[dict[str, TomlValue]]:
    for member in _COMMANDS:
        command = reader.value.get(member)
        named = command if isinstance(command, dict) else {"": command}
        for key, value in named.items():
            run = _command(value)
            if run is None:
                if value:
                    reader.leave_out(member, "it is not a command")
                continue
            suffix = re.sub(r"[^A-Za-z0-9_.-]+", "-", key)[:30]
            yield {
                "name": f"{member}-{suffix}" if suffix else member,
                "run": _expand(reader, member, run, workspace),
                "workdir": workspace,
            }


def _command(value: object) -> str | None:
    if isinstance(value, str) and value.strip() and "\0" not in value:
        return value
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return shlex.join(value)
    return None
