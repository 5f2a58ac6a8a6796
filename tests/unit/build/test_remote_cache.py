"""The remote cache: what is taken from it, what is refused, and two builders of one key."""

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from testing_registry import (
    FakeRegistry,
    docker_registry,
    never_answer,
    status,
)

from smolbuild.build import remote as remote_cache
from smolbuild.build.context import BuildContext, Phases
from smolbuild.build.plan import Plan
from smolbuild.build.publish import publish
from smolbuild.build.pull import pull_artifact
from smolbuild.build.remote import RemoteCache, choose_cache, has_artifact, pull_remote, share
from smolbuild.build.result import BuildResult, reuse
from smolbuild.build.sign import sign_artifact
from smolbuild.core.errors import RegistryError, UsageError
from smolbuild.core.events import Message, silent
from smolbuild.core.home import Home
from smolbuild.model.key import provenance_key
from smolbuild.model.keytree import KeyTree, leaf
from smolbuild.model.oci import INDEX_TYPE
from smolbuild.model.reference import parse_reference, parse_repository
from smolbuild.model.smolfile import CachePolicy, Policy, Smolfile
from smolbuild.registry.client import RegistryClient
from smolbuild.registry.retry import RetryPolicy, Timeouts
from smolbuild.source.docker_engine import DockerEngine
from smolbuild.source.fetcher import ImageFetcher
from smolbuild.store.layout import Store, key_name
from smolbuild.trust.keys import generate_key, load_private_key

TREE = KeyTree(leaves={"input": leaf("the same for both")})
KEY = provenance_key(TREE)
TAG = key_name(KEY)
PLAN = cast("Plan", SimpleNamespace(key=KEY, name="x", smolfile=Smolfile(path=Path("Smolfile"))))
TAG_PATH = f"/v2/team/env/manifests/{TAG}"


@pytest.fixture
def registry():
    with FakeRegistry() as running:
        yield running


@pytest.fixture
def signer(tmp_path):
    generate_key(tmp_path / "signer.pem")
    return load_private_key(tmp_path / "signer.pem")


def _unasked():
    raise AssertionError("the remote cache needs no engine")


class Builder:
    """A home of its own with one signed artifact of the key, or none."""

    def __init__(self, root: Path, signer, artifact=None, origin: Store | None = None) -> None:
        self.said: list[str] = []
        self.home = Home(root)
        (self.home.keys / "publisher.pub").write_text(signer.public.pem)
        self.store = Store(self.home.store)
        self.context = BuildContext(
            home=self.home,
            store=self.store,
            contract=_unasked,
            open_engine=_unasked,
            fetcher=cast("ImageFetcher", None),
            docker=cast("DockerEngine", None),
            environment={},
            emit=self.hear,
        )
        self.artifact = artifact
        if artifact is not None and origin is not None:
            with FakeRegistry() as between, RegistryClient(between.host) as client:
                way = parse_reference(f"{between.host}/way:{TAG}")
                publish(origin, artifact, way, client, emit=silent)
                keys = {signer.public.hint: signer.public}
                pull_artifact(self.store, way, client, keys, emit=silent)
            self.store.unname(str(way))
            self.store.name(artifact.index.descriptor, TAG, "last-x", "x:latest")

    def hear(self, event) -> None:
        if isinstance(event, Message):
            self.said.append(f"{event.level}: {event.text}")

    def pull(self, host: str) -> BuildResult | None:
        place = RemoteCache(repository=parse_repository(f"{host}/team/env"))
        return pull_remote(self.context, PLAN, place, ["x:latest"], Phases(silent))

    def share(self, host: str, **options) -> BuildResult:
        made = BuildResult(artifact=self.artifact, names=("x:latest",), origin="built")
        place = parse_repository(f"{host}/team/env")
        return share(self.context, PLAN, made, place, **options)[0]

    def named(self) -> str:
        found = {self.store.find(name).digest for name in (TAG, "last-x", "x:latest")}
        assert len(found) == 1
        return found.pop()


@pytest.fixture
def pair(packed, signer, tmp_path):
    """Give two builders, each with an artifact of the same key that the other has not."""
    made = []
    for name in ("first", "second"):
        artifact = packed.pack(name, TREE)
        sign_artifact(packed.store, artifact, signer, (), now=0)
        made.append(Builder(tmp_path / name, signer, artifact, packed.store))
    assert made[0].artifact.index.descriptor != made[1].artifact.index.descriptor
    return made


@pytest.fixture
def desk(tmp_path, signer):
    """Give a home that has nothing but the publisher's public key."""
    return Builder(tmp_path / "desk", signer)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    quick = (Timeouts(connect=0.5, read=0.5), RetryPolicy(attempts=2, base=0.01, cap=0.01))
    monkeypatch.setattr(remote_cache, "_CACHE", remote_cache._Patience(look=quick, transfer=quick))


