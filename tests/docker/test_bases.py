"""Bases of a real Docker engine, without a machine: identity, lock, disk, and what goes wrong."""

import dataclasses
import gc
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from smolbuild.core.errors import BuildError, HostError, UsageError, VerificationError
from smolbuild.core.events import Output, Transfer, silent
from smolbuild.model.lock import Lock
from smolbuild.model.lock_file import encode_lock, parse_lock
from smolbuild.model.smolfile import Dockerfile, Smolfile
from smolbuild.source.base_disk import has_base, prepare_base
from smolbuild.source.base_identity import base_identity
from smolbuild.source.base_lock import resolve_base
from smolbuild.source.docker_client import DockerClient
from smolbuild.source.docker_context import collect_context
from smolbuild.source.engine_image import open_saved
from smolbuild.source.ext4_reader import open_disk

# The docker package leaves a socket open when nobody answers; see forget_sockets.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

NOWHERE = {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}


@pytest.fixture
def docker(docker_engine):
    client = DockerClient(docker_engine.environment())
    yield client
    client.close()


@pytest.fixture
def nobody():
    """Give a client of an engine that is not there."""
    yield DockerClient(NOWHERE)
    forget_sockets()


def forget_sockets() -> None:
    """Collect the sockets that the docker package leaves open when nobody answers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def project(tmp_path) -> Path:
    directory = tmp_path / "project"
    directory.mkdir()
    return directory


def smolfile(project: Path, image: str | None = None, **base: object) -> Smolfile:
    return Smolfile(
        path=project / "Smolfile",
        image=image,
        overlay=1,
        base=Dockerfile(**base) if base else None,
    )


def lock_of(smolfile, docker, cache, emit=silent) -> Lock:
    found = resolve_base(smolfile, cache=cache, fetcher=None, docker=docker, emit=emit)
    lock = Lock(image=found.image, dockerfile=found.dockerfile)
    assert parse_lock(encode_lock(lock), file="Smolfile.lock") == lock
    return lock


def content_of(disk: Path) -> dict[str, bytes]:
    with open_disk(disk) as opened:
        tree = opened.tree()
        return {
            os.fsdecode(path): node.content.read(0, node.content.size)
            for path, node in tree.walk()
            if node.content.size
        }


def test_an_image_of_the_engine_becomes_a_disk_and_needs_the_engine_once(
    docker_engine, docker, nobody, project, tmp_path
):
    changes = (
        "ENV A=b C=",
        "WORKDIR /tmp",
        "USER web",
        'ENTRYPOINT ["/bin/sh"]',
        'CMD ["-c", "x"]',
    )
    image = docker_engine.make_image("bases/held:v1", {"etc/mark": b"one"}, *changes)
    asked, cache = smolfile(project, "docker-daemon:bases/held:v1"), tmp_path / "cache"
    cache.mkdir()
    lock = lock_of(asked, docker, cache)
    assert lock.image.platform_digest == lock.image.digest == image
    assert dict(lock.image.run.env).items() >= {"A": "b", "C": ""}.items()
    assert lock.image.run.user == "web"
    events: list[object] = []
    world = {"cache": cache, "fetcher": None}
    disk = prepare_base(asked, lock, **world, docker=docker, emit=events.append)
    assert disk.image_digest == image
    assert (disk.config.workdir, disk.config.user) == ("/tmp", "web")
    assert (disk.config.entrypoint, disk.config.cmd) == (("/bin/sh",), ("-c", "x"))
    assert content_of(disk.path)["etc/mark"] == b"one"
    assert any(isinstance(event, Transfer) for event in events)
    # The same again, and no engine answers: the lock and the cached disk are enough.
    assert prepare_base(asked, lock, **world, docker=nobody, emit=silent) == disk
    assert has_base(image, 1 << 30, cache=cache)
    with pytest.raises(HostError, match="no Docker engine answers") as caught:
        prepare_base(
            dataclasses.replace(asked, overlay=2), lock, **world, docker=nobody, emit=silent
        )
    assert "DOCKER_HOST" in caught.value.hint


def test_a_name_that_moved_is_another_base(docker_engine, docker, project, tmp_path):
    first = docker_engine.make_image("bases/moved", {"etc/mark": b"one"})
    asked = smolfile(project, "docker-daemon:bases/moved")
    lock = lock_of(asked, docker, tmp_path)
    second = docker_engine.make_image("bases/moved", {"etc/mark": b"two"})
    found = base_identity(asked, lock, cache=tmp_path, fetcher=None, docker=docker)
    assert (lock.image.digest, found.digest) == (first, second)
    # By its ID the first one is still there.
    pinned = smolfile(project, f"docker-daemon:{first}")
    assert lock_of(pinned, docker, tmp_path).image.digest == first


def test_what_the_engine_does_not_have(docker, nobody, project, tmp_path):
    asked = smolfile(project, "docker-daemon:bases/nothing:v9")
    with pytest.raises(UsageError, match="has no image bases/nothing:v9") as caught:
        lock_of(asked, docker, tmp_path)
    assert "docker pull bases/nothing:v9" in caught.value.hint
    with pytest.raises(HostError, match="no Docker engine answers"):
        lock_of(asked, nobody, tmp_path)


def test_a_socket_that_this_user_may_not_use(monkeypatch):
    import docker as package

    def refused(**_):
        raise package.errors.DockerException(
            "Error while fetching server API version: ('Connection aborted.', "
            "PermissionError(13, 'Permission denied'))"
        )

    monkeypatch.setattr(package, "from_env", refused)
    with pytest.raises(HostError, match="may not talk to the Docker engine") as caught:
        DockerClient({}).image("x")
    assert "group" in caught.value.hint


def test_the_engine_of_the_current_context_is_used(docker_engine, tmp_path, monkeypatch):
    """As `docker context use` leaves it, without DOCKER_HOST."""
    import hashlib
    import json

    name = hashlib.sha256(b"elsewhere").hexdigest()
    meta = tmp_path / "contexts" / "meta" / name
    meta.mkdir(parents=True)
    endpoints = {"docker": {"Host": docker_engine.host, "SkipTLSVerify": False}}
    meta.joinpath("meta.json").write_text(
        json.dumps({"Name": "elsewhere", "Metadata": {}, "Endpoints": endpoints})
    )
    (tmp_path / "config.json").write_text(json.dumps({"currentContext": "elsewhere"}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    image = docker_engine.make_image("bases/context")
    client = DockerClient(os.environ)
    assert client.image("bases/context").id == image
    client.close()
    forget_sockets()


def test_what_is_saved_must_be_the_image(docker_engine, docker, tmp_path):
    image = docker_engine.make_image("bases/saved")
    other = docker_engine.make_image("bases/other", {"etc/mark": b"x"})

    class Lying:
        def save(self, _, into, emit):
            docker.save(other, into, emit)

    with pytest.raises(VerificationError), open_saved(image, Lying(), tmp_path, silent):
        pass
    assert list(tmp_path.iterdir()) == []


# --- Dockerfiles ---------------------------------------------------------------------------------

DOCKERFILE = """\
FROM bases/from AS first
ARG WORD=none
ENV WORD=$WORD
COPY app /app
RUN mkdir /made && echo "$WORD" > /made/word && chmod 4755 /made/word
WORKDIR /app
CMD ["/bin/sh", "-c", "true"]

