import dataclasses
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolbuild.core.digest import Digest
from smolbuild.core.errors import UsageError
from smolbuild.model.lock import (
    Lock,
    LockedDebian,
    LockedDockerfile,
    LockedImage,
    LockedKernel,
    LockedPackage,
    LockedRun,
    lock_path,
    matches,
)
from smolbuild.model.lock_file import encode_lock, parse_lock
from smolbuild.model.smolfile import Base, Dockerfile, Smolfile

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
hexes = st.text("0123456789abcdef", min_size=64, max_size=64)
digests = hexes.map(lambda text: Digest("sha256:" + text))
packages = st.builds(LockedPackage, name=words, version=words, architecture=words, sha256=hexes)
variables = st.lists(st.tuples(words.filter(lambda t: "=" not in t), words), max_size=3)
runs = st.builds(
    LockedRun,
    env=variables.map(tuple),
    entrypoint=st.lists(words, max_size=2).map(tuple),
    cmd=st.lists(words, max_size=2).map(tuple),
    workdir=st.just("") | words,
    user=st.just("") | words,
)
images = st.builds(
    LockedImage,
    reference=words,
    digest=digests,
    platform_digest=digests,
    platforms=st.dictionaries(words, digests, max_size=3).map(
        lambda found: tuple(sorted(found.items()))
    ),
    run=st.none() | runs,
)
dockerfiles = st.builds(
    LockedDockerfile,
    dockerfile=words,
    target=st.none() | words,
    args=variables.map(sorted).map(tuple),
    context=words,
    context_digest=digests,
    image=digests,
    run=runs,
)
debians = st.builds(
    LockedDebian,
    suite=words,
    variant=words,
    architecture=words,
    packages=st.lists(packages, max_size=3).map(tuple),
    requested=st.lists(words, max_size=3).map(tuple),
    components=st.lists(words, max_size=2).map(tuple),
    snapshot=st.none() | words,
)
kernels = st.none() | st.builds(
    LockedKernel, package=words, version=words, sha256=hexes, modules_sha256=st.none() | hexes
)
locks = (
    st.builds(Lock, image=st.none() | images, kernel=kernels)
    | st.builds(Lock, debian=debians, kernel=kernels)
    | st.builds(Lock, dockerfile=dockerfiles, kernel=kernels)
)

A, B = Digest("sha256:" + "a" * 64), Digest("sha256:" + "b" * 64)
IMAGE = Lock(
    image=LockedImage(reference="python:3.12", digest=A, platform_digest=B),
    kernel=LockedKernel(package="linux-image", version="6.1", sha256="c" * 64),
)
DEBIAN = Lock(
    debian=LockedDebian(
        suite="bookworm",
        variant="minbase",
        architecture="amd64",
        packages=(
            LockedPackage(name="dash", version="0.5", architecture="amd64", sha256="d" * 64),
        ),
        requested=("dash",),
    ),
    kernel=IMAGE.kernel,
)


@given(locks)
def test_a_lock_survives_the_round_trip_and_is_toml(lock: Lock) -> None:
    data = encode_lock(lock)
    tomllib.loads(data.decode())
    assert parse_lock(data, file="Smolfile.lock") == lock
    assert encode_lock(parse_lock(data, file="x")) == data


@given(
    st.binary(max_size=200)
    | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace"))
)
def test_junk_is_a_clear_error(data: bytes) -> None:
    with pytest.raises(UsageError, match=r"Smolfile\.lock"):
        parse_lock(data, file="Smolfile.lock")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("version = 1", "version = 2", "version"),
        ("version = 1", "version = true", "version"),
        ("version = 1", "version = 1\nextra = 1", "unknown key 'extra'"),
        ("[image]", "[image]\nextra = 1", "unknown key 'image.extra'"),
        ("reference = ", "#", "image.reference is missing"),
        ("sha256:aaaa", "sha256:AAAA", "image.digest: not a sha256 digest"),
        ('sha256 = "cc', 'sha256 = "CC', "kernel.sha256 is not 64"),
        ("[kernel]", "[[kernel]]", "kernel is not a table"),
    ],
)
def test_every_wrong_member_is_named(old: str, new: str, problem: str) -> None:
    text = encode_lock(IMAGE).decode()
    assert old in text
    with pytest.raises(UsageError, match=problem) as caught:
        parse_lock(text.replace(old, new, 1).encode(), file="Smolfile.lock")
    assert "lock --update" in caught.value.hint


