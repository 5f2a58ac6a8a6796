"""The order of Debian versions, against what dpkg itself says."""

import shutil
import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smolbuild.model.debian_version import compare_versions

versions = st.from_regex(
    r"([0-9]:)?[0-9][0-9a-zA-Z.+~]{0,8}(-[0-9a-zA-Z.+~]{1,6})?", fullmatch=True
)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("1", "2"),
        ("9", "10"),
        ("1.0~rc1", "1.0"),
        ("1.0~~", "1.0~"),
        ("2.36-9+deb12u7", "2.36-9+deb12u10"),
        ("9.9", "1:0.1"),
        ("1.0", "1.0a"),
        ("1.0a", "1.0+"),
        ("1.0-1", "1.0-1.1"),
        ("1-2-3", "1-2-10"),
    ],
)
def test_older_and_newer(older: str, newer: str) -> None:
    assert compare_versions(older, newer) < 0 < compare_versions(newer, older)


def test_what_is_written_otherwise_may_be_the_same() -> None:
    assert compare_versions("1.0", "0:1.00-0") == 0


@given(versions, versions)
@example("1.0-0", "1.0")
@example("0:00", "0")
@settings(max_examples=60, deadline=None)
def test_the_order_is_that_of_dpkg(one: str, two: str) -> None:
    order = compare_versions(one, two)
    relation = "lt" if order < 0 else "gt" if order > 0 else "eq"
    dpkg = shutil.which("dpkg")
    assert dpkg
    done = subprocess.run([dpkg, "--compare-versions", one, relation, two], check=False, timeout=10)
    assert done.returncode == 0, (one, relation, two)


@given(st.text(max_size=12), st.text(max_size=12))
def test_any_two_texts_have_an_order(one: str, two: str) -> None:
    assert (compare_versions(one, two) > 0) == (compare_versions(two, one) < 0)
    assert compare_versions(one, one) == 0