FROM first AS second
RUN echo second > /made/second
"""


@pytest.fixture
def dockerfile(docker_engine, project) -> Path:
    docker_engine.make_image("bases/from")
    (project / "Dockerfile").write_text(DOCKERFILE)
    (project / "app" / "sub").mkdir(parents=True)
    (project / "app" / "main").write_text("main\n")
    (project / "app" / "sub" / "left.log").write_text("out\n")
    (project / "app" / "sub" / "kept.log").write_text("in\n")
    (project / ".dockerignore").write_text("**/*.log\n!app/sub/kept.log\n")
    return project


def test_a_dockerfile_is_built_by_the_engine(dockerfile, docker, nobody, tmp_path):
    base = {"dockerfile": "Dockerfile", "target": "first", "args": (("WORD", "given"),)}
    asked, cache, events = smolfile(dockerfile, **base), tmp_path / "cache", []
    cache.mkdir()
    lock = lock_of(asked, docker, cache, events.append)
    shown = b"".join(event.data for event in events if isinstance(event, Output)).decode()
    assert "Step 1/" in shown
    assert "Successfully built" in shown
    locked = lock.dockerfile
    assert dict(locked.run.env)["WORD"] == "given"
    assert (locked.run.workdir, locked.run.cmd) == ("/app", ("/bin/sh", "-c", "true"))
    disk = prepare_base(asked, lock, cache=cache, fetcher=None, docker=docker, emit=silent)
    assert disk.image_digest == locked.image
    found = content_of(disk.path)
    assert found["made/word"] == b"given\n"
    assert found["app/main"] == b"main\n"
    assert found["app/sub/kept.log"] == b"in\n"
    assert "app/sub/left.log" not in found
    assert "made/second" not in found, "the stage after the target was built"
    again = prepare_base(asked, lock, cache=cache, fetcher=None, docker=nobody, emit=silent)
    assert again == disk
    # The engine's own cache gives the same image again.
    assert lock_of(asked, docker, cache) == lock


def test_without_a_target_the_last_stage_counts(dockerfile, docker, tmp_path):
    lock = lock_of(smolfile(dockerfile, dockerfile="Dockerfile"), docker, tmp_path)
    disk = prepare_base(
        smolfile(dockerfile, dockerfile="Dockerfile"),
        lock, cache=tmp_path, fetcher=None, docker=docker, emit=silent,
    )  # fmt: skip
    assert content_of(disk.path)["made/second"] == b"second\n"
    assert content_of(disk.path)["made/word"] == b"none\n"


def test_a_dockerfile_outside_of_its_context(dockerfile, docker, tmp_path):
    (dockerfile / "app" / "main").rename(dockerfile / "main")
    (dockerfile / "deploy").mkdir()
    (dockerfile / "deploy" / "D").write_text("FROM bases/from\nCOPY sub /sub\n")
    asked = smolfile(dockerfile, dockerfile="deploy/D", context="app")
    lock = lock_of(asked, docker, tmp_path)
    disk = prepare_base(asked, lock, cache=tmp_path, fetcher=None, docker=docker, emit=silent)
    assert content_of(disk.path)["sub/left.log"] == b"out\n"


def test_an_instruction_that_fails_shows_its_output(dockerfile, docker, docker_engine, tmp_path):
    (dockerfile / "Dockerfile").write_text("FROM bases/from\nRUN echo so it goes; exit 7\n")
    with pytest.raises(BuildError, match="returned a non-zero code: 7") as caught:
        lock_of(smolfile(dockerfile, dockerfile="Dockerfile"), docker, tmp_path)
    assert "so it goes" in caught.value.details
    assert docker_engine.containers() == []
    (dockerfile / "Dockerfile").write_text("FROM bases/from\nNOT-AN-INSTRUCTION\n")
    with pytest.raises(BuildError, match=r"(?i)unknown instruction"):
        lock_of(smolfile(dockerfile, dockerfile="Dockerfile"), docker, tmp_path)


def test_what_is_missing_is_said_before_the_engine_is_asked(project, nobody, tmp_path):
    with pytest.raises(UsageError, match="no file Dockerfile"):
        lock_of(smolfile(project, dockerfile="Dockerfile"), nobody, tmp_path)
    (project / "Dockerfile").write_text("FROM scratch\n")
    with pytest.raises(UsageError, match="no directory src"):
        lock_of(smolfile(project, dockerfile="Dockerfile", context="src"), nobody, tmp_path)
    with pytest.raises(HostError, match="no Docker engine answers"):
        lock_of(smolfile(project, dockerfile="Dockerfile"), nobody, tmp_path)


def test_a_file_that_changes_while_it_is_sent(dockerfile, docker, tmp_path, monkeypatch):
    context = collect_context(
        smolfile(dockerfile, dockerfile="Dockerfile"), Dockerfile(dockerfile="Dockerfile")
    )
    (dockerfile / "app" / "main").write_text("MAIN\n")
    with pytest.raises(BuildError, match="app/main changed"):
        docker.build(context.tar(), dockerfile="Dockerfile", target=None, args={}, emit=silent)


_BUILDS = """\
import sys
from smolbuild.core.events import silent
from smolbuild.source.docker_client import DockerClient
from smolbuild.source.docker_context import collect_context
from smolbuild.model.smolfile import Dockerfile, Smolfile
from pathlib import Path
base = Dockerfile(dockerfile="Dockerfile")
context = collect_context(Smolfile(path=Path(sys.argv[2]) / "Smolfile", base=base), base)
client = DockerClient({"DOCKER_HOST": sys.argv[1]})
client.build(context.tar(), dockerfile="Dockerfile", target=None, args={},
             emit=lambda event: print(event, flush=True))
"""


def test_an_interrupted_build_leaves_no_container(dockerfile, docker_engine):
    (dockerfile / "Dockerfile").write_text("FROM bases/from\nRUN echo begun; sleep 1000\n")
    process = subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-c", _BUILDS, docker_engine.host,
         str(dockerfile)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert any("begun" in line and "RUN" not in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) != 0
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()
    deadline = time.monotonic() + 30
    while docker_engine.containers():
        assert time.monotonic() < deadline, "the engine goes on with it"
        time.sleep(0.1)
