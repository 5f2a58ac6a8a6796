"""Bases of a real Docker engine through the command: lock, plan, and one whole build."""

import json
import shutil
from pathlib import Path

import pytest

DAEMON = """\
image = "docker-daemon:{name}"
memory = 128
overlay = 1
"""

DOCKERFILE = """\
cpus = 1
memory = 128
overlay = 1

[smolbuild]
name = "test/dockerfile"

[smolbuild.base]
dockerfile = "Dockerfile"
args = { WORD = "given" }

[[smolbuild.step]]
name = "one"
run = '''
set -e
test "$(cat word)" = given
test "$WORD" = given
id > /made/id
'''
user = "web"

[smolbuild.health]
exec = ["cat", "/made/word"]
"""


@pytest.fixture
def daemon(docker_engine, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", docker_engine.host)
    return docker_engine


@pytest.fixture
def dockerfile(daemon, tmp_path) -> Path:
    daemon.make_image("cli/from")
    project = tmp_path / "project"
    project.mkdir()
    (project / "Smolfile").write_text(DOCKERFILE)
    (project / "word").write_text("unused\n")
    (project / "Dockerfile").write_text(
        "FROM cli/from\nARG WORD\nENV WORD=$WORD\nCOPY word /tmp/\n"
        "RUN mkdir /made && echo $WORD > /made/word && chmod 777 /made\nWORKDIR /made\n"
    )
    return project


def locked(project: Path) -> str:
    return (project / "Smolfile.lock").read_text()


def plan(smolbuild, project: Path, *more: str):
    return smolbuild("plan", "-C", str(project), "--json", *more)


def test_a_name_in_the_engine_is_locked_and_followed(smolbuild, daemon, tmp_path, monkeypatch):
    name = "cli/followed:v1"
    first = daemon.make_image(name, {"etc/mark": b"1"}, "ENV A=1")
    (tmp_path / "Smolfile").write_text(DAEMON.format(name=name))
    one = plan(smolbuild, tmp_path)
    assert one.status == 0, one.stderr
    assert first in locked(tmp_path)
    assert (
        plan(smolbuild, tmp_path, "--locked").document("plan")["key"]
        == (one.document("plan")["key"])
    )
    second = daemon.make_image(name, {"etc/mark": b"2"}, "ENV A=2")
    refused = plan(smolbuild, tmp_path, "--locked")
    assert refused.status == 2
    assert f"docker-daemon:{name} changed: {first} -> {second}" in refused.stderr
    assert first in locked(tmp_path)
    followed = plan(smolbuild, tmp_path)
    assert f"changed: {first} -> {second}" in followed.stderr
    assert second in locked(tmp_path)
    assert 'env = ["A=2"' in locked(tmp_path)
    assert followed.document("plan")["key"] != one.document("plan")["key"]
    # No engine answers: what is locked counts.
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")
    assert plan(smolbuild, tmp_path).document("plan")["key"] == followed.document("plan")["key"]
    (tmp_path / "Smolfile.lock").unlink()
    alone = plan(smolbuild, tmp_path)
    assert (alone.status, json.loads(alone.stdout)["error"]["code"]) == (1, "docker-engine")


def test_a_dockerfile_is_built_when_its_context_changes(smolbuild, dockerfile, monkeypatch):
    one = plan(smolbuild, dockerfile)
    assert one.status == 0, one.stderr
    assert "Successfully built" in one.stderr
    text = locked(dockerfile)
    # Unchanged: no engine is asked, and nothing of another checkout counts.
    elsewhere = dockerfile.parent / "elsewhere"
    shutil.copytree(dockerfile, elsewhere)
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")
    for project in (dockerfile, elsewhere):
        again = plan(smolbuild, project, "--locked")
        assert again.status == 0, again.stderr
        assert again.document("plan")["key"] == one.document("plan")["key"]
    (dockerfile / "word").write_text("other\n")
    assert plan(smolbuild, dockerfile).status == 1
    refused = plan(smolbuild, dockerfile, "--locked")
    assert refused.status == 2
    assert "what Dockerfile is built from changed" in refused.stderr
    assert locked(dockerfile) == text
    monkeypatch.undo()


def test_other_arguments_are_another_image(smolbuild, dockerfile):
    assert plan(smolbuild, dockerfile).status == 0
    before = locked(dockerfile)
    smolfile = dockerfile / "Smolfile"
    smolfile.write_text(smolfile.read_text().replace('WORD = "given"', 'API_TOKEN = "x"'))
    refused = plan(smolbuild, dockerfile, "--locked")
    assert refused.status == 2
    changed = plan(smolbuild, dockerfile)
    assert "does not have the image of Dockerfile as asked for" in changed.stderr
    assert "API_TOKEN looks like a secret" in changed.stdout
    assert locked(dockerfile) != before
    assert 'args = ["API_TOKEN=x"]' in locked(dockerfile)


def test_a_machine_out_of_a_dockerfile(fresh, dockerfile, daemon, monkeypatch):
    """One whole build; then the image is gone everywhere and is made again."""
    done = fresh("build", "-C", str(dockerfile), "--json")
    assert done.status == 0, done.stderr
    first = done.document("build")
    word = fresh("run", "test/dockerfile", "--", "cat", "/made/id")
    assert "uid=1000(web)" in word.stdout, word.stderr
    # The base disk is cached: a changed step needs no engine.
    image = next(i for i in daemon.client.images.list(all=True) if i.id in locked(dockerfile))
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")
    again = fresh("build", "-C", str(dockerfile), "--json")
    assert again.document("build")["key"] == first["key"]
    monkeypatch.setenv("DOCKER_HOST", daemon.host)
    # Neither disk nor image nor the engine's build cache are there any more.
    shutil.rmtree(fresh.home.cache / "base")
    daemon.client.images.remove(image.id, force=True)
    daemon.client.api.prune_builds()
    smolfile = dockerfile / "Smolfile"
    smolfile.write_text(smolfile.read_text().replace("> /made/id", "> /made/id; true"))
    refused = fresh("build", "-C", str(dockerfile), "--locked")
    assert refused.status == 2
    assert "which no engine here has, and building it again gave" in refused.stderr
    assert image.id in locked(dockerfile)
    made = fresh("build", "-C", str(dockerfile), "--json")
    assert made.status == 0, made.stderr
    assert "Dockerfile was built again" in made.stderr
    assert image.id not in locked(dockerfile)
    planned = plan(fresh, dockerfile).document("plan")
    assert planned["key"] == made.document("build")["key"]
