"""Translates a Dockerfile of one stage into a Smolfile: image, steps, copies, environment, health.

What a Smolfile has no words for is named, never silently dropped. The order is kept: what is copied
before a RUN becomes that step's own copy, so that the same edits run the same steps again.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path

from smolbuild.core.errors import UsageError
from smolbuild.core.values import dataclass
from smolbuild.model.keys import USER
from smolbuild.model.toml_text import TomlValue
from smolbuild.starter.dockerfile import (
    Instruction,
    expand,
    parse_dockerfile,
    read_list,
    split_words,
)
from smolbuild.starter.draft import Block, Draft

__all__ = ["keep_dockerfile", "translate_dockerfile"]

_SHELL = ("/bin/sh", "-c")
_GO_UNITS = {"h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
_MACHINE = Block(
    values={"cpus": 2, "memory": 1024, "overlay": 4}, comment="MiB of memory, GiB of disk."
)
_PORT_ONLY = (
    "That the port answers is the least there is to ask. Better: an `http` check of a page that "
    "needs all the program needs."
)


@dataclass(slots=True, kw_only=True)
class _State:
    """What the instructions so far have set."""

    context: Path
    arguments: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = ""
    user: str = ""
    shell: tuple[str, ...] = _SHELL
    image: str = ""
    copies: list[dict[str, TomlValue]] = field(default_factory=list)
    """Since the last RUN."""
    steps: list[dict[str, TomlValue]] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None
    health: Instruction | None = None
    left_out: list[str] = field(default_factory=list)

    def leave_out(self, instruction: Instruction, why: str) -> None:
        first = instruction.source.split("\n")[0][:120]
        self.left_out.append(f"line {instruction.line}: {first}: {why}")


def translate_dockerfile(text: str, *, file: str, context: Path, name: str) -> Draft:
    """Return the draft of a Smolfile that does what the Dockerfile does.

    Args:
        text: of the Dockerfile.
        file: its name, for errors.
        context: the directory that copies are relative to; looked at for what is a directory.
        name: of the artifact.

    Raises:
        UsageError: it does not parse, has several stages, or builds on nothing.

    """
    instructions = parse_dockerfile(text, file=file)
    stages = [item for item in instructions if item.keyword == "FROM"]
    if len(stages) != 1:
        raise UsageError(
            f"{file} has {len(stages)} stages; only one of one stage can be translated",
            hint="keep it whole: `smolbuild import` without --translate makes it the base",
            code="dockerfile-stages",
        )
    state = _State(context=context)
    for instruction in instructions:
        _apply(state, instruction)
    if state.copies:  # after the last RUN
        state.steps.append({"name": "files", "run": "true", "copy": state.copies})
    if state.image in ("", "scratch"):
        raise UsageError(
            f"{file} builds on {state.image or 'an image that an argument names'}",
            hint="give ARG a default, or write the Smolfile by hand",
            code="dockerfile-base",
        )
    return _draft(state, file, name)


def keep_dockerfile(text: str, *, file: str, name: str) -> Draft:
    """Return the draft of a Smolfile whose base is what a Docker engine builds of the Dockerfile.

    The image's own configuration (command, user, environment) counts as it is; of the last stage
    the health check is taken over, which an image has no standard place for.

    Raises:
        UsageError: it does not parse, or ``file`` lies outside of the Smolfile's directory.

    """
    if file.startswith("../"):
        raise UsageError(
            f"{file} lies outside of the Smolfile's directory",
            hint="write the Smolfile into a directory that holds it: -o DIRECTORY/Smolfile",
            code="outside",
        )
    state = _State(context=Path())
    for item in parse_dockerfile(text, file=file):
        if item.keyword == "FROM":
            state = _State(context=Path())
        if item.keyword in ("ARG", "ENV", "EXPOSE", "HEALTHCHECK"):
            _apply(state, item)
    return Draft(
        header=f"The base is what a Docker engine builds of {file}. `smolbuild import --translate` "
        "makes steps of a Dockerfile of one stage, which need no Docker and are cached one by one.",
        top=(_MACHINE,),
        name=name,
        base=Block(values={"dockerfile": file}),
        health=_health_of(state.health, state.ports),
    )


def _health_of(instruction: Instruction | None, ports: list[int]) -> Block | None:
    """Return the health check of a HEALTHCHECK, or else of an exposed port; None: neither."""
    if instruction is not None and instruction.text.upper().startswith("CMD"):
        command = instruction.text[3:].strip()
        values: dict[str, TomlValue] = {
            "exec": list(read_list(command) or (*_SHELL, command)),
        }
        for flag, key in (
            ("interval", "interval"),
            ("timeout", "timeout"),
            ("start-period", "startup_grace"),
        ):
            duration = _duration(instruction.flags.get(flag, ""))
            if duration:
                values[key] = duration
        if instruction.flags.get("retries", "").isdecimal():
            values["retries"] = max(1, int(instruction.flags["retries"]))
        return Block(values=values, comment="As HEALTHCHECK says.")
    if ports:
        return Block(
            values={"port": ports[0], "retries": 20, "interval": "500ms"}, comment=_PORT_ONLY
        )
    return None


def _apply(state: _State, item: Instruction) -> None:
    handler = _HANDLERS.get(item.keyword)
    if handler is None:
        state.leave_out(item, _WHY_NOT.get(item.keyword, "a Smolfile has no such thing"))
    else:
        handler(state, item, {**state.arguments, **state.env})


def _from(state: _State, item: Instruction, _: Mapping[str, str]) -> None:
    state.image = (expand(item.text, state.arguments).split() or [""])[0]
    state.arguments.clear()  # those before FROM are not seen after it
    if "platform" in item.flags:
        state.leave_out(item, "the host's platform is built")


def _env(state: _State, item: Instruction, variables: Mapping[str, str]) -> None:
    state.env |= _pairs(item.text, variables)


def _workdir(state: _State, item: Instruction, variables: Mapping[str, str]) -> None:
    state.workdir = _join(state.workdir or "/", " ".join(split_words(item.text, variables)))


def _user(state: _State, item: Instruction, variables: Mapping[str, str]) -> None:
    user = expand(item.text, variables).strip()
    if re.fullmatch(USER, user):
        state.user = user
    else:
        state.leave_out(item, "not a user name or number")


def _expose(state: _State, item: Instruction, variables: Mapping[str, str]) -> None:
    for word in expand(item.text, variables).split():
        port, _, protocol = word.partition("/")
        if re.fullmatch("[0-9]{1,5}", port) and protocol in ("", "tcp") and 0 < int(port) < 65536:
            state.ports.append(int(port))
        else:
            state.leave_out(item, "not one TCP port")


def _cmd(state: _State, item: Instruction, _: Mapping[str, str]) -> None:
    state.cmd = _command(state, item)


def _entrypoint(state: _State, item: Instruction, _: Mapping[str, str]) -> None:
    state.entrypoint, state.cmd = _command(state, item), None


def _healthcheck(state: _State, item: Instruction, _: Mapping[str, str]) -> None:
    state.health = item


def _shell(state: _State, item: Instruction, _: Mapping[str, str]) -> None:
    state.shell = read_list(item.text) or _SHELL


def _argument(state: _State, item: Instruction, variables: Mapping[str, str]) -> None:
    for word in split_words(item.text, variables):
        name, equals, value = word.partition("=")
        if equals:
            state.arguments[name] = value
        else:
            state.leave_out(item, "it has no default: write the value where it is used")


def _run(state: _State, item: Instruction, _: Mapping[str, str]) -> None:
    for flag in item.flags:
        state.leave_out(item, f"--{flag} is not kept, the command is")
    command = _step_command(state, item)
    if command is None:
        return
    step: dict[str, TomlValue] = {"name": f"run-{len(state.steps) + 1}", "run": command}
    if state.copies:
        step["copy"] = list(state.copies)
        state.copies.clear()
    here = {**state.arguments, **state.env}
    if here:
        step["env"] = [f"{name}={value}" for name, value in here.items()]
    if state.workdir:
        step["workdir"] = state.workdir
    if state.user:
        step["user"] = state.user
    state.steps.append(step)


def _step_command(state: _State, item: Instruction) -> str | None:
    """Return what a step runs for a RUN; None: it cannot be said, and that was noted."""
    listed = read_list(item.text)
    if listed is not None:
        return shlex.join(listed)
    command = item.script
    if item.heredocs:
        command = item.heredocs[0]
        if re.fullmatch(r"<<-?[\"']?\w+[\"']?", item.text) is None:
            state.leave_out(item, "a here-document inside of a command")
            return None
        if command.startswith("#!"):
            state.leave_out(item, "a here-document with a #! line is a program: copy it in as one")
            return None
    if not command.strip() or "\0" in command:
        state.leave_out(item, "there is no command")
        return None
    return command if state.shell == _SHELL else shlex.join([*state.shell, command])


def _copy(state: _State, item: Instruction, variables: Mapping[str, str]) -> None:
    listed = read_list(item.text)
    words = list(listed) if listed is not None else split_words(item.text, variables)
    problem = _why_not_copied(item, words)
    if problem:
        state.leave_out(item, problem)
        return
    *sources, target = words
    for source in sources:
        plain = source.lstrip("/").removeprefix("./").rstrip("/") or "."
        to = _join(state.workdir or "/", target)
        if (state.context / plain).is_dir():
            to = to.rstrip("/") or "/"  # Docker copies what is in a directory, not the directory
        elif target.endswith(("/", ".")) or len(sources) > 1:
            to = to.rstrip("/") + "/"
        copy: dict[str, TomlValue] = {"from": plain, "to": to}
        if re.fullmatch("0?[0-7]{3,4}", item.flags.get("chmod", "")):
            copy["mode"] = item.flags["chmod"].rjust(4, "0")
        if re.fullmatch(USER, item.flags.get("chown", "")):
            copy["owner"] = item.flags["chown"]
        state.copies.append(copy)


def _why_not_copied(item: Instruction, words: list[str]) -> str:
    if "from" in item.flags:
        return "it copies from another image"
    if item.heredocs:
        return "a here-document: write it to a file"
    if len(words) < 2:
        return "source or target is missing"
    for source in words[:-1]:
        if any(char in source for char in "*?["):
            return "patterns are not supported: name directories or files"
        if ".." in source.split("/"):
            return "it lies outside of the directory"
        if item.keyword == "ADD" and ("://" in source or source.startswith("git@")):
            return "fetch it in a step, with `allow_hosts` for its host"
        if item.keyword == "ADD" and re.search(r"\.(tar|tgz|tbz2?|txz)(\.\w+)?$", source):
            return "copy the archive and unpack it in a step"
    return ""


def _command(state: _State, item: Instruction) -> tuple[str, ...]:
    listed = read_list(item.text)
    return listed if listed is not None else (*state.shell, item.text)


def _pairs(text: str, variables: Mapping[str, str]) -> dict[str, str]:
    words = split_words(text, variables)
    if words and "=" not in words[0]:  # the old form: one name, the rest is the value
        name, _, value = text.partition(" ")
        return {name: expand(value.strip(), variables)}
    return {name: value for name, equals, value in (w.partition("=") for w in words) if equals}


def _join(workdir: str, path: str) -> str:
    joined = path if path.startswith("/") else f"{workdir.rstrip('/')}/{path}"
    parts = [part for part in joined.split("/") if part not in ("", ".")]
    return "/" + "/".join(parts) + ("/" if path.endswith("/") and parts else "")


def _duration(text: str) -> str:
    """Return a Go duration (``1m30s``) as a Smolfile's, or nothing when it is none."""
    parts = re.findall(r"([0-9.]+)(ms|h|m|s)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return ""
    try:
        total = round(sum(float(number) * _GO_UNITS[unit] for number, unit in parts))
    except ValueError:
        return ""
    return f"{total // 1000}s" if total % 1000 == 0 else f"{total}ms"


_Handler = Callable[[_State, Instruction, Mapping[str, str]], None]
_HANDLERS: Mapping[str, _Handler] = {
    "FROM": _from,
    "ARG": _argument,
    "ENV": _env,
    "WORKDIR": _workdir,
    "USER": _user,
    "RUN": _run,
    "COPY": _copy,
    "ADD": _copy,
    "EXPOSE": _expose,
    "CMD": _cmd,
    "ENTRYPOINT": _entrypoint,
    "HEALTHCHECK": _healthcheck,
    "SHELL": _shell,
}
_WHY_NOT = {
    "LABEL": "an artifact has a name and a key tree, and no labels",
    "MAINTAINER": "an artifact has a name and a key tree, and no labels",
    "VOLUME": "what lies there is part of the artifact's disk",
}


def _draft(state: _State, file: str, name: str) -> Draft:
    top: dict[str, TomlValue] = {"image": state.image}
    if state.entrypoint is not None:
        top["entrypoint"] = list(state.entrypoint)
    if state.cmd is not None:
        top["cmd"] = list(state.cmd)
    if state.env:
        top["env"] = [f"{variable}={value}" for variable, value in state.env.items()]
    if state.workdir:
        top["workdir"] = state.workdir
    if state.user:
        top["user"] = state.user
    health = _health_of(state.health, state.ports)
    return Draft(
        header=f"Translated from {file} by `smolbuild import`: a start, to be read before it is "
        "trusted.",
        top=(
            Block(values=top),
            _MACHINE,
        ),
        network=Block(
            comment="Without these lines the machine has no network at all. Name the hosts that "
            "the steps fetch from (package mirrors, package indexes) and take the # away.",
            values={"allow_hosts": ["packages.example.com"]},
            off=True,
        ),
        name=name,
        steps=tuple(Block(values=_own(step, top)) for step in state.steps),
        health=health,
        left_out=tuple(state.left_out),
    )


def _own(step: dict[str, TomlValue], top: Mapping[str, TomlValue]) -> dict[str, TomlValue]:
    """Return the step without the variables that it has from the top level anyway."""
    shared, own = top.get("env", []), step.get("env", [])
    if isinstance(shared, list) and isinstance(own, list):
        step["env"] = [pair for pair in own if pair not in shared]
    return {key: value for key, value in step.items() if value != []}
