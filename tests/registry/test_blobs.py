"""Blobs up and down through every kind of failure."""

import io
import random

import pytest
import testing_registry as faults

from smolbuild.core.errors import HostError, RegistryError, VerificationError
from smolbuild.model.oci import describe
from smolbuild.registry.retry import RetryPolicy, Timeouts

DATA = random.Random(1).randbytes(3_000_000)
BLOB = describe(DATA, "application/octet-stream")
EMPTY = describe(b"", "application/octet-stream")


def pull(client, blob=BLOB):
    got = bytearray()
    client.pull_blob("a/b", blob, got.extend)
    return bytes(got)


def push(client, data=DATA, blob=BLOB, progress=None):
    client.push_blob("a/b", blob, lambda: io.BytesIO(data), progress)


# -- down


def test_pull(fake, client):
    fake.add_blob("a/b", DATA)
    seen = []
    got = io.BytesIO()
    client.pull_blob("a/b", BLOB, got, seen.append)
    assert got.getvalue() == DATA
    assert seen[-1] == len(DATA)
    assert seen == sorted(seen)


def test_pull_of_nothing(fake, client):
    fake.add_blob("a/b", b"")
    assert pull(client, EMPTY) == b""


def test_pull_goes_on_where_it_was_cut(fake, client):
    fake.add_blob("a/b", DATA)
    fake.fail("GET", "blobs", faults.cut_down(1_500_000))
    fake.fail("GET", "blobs", faults.cut_down(300_000))
    assert pull(client) == DATA
    ranges = [int(s.headers.get("Range", "bytes=0-")[6:-1]) for s in fake.seen]
    assert ranges == [0, 1_500_000, 1_800_000]


def test_progress_starts_the_count_of_failures_anew(fake, client):
    fake.add_blob("a/b", DATA)
    fake.fail("GET", "blobs", faults.cut_down(100), times=1)
    fake.fail("GET", "blobs", faults.cut_down(1_100_000), times=2)
    fake.fail("GET", "blobs", faults.cut_down(100), times=1)
    assert pull(client) == DATA  # four failures, though three attempts without progress are allowed


def test_pull_from_a_registry_without_ranges(fake, client):
    fake.add_blob("a/b", DATA)
    fake.fail("GET", "blobs", faults.cut_down(1_500_000))
    fake.fail("GET", "blobs", faults.body(DATA))
    assert pull(client) == DATA


def test_pull_from_a_registry_that_refuses_ranges(fake, client):
    fake.add_blob("a/b", DATA)
    fake.fail("GET", "blobs", faults.cut_down(1_500_000))
    fake.fail("GET", "blobs", faults.status(416))
    assert pull(client) == DATA
    assert "Range" not in fake.seen[-1].headers


@pytest.mark.parametrize(
    "span", ["bytes 0-2999999/3000000", "bytes 5-9/3000000", "nonsense", "bytes 1500000-3000000/*"]
)
def test_wrong_range_is_not_believed(fake, client, span):
    fake.add_blob("a/b", DATA)
    fake.fail("GET", "blobs", faults.cut_down(1_500_000))
    fake.fail("GET", "blobs", faults.body(DATA[1_500_000:], 206, Content_Range=span))
    assert pull(client) == DATA


def test_range_of_a_blob_of_another_size(fake, client):
    fake.add_blob("a/b", DATA)
    fake.fail("GET", "blobs", faults.cut_down(1_500_000))
    span = "bytes 1500000-2999999/3000001"
    fake.fail("GET", "blobs", faults.body(DATA[1_500_000:], 206, Content_Range=span))
    with pytest.raises(VerificationError) as caught:
        pull(client)
    assert caught.value.code == "wrong-length"


def test_cut_at_the_last_byte(fake, client):
    fake.add_blob("a/b", DATA)
    fake.fail("GET", "blobs", faults.cut_down(len(DATA) - 1))
    assert pull(client) == DATA


def test_cut_always(fake, client):
    fake.add_blob("a/b", DATA)
    fake.fail("GET", "blobs", faults.cut_down(1000), times=99)
    with pytest.raises(RegistryError) as caught:
        pull(client)
    assert caught.value.code == "unreachable"
    assert fake.count("GET", "blobs") == 3


def test_wrong_bytes(fake, client):
    fake.blobs["a/b", BLOB.digest] = DATA[:-1] + bytes([DATA[-1] ^ 1])
    with pytest.raises(VerificationError) as caught:
        pull(client)
    assert caught.value.code == "digest-mismatch"
    assert caught.value.exit_status == 4


