"""Challenges and scopes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolbuild.registry.tokens import Challenge, parse_challenges, pull_scope, push_scope


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ('Bearer realm="https://a/t",service="s",scope="repository:x:pull,push"',
         [("bearer", {"realm": "https://a/t", "service": "s", "scope": "repository:x:pull,push"})]),
        ("Basic", [("basic", {})]),
        ("basic realm=plain", [("basic", {"realm": "plain"})]),
        ('Basic realm="Bearer, basic"', [("basic", {"realm": "Bearer, basic"})]),
        ('Basic realm="a", Bearer realm="b"', [("basic", {"realm": "a"}),
                                               ("bearer", {"realm": "b"})]),
        ('Negotiate, Basic realm="q\\"uote"', [("basic", {"realm": 'q"uote'})]),
        ('BEARER Realm = "x" , SERVICE=y', [("bearer", {"realm": "x", "service": "y"})]),
        ("Bearerish x=y", []),
        ("", []),
    ],
)  # fmt: skip
def test_challenges(header, expected):
    assert parse_challenges(header) == tuple(
        Challenge(scheme=scheme, parameters=parameters) for scheme, parameters in expected
    )


@given(st.text(max_size=200) | st.text('Bearer ,="\\asic', max_size=60))
def test_any_header_is_parsed(header):
    for challenge in parse_challenges(header):
        assert challenge.scheme in {"basic", "bearer"}


def test_scopes():
    assert pull_scope("a/b") == ("repository:a/b:pull",)
    assert push_scope("a/b") == ("repository:a/b:pull,push",)
    assert push_scope("b", "a") == ("repository:a:pull", "repository:b:pull,push")
