import json

import pytest

from smolbuild.core.errors import VerificationError
from smolbuild.model.oci import encode_json, parse_json_object


@pytest.mark.parametrize("text", [r'"\ud800"', r'"\uDFFF x"', r'{"\udcff": 1}'])
def test_half_a_surrogate_pair_is_malformed_for_it_could_not_be_written_again(text):
    with pytest.raises(VerificationError) as caught:
        parse_json_object(b'{"x": %s}' % text.encode(), "it")
    assert caught.value.code == "malformed"


def test_whole_pairs_are_text():
    value = parse_json_object(json.dumps({"x": "\U0001f600"}).encode(), "it")
    assert json.loads(encode_json(value)) == {"x": "\U0001f600"}
