"""Base drift and age: what is asked when, what follows, what is said."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolbuild.build.age import age_of, oldest_delta
from smolbuild.build.context import BuildContext
from smolbuild.build.drift import heed_drift
from smolbuild.build.lockfile import LockState, obtain_lock
from smolbuild.core.digest import digest_bytes
from smolbuild.core.errors import BuildError, HostError, RegistryError
from smolbuild.core.events import Message
from smolbuild.core.home import Home
from smolbuild.model.artifact import ArtifactConfig
from smolbuild.model.lock import Lock, LockedDebian, LockedImage, LockedKernel, LockedPackage
from smolbuild.model.lock_changes import lock_changes
from smolbuild.model.oci import CONFIG_TYPE, MANIFEST_TYPE, describe, encode_json
from smolbuild.model.smolfile import Policy, Smolfile
from smolbuild.source import kernel_package
from smolbuild.store.layout import Store

REFERENCE = "registry.example.com/team/base:1"
KERNEL = LockedKernel(package="linux-image-6.1.0-1", version="6.1-1", sha256="a" * 64)


class World:
    """A registry, an apt and a clock that can be moved, and a project that builds on them."""

    def __init__(self, root: Path, monkeypatch) -> None:
        self.time = 1_800_000_000.0
        self.asked = 0
        self.content = b"{}"
        self.kernel = KERNEL
        self.failure: Exception | None = None
        self.said: list[str] = []
        self.home = Home(root / "home")
        (root / "project").mkdir()
        self.path = root / "project" / "Smolfile"
        self.context = BuildContext(
            home=self.home,
            store=Store(self.home.store),
            contract=self.unasked,
            open_engine=self.unasked,
            fetcher=self,
            docker=None,
            environment={},
            emit=self.hear,
            now=lambda: self.time,
        )
        monkeypatch.setattr(kernel_package, "resolve_kernel", lambda: self.kernel)

    def unasked(self):
        raise AssertionError("drift needs no engine")

    def hear(self, event) -> None:
        if isinstance(event, Message):
            self.said.append(f"{event.level}: {event.text}")

    # -- an ImageFetcher

    def data(self) -> bytes:
        return encode_json(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST_TYPE,
                "config": describe(self.content, CONFIG_TYPE).to_json(),
                "layers": [],
            }
        )

    def resolve(self, reference):
        self.asked += 1
        if self.failure is not None:
            raise self.failure
        assert reference == REFERENCE
        return describe(self.data(), MANIFEST_TYPE)

    def manifest(self, reference, digest):
        return self.data()

    def blob(self, reference, descriptor, into):
        raise AssertionError("drift fetches no blob")

    # -- what is tested

    def smolfile(self, policy: str | None, **facts) -> Smolfile:
        facts = {"image": REFERENCE, **facts}
        return Smolfile(path=self.path, policy=Policy(on_base_drift=policy), **facts)

    def heed(self, policy: str | None, *, locked: bool = False, force: bool = False, **facts):
        smolfile = self.smolfile(policy, **facts)
        state = obtain_lock(self.context, smolfile, locked=locked)
        self.asked = 0
        self.said.clear()
        return heed_drift(self.context, smolfile, state, locked=locked, force=force)


@pytest.fixture
def world(tmp_path, monkeypatch):
    made = World(tmp_path, monkeypatch)
    made.heed(None)  # writes the lock
    return made


def test_without_a_policy_nobody_asks(world):
    world.content = b"moved"
    state, drift = world.heed(None)
    assert (state.state, drift, world.asked, world.said) == ("locked", None, 0, [])


def test_what_did_not_drift_is_asked_once_an_hour(world):
    assert world.heed("warn")[1].state == "none"
    assert world.asked == 1
    world.time += 3599
    world.content = b"moved"
    assert world.heed("warn")[1].state == "none"
    assert world.asked == 0
    world.time += 2
    assert world.heed("warn")[1].state == "drifted"
    assert world.asked == 1


def test_a_question_can_be_forced_also_without_a_policy(world):
    world.heed("warn")
    world.content = b"moved"
    state, drift = world.heed(None, force=True)
    assert (drift.state, world.asked, state.state) == ("drifted", 1, "locked")


def test_warn_names_old_and_new_and_follows_the_lock(world):
    before = world.path.with_name("Smolfile.lock").read_bytes()
    had = digest_bytes(world.data())
    world.content = b"moved"
    world.kernel = replace(KERNEL, version="6.1-2", sha256="b" * 64)
    state, drift = world.heed("warn")
    (said,) = world.said
    assert said.startswith("warning: the base drifted: ")
    for part in (REFERENCE, had[:19], digest_bytes(world.data())[:19], "6.1-1", "6.1-2"):
        assert part in said
    assert len(drift.changes) == 2
    assert state.state == "locked"
    assert world.path.with_name("Smolfile.lock").read_bytes() == before


def test_rebuild_renews_the_lock_and_says_why(world):
    world.content = b"moved"
    state, drift = world.heed("rebuild")
    assert state.state == "updated"
    assert state.reasons == drift.changes
    assert state.lock.image.digest == digest_bytes(world.data())
    assert world.said == [f"info: Smolfile.lock is renewed: {drift.changes[0]}"]
    again, drift = world.heed("rebuild")
    assert (again.state, drift.state, world.asked) == ("locked", "none", 0)
    assert again.lock == state.lock


def test_locked_is_stronger_than_rebuild(world):
    before = world.path.with_name("Smolfile.lock").read_bytes()
    world.content = b"moved"
    state, drift = world.heed("rebuild", locked=True)
    assert (state.state, drift.state) == ("locked", "drifted")
    assert "--locked: the lock is followed" in world.said[0]
    assert world.path.with_name("Smolfile.lock").read_bytes() == before


def test_fail_fails(world):
    world.content = b"moved"
    with pytest.raises(BuildError) as caught:
        world.heed("fail")
    assert (caught.value.code, caught.value.exit_status) == ("base-drift", 1)
    assert REFERENCE in caught.value.message


@pytest.mark.parametrize("policy", ["warn", "rebuild"])
@pytest.mark.parametrize("failure", [RegistryError("no network"), HostError("no apt")])
def test_who_cannot_ask_goes_on_with_a_warning_and_asks_again_later(world, policy, failure):
    world.failure = failure
    state, drift = world.heed(policy)
    assert (state.state, drift.state) == ("locked", "unknown")
    assert world.said == [f"warning: whether the base drifted is not known: {failure.message}"]
    world.time += 599
    world.heed(policy)
    assert world.asked == 0
    world.time += 2
    world.heed(policy)
    assert world.asked == 1


def test_fail_does_not_take_silence_for_an_answer(world):
    world.failure = RegistryError("no network")
    for _ in range(2):
        with pytest.raises(RegistryError) as caught:
            world.heed("fail")
        assert (caught.value.code, world.asked) == ("base-drift-unknown", 1)
    world.failure = None
    assert world.heed("fail")[1].state == "none"
    world.failure = RegistryError("no network")
    assert world.heed("fail")[1].state == "none", "an answer holds for an hour"


def test_a_lock_made_just_now_has_not_drifted_and_need_not_be_asked_about(world):
    world.path.with_name("Smolfile.lock").unlink()
    assert world.heed("fail")[1].state == "none"
    assert world.asked == 0
    assert world.heed("fail")[1].state == "none"
    assert world.asked == 0


def test_an_image_on_this_host_does_not_drift_but_its_kernel_may(world):
    (world.path.parent / "rootfs").mkdir()
    world.path.with_name("Smolfile.lock").unlink()
    local = {"image": "./rootfs/"}
    assert world.heed("fail", **local)[1].state == "none"
    (world.path.parent / "rootfs" / "new").write_text("x")
    world.time += 7200
    assert world.heed("fail", **local)[1].state == "none"
    world.kernel = replace(KERNEL, version="6.1-2")
    state, drift = world.heed("rebuild", force=True, **local)
    assert drift.changes == ("kernel: linux-image-6.1.0-1 6.1-1 -> linux-image-6.1.0-1 6.1-2",)
    assert state.lock.image is not None


def test_a_damaged_memory_is_asked_anew(world):
    world.heed("warn")
    (remembered,) = (world.home.cache / "drift").iterdir()
    for damage in (b"", b"[]", b'{"checked": 1e99, "lock": "no lock", "problem": ""}'):
        remembered.write_bytes(damage)
        assert world.heed("warn")[1].state == "none"
        assert world.asked == 1


# -- the sentences


def lock(*packages: tuple[str, str]) -> Lock:
    return Lock(
        debian=LockedDebian(
            suite="bookworm",
            variant="minbase",
            architecture="amd64",
            packages=tuple(
                LockedPackage(
                    name=name, version=version, architecture="amd64", sha256=version[:1] * 64
                )
                for name, version in packages
            ),
        ),
        kernel=KERNEL,
    )


def test_packages_are_named_with_their_versions():
    old = lock(("openssl", "3.0"), ("gone", "1"), ("same", "1"))
    new = lock(("openssl", "4.1"), ("come", "1"), ("same", "1"))
    said = "1 package newer, 1 added, 1 removed: + come 1, - gone 1, openssl 3.0 -> 4.1"
    assert lock_changes(old, new) == (f"Debian bookworm: {said}",)


def test_other_files_of_the_same_versions_are_told():
    old = lock(("openssl", "3.0"))
    package = replace(old.debian.packages[0], sha256="f" * 64)
    new = replace(old, debian=replace(old.debian, packages=(package,)))
    assert lock_changes(old, new) == ("Debian bookworm: other files of the same versions",)


def test_many_packages_are_counted():
    old = lock(*((f"p{n}", "1") for n in range(20)))
    new = lock(*((f"p{n}", "2") for n in range(20)))
    (said,) = lock_changes(old, new)
    assert said.startswith("Debian bookworm: 20 packages newer: p0 1 -> 2")
    assert said.endswith("and 14 more")


locks = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from("12")), unique_by=lambda p: p[0], max_size=3
).map(lambda packages: lock(*sorted(packages)))


@given(locks, locks)
def test_locks_differ_exactly_when_something_is_said(old, new):
    assert bool(lock_changes(old, new)) == (old != new)


def test_the_platform_s_manifest_alone_can_move():
    first, second, third = (digest_bytes(data) for data in (b"1", b"2", b"3"))
    old = Lock(image=LockedImage(reference="x", digest=first, platform_digest=second))
    new = Lock(image=LockedImage(reference="x", digest=first, platform_digest=third))
    assert third[:19] in lock_changes(old, new)[0]


def test_a_lock_from_before_all_platforms_were_in_it_has_not_drifted():
    digest = digest_bytes(b"1")
    old = LockedImage(reference="x", digest=digest, platform_digest=digest)
    new = replace(old, platforms=(("linux/amd64", digest),))
    assert lock_changes(Lock(image=old), Lock(image=new)) == ()


# -- age


def config(created: str) -> ArtifactConfig:
    return cast("ArtifactConfig", SimpleNamespace(created=created))


@pytest.mark.parametrize(
    ("seconds", "limit", "over", "text"),
    [
        (9 * 86400 + 5, 7 * 86400.0, True, "built 9 days ago, older than 7d"),
        (7200, 7 * 86400.0, False, "built 2 hours ago, limit 7d"),
        (90, None, False, "built 1 minute ago"),
        (91, 90.0, True, "built 1 minute ago, older than 90s"),
        (90, 90.0, False, "built 1 minute ago, limit 90s"),
        (-50, 1.0, False, "built 0 seconds ago, limit 1s"),
    ],
)
def test_age(seconds, limit, over, text):
    made = 1767225600.0
    found = age_of(config("2026-01-01T00:00:00Z"), Policy(max_age=limit), now=made + seconds)
    assert (found.is_over, str(found)) == (over, text)


def test_a_time_that_is_none_is_too_old_for_any_limit():
    assert age_of(config("yesterday"), Policy(max_age=86400.0), now=1.8e9).is_over


def test_deltas_are_bound_by_the_same_limit():
    assert oldest_delta(Policy(), now=1000.0) == 0.0
    assert oldest_delta(Policy(max_age=10.0), now=1000.0) == 990.0


def test_the_state_of_a_lock_that_is_followed_is_untouched(world):
    state = LockState(lock=Lock(kernel=KERNEL), state="locked")
    assert heed_drift(world.context, world.smolfile(None), state, locked=False, force=False) == (
        state,
        None,
    )