def test_deep_nesting_is_an_error_too() -> None:
    with pytest.raises(UsageError):
        parse_lock(b"a = " + b"[" * 100_000, file="Smolfile.lock")


def test_a_lock_cannot_be_for_both_kinds_of_base() -> None:
    both = dataclasses.replace(DEBIAN, image=IMAGE.image)
    with pytest.raises(UsageError, match="more than one base"):
        parse_lock(encode_lock(both), file="Smolfile.lock")


def test_where_a_lock_lives() -> None:
    assert lock_path(Path("dir/Smolfile")) == Path("dir/Smolfile.lock")
    assert lock_path(Path("db.smolfile")) == Path("db.smolfile.lock")


@pytest.mark.parametrize(
    ("lock", "smolfile", "reasons"),
    [
        (IMAGE, {"image": "python:3.12"}, []),
        (DEBIAN, {"base": Base(debian="bookworm", packages=("dash",))}, []),
        (IMAGE, {"image": "python:3.13"}, ["python:3.12", "python:3.13"]),
        (IMAGE, {"base": Base(debian="bookworm")}, ["Debian root", "no image"]),
        (DEBIAN, {"image": "python:3.12"}, ["does not ask for", "does not have image"]),
        (DEBIAN, {"base": Base(debian="trixie", packages=("dash",))}, ["suite", "trixie"]),
        (DEBIAN, {"base": Base(debian="bookworm")}, ["no longer asks for"]),
        (
            DEBIAN,
            {"base": Base(debian="bookworm", packages=("dash",), snapshot="20261101T000000Z")},
            ["the lock has none", "20261101T000000Z"],
        ),
        (DEBIAN, {"base": Base(debian="bookworm", packages=("dash", "jq"))}, ["package jq"]),
        (dataclasses.replace(IMAGE, kernel=None), {"image": "python:3.12"}, ["no kernel"]),
        (IMAGE, {"image": "python:3.12", "kernel": "./vmlinuz"}, ["its own kernel"]),
        (
            DEBIAN,
            {"base": Base(debian="bookworm", packages=("dash",), components=("main", "contrib"))},
            ["components"],
        ),
    ],
)
def test_reasons_why_a_lock_does_not_fit(
    lock: Lock, smolfile: dict[str, object], reasons: list[str]
) -> None:
    found = matches(lock, Smolfile(path=Path("Smolfile"), **smolfile))  # type: ignore[arg-type]
    assert bool(found) == bool(reasons)
    for reason in reasons:
        assert any(reason in text for text in found), found


def test_a_lock_of_a_dockerfile_fits_what_it_was_made_for() -> None:
    asked = Dockerfile(dockerfile="D", target="t", args=(("A", "1"),), context="c")
    lock = Lock(
        dockerfile=LockedDockerfile(
            dockerfile="D", target="t", args=(("A", "1"),), context="c", context_digest=A, image=B
        ),
        kernel=IMAGE.kernel,
    )
    smolfile = Smolfile(path=Path("Smolfile"), base=asked)
    assert matches(lock, smolfile) == ()
    for field, value in (("dockerfile", "E"), ("target", None), ("args", ()), ("context", ".")):
        other = dataclasses.replace(asked, **{field: value})
        assert matches(lock, dataclasses.replace(smolfile, base=other)) != ()
    assert matches(IMAGE, smolfile) != ()
    assert matches(lock, dataclasses.replace(smolfile, base=None, image="python:3.12")) != ()
    assert matches(DEBIAN, smolfile) != ()