def test_wrong_bytes_after_a_cut(fake, client):
    fake.add_blob("a/b", DATA)
    fake.fail("GET", "blobs", faults.cut_down(1_500_000))
    span = "bytes 1500000-2999999/3000000"
    fake.fail("GET", "blobs", faults.body(bytes(1_500_000), 206, Content_Range=span))
    with pytest.raises(VerificationError):
        pull(client)


@pytest.mark.parametrize("send", [faults.body, faults.chunked])
@pytest.mark.parametrize("data", [DATA[:-1], DATA + b"x", b"", DATA * 2])
def test_wrong_length(fake, client, send, data):
    fake.fail("GET", "blobs", send(data))
    got = bytearray()
    with pytest.raises(VerificationError) as caught:
        client.pull_blob("a/b", BLOB, got.extend)
    assert caught.value.code == "wrong-length"
    assert len(got) <= BLOB.size
    assert fake.count("GET", "blobs") == 1


def test_pull_of_what_is_not_there(client):
    with pytest.raises(RegistryError) as caught:
        pull(client)
    assert caught.value.code == "not-found"


@pytest.mark.parametrize("drip", [faults.drip_head, faults.drip_body, faults.never_answer])
def test_slow_loris(fake, make_client, drip):
    fake.fail("GET", "blobs", drip, times=99)
    client = make_client(fake, timeouts=Timeouts(connect=2, read=0.15, floor=10_000_000))
    with pytest.raises(RegistryError) as caught:
        pull(client, describe(bytes(1_000_000), "x"))
    assert caught.value.code == "unreachable"


def test_error_of_the_sink_is_not_the_networks(fake, client):
    fake.add_blob("a/b", DATA)

    def full(piece):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        client.pull_blob("a/b", BLOB, full)
    assert fake.count("GET", "blobs") == 1


# -- up


def test_push(fake, client):
    seen = []
    push(client, progress=seen.append)
    assert fake.blobs["a/b", BLOB.digest] == DATA
    assert seen[-1] == len(DATA)
    assert [s.method for s in fake.seen] == ["POST", "PUT"]


def test_push_of_nothing(fake, client):
    push(client, b"", EMPTY)
    assert fake.blobs["a/b", EMPTY.digest] == b""


@pytest.mark.parametrize("strict", [False, True])
def test_push_goes_on_where_it_was_cut(fake, client, strict):
    fake.strict_ranges = strict
    fake.fail("PUT", "uploads", faults.cut_up(1_000_000))
    push(client)
    assert fake.blobs["a/b", BLOB.digest] == DATA
    patch = next(s for s in fake.seen if s.method == "PATCH")
    assert patch.headers["Content-Range"] == "1000000-2999999"
    assert patch.headers["Content-Length"] == "2000000"


def test_resumed_push_is_cut_again(fake, client):
    fake.fail("PUT", "uploads", faults.cut_up(1_200_000))
    fake.fail("PATCH", "uploads", faults.cut_up(1_200_000))
    push(client)
    assert fake.blobs["a/b", BLOB.digest] == DATA


def test_answer_to_the_last_byte_is_lost(fake, client):
    fake.fail("PUT", "uploads", faults.lose_answer)
    push(client)
    assert fake.blobs["a/b", BLOB.digest] == DATA
    assert fake.count("PUT", "uploads") == 1  # it looked, and did not send the blob twice


def test_cut_between_the_last_byte_and_the_commit(fake, client):
    fake.fail("PUT", "uploads", faults.cut_up(len(DATA)))
    push(client)
    assert fake.blobs["a/b", BLOB.digest] == DATA
    assert fake.count("PATCH", "uploads") == 0
    assert fake.seen[-1].headers["Content-Length"] == "0"


def test_stale_word_on_the_offset(fake, client):
    """A registry that names an older offset than it has gets a blob put together wrongly."""
    fake.fail("PUT", "uploads", faults.cut_up(1_000_000))

    def stale(h):
        upload = h.path.rpartition("?")[0]
        state = h.registry.states[upload.rpartition("/")[2]]
        h.answer(204, b"", {"Range": "0-499999", "Location": f"{upload}?_state={state}"})

    fake.fail("GET", "uploads", stale)
    push(client)
    assert fake.blobs["a/b", BLOB.digest] == DATA
    assert fake.count("POST", "uploads") == 2


@pytest.mark.parametrize("answer", [faults.status(404), faults.status(400), faults.status(204),
                                    faults.status(204, Range="0-0"), faults.status(405),
                                    faults.status(204, Range="0-99999999999")])  # fmt: skip
