import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolbuild.core.canon import canonical_json
from smolbuild.core.digest import digest_value, parse_digest

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(values)
def test_round_trips_and_is_stable_under_key_order(value):
    encoded = canonical_json(value)
    assert json.loads(encoded) == value
    assert canonical_json(_reordered(value)) == encoded


def _reordered(value):
    if isinstance(value, dict):
        return {key: _reordered(value[key]) for key in reversed(list(value))}
    if isinstance(value, list):
        return [_reordered(item) for item in value]
    return value


def test_sorts_by_utf16_code_units_as_rfc_8785_does():
    # U+FB33 sorts after the surrogate pair of U+1F600 in code points, before it in UTF-16: RFC 8785
    value = {"\ufb33": 1, "\U0001f600": 2, "1": 3}
    assert list(json.loads(canonical_json(value))) == ["1", "\U0001f600", "\ufb33"]


@pytest.mark.parametrize("value", [1.5, float("nan"), b"x", {1: "x"}, {"x": {1, 2}}])
def test_refuses_what_has_no_canonical_form(value):
    with pytest.raises(TypeError):
        canonical_json(value)


@pytest.mark.parametrize("value", [2**53, "\ud800"])
def test_refuses_values_that_readers_disagree_on(value):
    with pytest.raises(ValueError):
        canonical_json(value)


def test_domains_separate():
    assert digest_value("a.v1", "x") != digest_value("a.v2", "x")
    assert digest_value("a", {"b": 1}) != digest_value("a", {"b": "1"})


@pytest.mark.parametrize(
    "text", ["", "sha256:", "sha256:" + "A" * 64, "sha512:" + "a" * 64, "sha256:" + "a" * 64 + "\n"]
)
def test_parse_digest_refuses(text):
    with pytest.raises(ValueError):
        parse_digest(text)