def digest_of(artifact) -> str:
    return artifact.index.descriptor.digest


def tagged(registry: FakeRegistry) -> str:
    with RegistryClient(registry.host) as client:
        return client.get_manifest("team/env", TAG)[1].digest


# -- reading


def test_a_published_artifact_is_pulled_verified_and_named(registry, pair, desk):
    pair[0].share(registry.host)
    done = desk.pull(registry.host)
    assert done is not None
    assert (done.origin, done.reused) == ("remote", True)
    assert digest_of(done.artifact) == digest_of(pair[0].artifact) == desk.named()
    assert set(desk.store.names()) >= {TAG, "last-x", "x:latest"}
    assert not any(":5" in name or "team" in name for name in desk.store.names())
    assert desk.said == []


def test_what_is_not_there_is_no_word_worth(registry, desk):
    assert desk.pull(registry.host) is None
    assert desk.said == []
    assert has_artifact(desk.context, PLAN, RemoteCache(
        repository=parse_repository(f"{registry.host}/team/env"))) == "no"  # fmt: skip


def refused(desk: Builder, host: str) -> str:
    """Return the one warning of a pull that was not used; nothing of it may have a name."""
    assert desk.pull(host) is None
    assert not [name for name in desk.store.names() if not name.startswith("sha256-")]
    (said,) = [text for text in desk.said if f"registry {host}: trying again in" not in text]
    assert said.startswith(f"warning: the remote cache {host}/team/env is not used: ")
    return said


def test_an_unsigned_artifact_is_not_used(registry, packed, desk):
    artifact = packed.pack("x", TREE)
    for blob in (artifact.manifest.config, *artifact.manifest.layers):
        registry.add_blob("team/env", packed.store.read(blob.digest))
    with RegistryClient(registry.host) as client:
        for part, name in ((artifact.manifest, None), (artifact.index, TAG)):
            found = part.descriptor
            data = packed.store.read(found.digest)
            client.put_manifest("team/env", name or found.digest, data, found.media_type)
    assert "is not signed" in refused(desk, registry.host)


def test_a_stranger_s_artifact_is_not_used(registry, packed, desk, tmp_path):
    generate_key(tmp_path / "stranger.pem")
    artifact = packed.pack("x", TREE)
    sign_artifact(packed.store, artifact, load_private_key(tmp_path / "stranger.pem"), (), now=0)
    with RegistryClient(registry.host) as client:
        place = parse_reference(f"{registry.host}/team/env:{TAG}")
        publish(packed.store, artifact, place, client, emit=silent)
    assert "a key you do not trust" in refused(desk, registry.host)


def test_an_artifact_of_another_key_is_not_used_and_its_blobs_are_not_fetched(
    registry, packed, desk, signer
):
    other = packed.pack("x", KeyTree(leaves={"input": leaf("another")}))
    sign_artifact(packed.store, other, signer, (), now=0)
    with RegistryClient(registry.host) as client:
        place = parse_reference(f"{registry.host}/team/env:{TAG}")
        publish(packed.store, other, place, client, emit=silent)
    assert "made of other inputs" in refused(desk, registry.host)
    assert not any(desk.store.has(layer.digest) for layer in other.manifest.layers)


def test_a_config_whose_tree_is_not_of_its_key_is_not_used(registry, packed, desk, signer):
    honest = packed.pack("x", TREE)
    forged = packed.pack("x", KeyTree(leaves={"input": leaf("another")}))
    config = replace(honest.config, key_tree=forged.config.key_tree)
    artifact = packed.repack(config, honest)
    sign_artifact(packed.store, artifact, signer, (), now=0)
    with RegistryClient(registry.host) as client:
        place = parse_reference(f"{registry.host}/team/env:{TAG}")
        publish(packed.store, artifact, place, client, emit=silent)
    assert "made of other inputs" in refused(desk, registry.host)