def test_upload_that_cannot_be_resumed_begins_anew(fake, client, answer):
    fake.fail("PUT", "uploads", faults.cut_up(1_000_000))
    fake.fail("GET", "uploads", answer)
    push(client)
    assert fake.blobs["a/b", BLOB.digest] == DATA
    assert fake.count("POST", "uploads") == 2


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504, 404, 416])
def test_trouble_during_the_upload(fake, client, code):
    fake.fail("PUT", "uploads", faults.status(code), times=2)
    push(client)
    assert fake.blobs["a/b", BLOB.digest] == DATA


@pytest.mark.parametrize(("code", "named"), [(500, "unavailable"), (429, "rate-limited"),
                                             (403, "denied"), (413, "rejected")])  # fmt: skip
def test_trouble_that_stays(fake, client, code, named):
    fake.fail("PUT", "uploads", faults.status(code), times=99)
    with pytest.raises(RegistryError) as caught:
        push(client)
    assert caught.value.code == named


def test_cut_up_always(fake, client):
    fake.fail("*", "uploads/n", faults.hang_up, times=99)
    with pytest.raises(RegistryError) as caught:
        push(client)
    assert caught.value.code == "unreachable"


def test_retry_after_during_the_upload(fake, client, clock):
    fake.fail("PUT", "uploads", faults.status(503, Retry_After="9"))
    push(client)
    assert 9 <= sum(clock.slept) < 10


@pytest.mark.parametrize("data", [DATA[:-1], DATA + b"x", bytes(len(DATA)), b"",
                                  DATA[:-1] + bytes([DATA[-1] ^ 1])])  # fmt: skip
@pytest.mark.parametrize("cut", [False, True])
def test_local_damage_is_found_before_the_blob_is_stored(fake, client, data, cut):
    if cut:
        fake.fail("PUT", "uploads", faults.cut_up(1_000_000))
    with pytest.raises(VerificationError) as caught:
        push(client, data)
    assert caught.value.code == "local-damage"
    assert not fake.blobs


def test_local_read_error_is_not_the_networks(fake, client):
    class Broken(io.BytesIO):
        def read(self, *_):
            raise OSError(5, "Input/output error")

    with pytest.raises(HostError, match="Input/output error"):
        client.push_blob("a/b", BLOB, Broken)
    assert not fake.blobs


def test_registry_that_says_the_digest_is_wrong(fake, client):
    fake.fail("PUT", "uploads", faults.status(400, "DIGEST_INVALID"), times=99)
    with pytest.raises(VerificationError) as caught:
        push(client)
    assert caught.value.code == "digest-mismatch"


def test_registry_that_stores_it_as_something_else(fake, client):
    fake.fail("PUT", "uploads", faults.status(201, Docker_Content_Digest="sha256:" + "0" * 64))
    with pytest.raises(VerificationError):
        push(client)


def test_upload_without_a_location(fake, client):
    fake.fail("POST", "uploads", faults.status(202))
    with pytest.raises(RegistryError) as caught:
        push(client)
    assert caught.value.code == "rejected"


@pytest.mark.parametrize("location", ["http://[bad", "http://h:port/x", "ftp://127.0.0.1/x"])
def test_upload_location_that_is_no_address(fake, client, location):
    fake.fail("POST", "uploads", faults.status(202, Location=location))
    with pytest.raises(RegistryError) as caught:
        push(client)
    assert caught.value.code in {"bad-address", "insecure-redirect"}


def test_deadline_while_the_registry_does_not_read(fake, make_client):
    fake.fail("PUT", "uploads", faults.never_answer, times=99)
    client = make_client(
        fake, timeouts=Timeouts(connect=2, read=0.3), retries=RetryPolicy(attempts=2)
    )
    data = random.Random(2).randbytes(20_000_000)  # more than the socket buffers hold
    with pytest.raises(RegistryError) as caught:
        push(client, data, describe(data, "x"))
    assert caught.value.code == "unreachable"


# -- there already


def test_has_blob(fake, client):
    fake.add_blob("a/b", DATA)
    assert client.has_blob("a/b", BLOB)
    assert not client.has_blob("a/c", BLOB)
    fake.fail("HEAD", "blobs", faults.status(503), times=99)
    with pytest.raises(RegistryError):
        client.has_blob("a/b", BLOB)


def test_mount(fake, client):
    fake.add_blob("a/b", DATA)
    assert client.mount_blob("c/d", BLOB, "a/b")
    assert client.has_blob("c/d", BLOB)
    assert not client.mount_blob("c/d", EMPTY, "a/b")
    assert not fake.uploads  # what the registry opened instead was cancelled
