"""Undeclared inputs: each is named with its step, as a warning or as the end of the build."""

from types import SimpleNamespace
from typing import cast

import pytest

from smolbuild.build.plan import Plan
from smolbuild.build.undeclared import denied_in, heed_denied, heed_known, known_undeclared
from smolbuild.core.digest import digest_bytes
from smolbuild.core.errors import BuildError, UsageError
from smolbuild.model.egress import EgressRecord, StepEgress
from smolbuild.model.lock import Lock, LockedDebian, LockedImage, LockedKernel
from smolbuild.model.parse import parse_text
from smolbuild.model.smolfile import Policy

SMOLFILE = """
image = "registry.example.com/x:1"
env = ["PLAIN=1", "TOKEN"]
{net}

[smolbuild.policy]
undeclared = "{policy}"

[[smolbuild.step]]
name = "fetch"
run = "true"
env = ["PROXY"]

[[smolbuild.step]]
name = "quiet"
run = "true"
network = false

[[smolbuild.service]]
name = "api"
run = "true"
env = ["MODE"]
"""
DIGEST = digest_bytes(b"x")
LOCK = Lock(
    image=LockedImage(reference="registry.example.com/x:1", digest=DIGEST, platform_digest=DIGEST),
    kernel=LockedKernel(package="k", version="1", sha256="a" * 64),
)


def plan(policy: str = "warn", *, net: str = "", lock: Lock = LOCK, **facts) -> Plan:
    smolfile = parse_text(
        SMOLFILE.format(policy=policy, net=net),
        file="Smolfile",
        environment={"TOKEN": "t", "PROXY": "p", "MODE": "m"},
    )
    state = SimpleNamespace(lock=lock, is_new=facts.pop("is_new", False))
    values = {"local_base": False, "existing": None, **facts}
    return cast("Plan", SimpleNamespace(smolfile=smolfile, lock=state, **values))


def record(host: str, *, denied: bool = True, **facts) -> EgressRecord:
    return EgressRecord(host=host, port=443, status=403 if denied else 200, denied=denied, **facts)


def test_host_values_are_named_with_their_step_and_service():
    found = known_undeclared(plan())
    assert {text.partition(" takes")[0] for text in found} == {
        "TOKEN",
        "step fetch: PROXY",
        "service api: MODE",
    }


def test_a_whole_network_is_itself_what_is_undeclared():
    found = known_undeclared(plan(net="net = true"))
    assert found[-1] == (
        "steps fetch and the services have the whole network: what they fetch is not recorded"
    )


@pytest.mark.parametrize(
    ("lock", "facts", "said"),
    [
        (LOCK, {}, "image registry.example.com/x:1 and the kernel were not locked before"),
        (LOCK, {"local_base": True}, "the kernel was not locked before"),
        (
            Lock(debian=LockedDebian(suite="bookworm", variant="apt", architecture="amd64",
                                     packages=())),
            {},
            "Debian bookworm was not locked before",
        ),
    ],
)  # fmt: skip
def test_a_tag_without_a_lock_is_undeclared(lock, facts, said):
    found = known_undeclared(plan(lock=lock, is_new=True, **facts))
    assert found[-1] == f"{said}: commit Smolfile.lock"
    assert not any("locked" in text for text in known_undeclared(plan(lock=lock, **facts)))


def test_an_image_on_this_host_with_its_own_kernel_needs_no_lock():
    found = known_undeclared(plan(lock=Lock(image=LOCK.image), local_base=True, is_new=True))
    assert not any("locked" in text for text in found)


def test_warn_says_each_once():
    said: list[str] = []
    heed_known(plan(), lambda event: said.append(f"{event.level}: {event.text}"))
    assert len(said) == 3
    assert all(text.startswith("warning: undeclared input: ") for text in said)


def test_fail_ends_before_anything_runs_and_names_all():
    with pytest.raises(UsageError) as caught:
        heed_known(plan("fail"), lambda event: pytest.fail(str(event)))
    assert (caught.value.code, caught.value.exit_status) == ("undeclared", 2)
    for name in ("TOKEN", "PROXY", "MODE"):
        assert name in caught.value.message


def test_what_a_step_was_denied_is_a_warning_or_the_end():
    seen = (record("a.example.com"), record("ok.example.com", denied=False), record("10.0.0.1"))
    said: list[str] = []
    heed_denied("fetch", seen, Policy(), lambda event: said.append(event.text))
    expected = (
        "undeclared input: step fetch asked for 10.0.0.1:443, a.example.com:443, "
        "which it may not reach: denied"
    )
    assert said == [expected]
    with pytest.raises(BuildError) as caught:
        heed_denied("fetch", seen, Policy(undeclared="fail"), lambda event: None)
    assert (caught.value.code, caught.value.message) == ("undeclared", expected)


def test_what_was_allowed_is_declared():
    for policy in (Policy(), Policy(undeclared="fail")):
        seen = [record("ok.example.com", denied=False)]
        heed_denied("fetch", seen, policy, lambda event: pytest.fail(str(event)))


def test_an_artifact_s_account_is_judged_step_by_step():
    def of(step: str, host: str, *, denied: bool) -> StepEgress:
        return StepEgress(step=step, host=host, port=443, status=0, denied=denied)

    account = (
        of("one", "a.example.com", denied=True),
        of("two", "b.example.com", denied=False),
        of("services", "c.example.com", denied=True),
    )
    assert [text.partition(",")[0] for text in denied_in(account)] == [
        "step one asked for a.example.com:443",
        "the services asked for c.example.com:443",
    ]
    existing = SimpleNamespace(config=SimpleNamespace(results=SimpleNamespace(egress=account)))
    assert len(known_undeclared(plan(existing=existing))) == 5


def test_many_hosts_are_counted():
    said: list[str] = []
    seen = [record(f"h{n:02}.example.com") for n in range(20)]
    heed_denied("fetch", seen, Policy(), lambda event: said.append(event.text))
    assert "and 12 more" in said[0]