def test_a_tampered_blob_is_not_used(registry, pair, desk):
    pair[0].share(registry.host)
    ours = [key for key in registry.blobs if key[0] == "team/env"]
    victim = max(ours, key=lambda key: len(registry.blobs[key]))
    data = bytearray(registry.blobs[victim])
    data[len(data) // 2] ^= 1
    registry.blobs[victim] = bytes(data)
    assert victim[1] in refused(desk, registry.host)


def test_a_blob_that_is_gone_is_said_and_built_anew(registry, pair, desk):
    pair[0].share(registry.host)
    layer = pair[0].artifact.manifest.layers[0]
    del registry.blobs["team/env", layer.digest]
    assert "is not complete" in refused(desk, registry.host)


@pytest.mark.parametrize("code", [401, 403, 429, 500, 503])
def test_a_registry_that_refuses_is_a_warning(registry, desk, code):
    registry.fail("*", ".*", status(code), times=100)
    assert registry.host in refused(desk, registry.host)


def test_a_registry_that_is_not_there_or_says_nothing_is_a_warning(registry, desk):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{closed.getsockname()[1]}"
        refused(desk, host)
    desk.said.clear()
    registry.fail("*", ".*", never_answer, times=100)
    refused(desk, registry.host)


def test_without_a_trusted_key_nothing_is_used(registry, pair, desk):
    pair[0].share(registry.host)
    (desk.home.keys / "publisher.pub").unlink()
    assert "no trusted keys" in refused(desk, registry.host)


def test_an_artifact_that_is_too_old_is_not_used(registry, pair, desk):
    pair[0].share(registry.host)
    day = 86400.0
    aged = cast(
        "Plan",
        SimpleNamespace(
            key=KEY,
            name="x",
            smolfile=Smolfile(path=Path("Smolfile"), policy=Policy(max_age=7 * day)),
        ),
    )
    made = 1767225600.0  # 2026-01-01
    place = RemoteCache(repository=parse_repository(f"{registry.host}/team/env"))
    for days, used in ((9, False), (6, True)):
        context = replace(desk.context, now=lambda now=made + days * day: now)
        found = pull_remote(context, aged, place, ["x:latest"], Phases(silent))
        assert (found is not None) == used
    assert "built 9 days ago, older than 7d" in desk.said[0]


# -- two builders


def test_the_first_publishes_and_the_second_adopts_without_sending_anything(registry, pair):
    first, second = pair
    assert first.share(registry.host).origin == "built"
    assert tagged(registry) == digest_of(first.artifact)
    uploads = registry.count("POST", "/blobs/uploads/")
    done = second.share(registry.host)
    assert (digest_of(done.artifact), done.origin) == (digest_of(first.artifact), "remote")
    assert second.named() == digest_of(first.artifact)
    assert registry.count("POST", "/blobs/uploads/") == uploads
    assert tagged(registry) == digest_of(first.artifact)
    assert "is used instead" in second.said[0]


def test_publishing_again_moves_nothing(registry, pair):
    pair[0].share(registry.host)
    before = registry.count("PUT", ".*")
    assert pair[0].share(registry.host).origin == "built"
    assert registry.count("PUT", ".*") == before


def test_whoever_is_overtaken_while_it_pushes_adopts(registry, pair):
    first, second = pair

    def overtake(handler):
        second.share(registry.host)
        handler.serve()

    registry.fail("HEAD", TAG_PATH, lambda handler: handler.serve())  # the look before pushing
    registry.fail("HEAD", TAG_PATH, overtake)  # and the one before tagging
    done = first.share(registry.host)
    assert digest_of(done.artifact) == digest_of(second.artifact) == tagged(registry)
    assert first.named() == digest_of(second.artifact)
    assert registry.count("PUT", TAG_PATH) == 1


def test_whoever_is_overwritten_while_it_tags_adopts(registry, pair):
    first, second = pair

    def overwritten(handler):
        registry.manifests["team/env", TAG] = (
            INDEX_TYPE,
            second.store.read(digest_of(second.artifact)),
        )
        handler.serve()

    second.share(registry.host)
    del registry.manifests["team/env", TAG]
    for act in (lambda h: h.serve(), lambda h: h.serve(), overwritten):
        registry.fail("HEAD", TAG_PATH, act)
    done = first.share(registry.host)
    assert digest_of(done.artifact) == digest_of(second.artifact) == first.named()


def test_the_window_that_remains_leaves_one_tag_and_no_error(registry, pair):
    first, second = pair

    def tag_first(handler):
        assert second.share(registry.host).origin == "built"
        handler.serve()

    registry.fail("PUT", TAG_PATH, tag_first)  # after the first's last look
    done = first.share(registry.host)
    assert digest_of(done.artifact) == tagged(registry) == digest_of(first.artifact)
    assert second.named() == digest_of(second.artifact)


def test_what_fails_its_check_is_replaced_with_a_word(registry, pair, signer, tmp_path, packed):
    generate_key(tmp_path / "stranger.pem")
    theirs = packed.pack("theirs", TREE)
    sign_artifact(packed.store, theirs, load_private_key(tmp_path / "stranger.pem"), (), now=0)
    with RegistryClient(registry.host) as client:
        place = parse_reference(f"{registry.host}/team/env:{TAG}")
        publish(packed.store, theirs, place, client, emit=silent)
    assert pair[0].share(registry.host).origin == "built"
    assert tagged(registry) == digest_of(pair[0].artifact)
    (said,) = pair[0].said
    assert said.startswith("warning: ")
    assert "is replaced" in said


def test_a_forced_rebuild_replaces(registry, pair):
    pair[0].share(registry.host)
    assert pair[1].share(registry.host, renew=True).origin == "built"
    assert tagged(registry) == digest_of(pair[1].artifact)


def test_a_push_that_was_asked_for_fails_loudly(registry, pair):
    registry.fail("*", ".*", status(403), times=100)
    with pytest.raises(RegistryError):
        pair[0].share(registry.host)


WORKER = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
import test_remote_cache as t
from smolbuild.trust.keys import load_public_key
from smolbuild.store.artifact import open_artifact
from types import SimpleNamespace
key = load_public_key(Path(sys.argv[1]) / "keys" / "publisher.pub")
builder = t.Builder(Path(sys.argv[1]), SimpleNamespace(public=key))
builder.artifact = open_artifact(builder.store, "x:latest")
print("ready", flush=True)
sys.stdin.readline()
print(t.digest_of(builder.share(sys.argv[2]).artifact), flush=True)
"""


def test_two_processes_race_on_a_real_registry(pair, desk, tmp_path):
    here = Path(__file__)
    path = [str(here.parent), str(here.parents[2] / "registry")]
    (tmp_path / "registry").mkdir()
    with docker_registry(tmp_path / "registry") as host:
        racers = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER.format(path=path), str(builder.home.root), host],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for builder in pair
        ]
        try:
            for racer in racers:
                assert racer.stdout.readline() == "ready\n"
            for racer in racers:
                racer.stdin.write("go\n")
                racer.stdin.flush()
            reported = [racer.communicate(timeout=60)[0].strip() for racer in racers]
        finally:
            for racer in racers:
                racer.kill()
                racer.wait()
        assert [racer.returncode for racer in racers] == [0, 0]
        done = desk.pull(host)
    assert done is not None, desk.said
    assert digest_of(done.artifact) in reported
    assert set(reported) <= {digest_of(builder.artifact) for builder in pair}
    assert [builder.named() for builder in pair] == reported


# -- which cache


POLICY = CachePolicy(registry="file.example.com/a/b", push=True)


@pytest.mark.parametrize(
    ("registry", "push", "environment", "expected"),
    [
        (None, None, {}, ("file.example.com/a/b", True)),
        (None, None, {"SMOLBUILD_CACHE_REGISTRY": "env.example.com/c"},
         ("env.example.com/c", True)),
        ("cli.example.com/d", None, {"SMOLBUILD_CACHE_REGISTRY": "x.example.com/c"},
         ("cli.example.com/d", True)),
        (None, False, {}, ("file.example.com/a/b", False)),
        (None, None, {"SMOLBUILD_CACHE_PUSH": "0"}, ("file.example.com/a/b", False)),
        (None, True, {"SMOLBUILD_CACHE_PUSH": "0"}, ("file.example.com/a/b", True)),
        ("", None, {"SMOLBUILD_CACHE_REGISTRY": "env.example.com/c"}, None),
        (None, None, {"SMOLBUILD_CACHE_REGISTRY": ""}, None),
    ],
)  # fmt: skip
def test_the_command_line_goes_before_the_environment_before_the_file(
    registry, push, environment, expected
):
    chosen = choose_cache(POLICY, environment, registry=registry, push=push)
    assert (chosen and (chosen.repository.name, chosen.push)) == expected


def test_desks_read_only_unless_told_otherwise():
    chosen = choose_cache(CachePolicy(registry="r.example.com/x"), {}, registry=None, push=None)
    assert chosen is not None
    assert not chosen.push


@pytest.mark.parametrize(
    ("environment", "registry", "push"),
    [
        ({}, None, True),
        ({}, "r.example.com/x:tag", None),
        ({}, f"r.example.com/x@{KEY}", None),
        ({"SMOLBUILD_CACHE_PUSH": "perhaps"}, "r.example.com/x", None),
    ],
)
def test_what_makes_no_sense_is_said(environment, registry, push):
    with pytest.raises(UsageError):
        choose_cache(CachePolicy(), environment, registry=registry, push=push)


# -- age


def test_a_local_artifact_that_is_too_old_is_not_reused(pair):
    builder, day = pair[0], 86400.0
    made = 1767225600.0  # 2026-01-01, as every packed artifact says
    plan = cast(
        "Plan",
        SimpleNamespace(
            key=KEY,
            name="x",
            existing=None,
            smolfile=Smolfile(path=Path("Smolfile"), policy=Policy(max_age=7 * day)),
        ),
    )
    young = replace(builder.context, now=lambda: made + 6 * day)
    old = replace(builder.context, now=lambda: made + 8 * day)
    assert reuse(old, plan, ["x:latest"]) is None
    found = reuse(young, plan, ["x:latest"])
    assert found is not None
    assert found.artifact == builder.artifact
