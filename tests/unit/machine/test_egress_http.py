import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolbuild.machine.egress_http import BadRequestError, answer, parse_request, parse_response


def head(first, *lines):
    return "\r\n".join([first, *lines, "", ""]).encode("latin-1")


def test_absolute_url():
    request = parse_request(
        head(
            "GET HTTP://Example.COM.:8080/a/b?token=1#x HTTP/1.1",
            "Host: elsewhere.test",
            "Connection: keep-alive, X-Private",
            "X-Private: 1",
            "Proxy-Authorization: Basic abc",
            "Accept: */*",
            "Upgrade: websocket",
        )
    )
    assert (request.method, request.host, request.port) == ("GET", "example.com", 8080)
    assert request.url == "http://example.com:8080/a/b"
    assert request.head().split(b"\r\n") == [
        b"GET /a/b?token=1 HTTP/1.1",
        b"Host: example.com:8080",
        b"Accept: */*",
        b"Connection: close",
        b"",
        b"",
    ]
    assert request.head(absolute_host="192.0.2.1").startswith(
        b"GET http://192.0.2.1:8080/a/b?token=1 HTTP/1.1\r\nHost: example.com:8080\r\n"
    )


@pytest.mark.parametrize(
    ("url", "path"), [("http://a.test", "/"), ("http://a.test?q", "/?q"), ("http://a.test#f", "/")]
)
def test_url_without_a_path(url, path):
    assert parse_request(head(f"GET {url} HTTP/1.1")).path == path


def test_connect():
    request = parse_request(head("CONNECT [2001:db8::1]:443 HTTP/1.1", "Host: x"))
    assert request.tunnel
    assert (request.host, request.port) == ("2001:db8::1", 443)
    assert request.url == ""


@pytest.mark.parametrize(
    ("first", "status"),
    [
        ("GET / HTTP/1.1", 400),
        ("GET https://a.test/ HTTP/1.1", 400),
        ("GET http://user:pw@a.test/ HTTP/1.1", 400),
        ("GET http://a.test:0/ HTTP/1.1", 400),
        ("GET http://a.test:99999/ HTTP/1.1", 400),
        ("GET http:///x HTTP/1.1", 400),
        ("GET http://127.1/ HTTP/1.1", 400),
        ("GET  http://a.test/ HTTP/1.1", 400),
        ("GET http://a.test/a b HTTP/1.1", 400),
        ("G(T http://a.test/ HTTP/1.1", 400),
        ("GET http://a.test/ HTTP/2.0", 505),
        ("CONNECT a.test HTTP/1.1", 400),
        ("CONNECT http://a.test/ HTTP/1.1", 400),
        ("CONNECT a.test:443/x HTTP/1.1", 400),
        ("", 400),
    ],
)
def test_request_lines_that_are_refused(first, status):
    with pytest.raises(BadRequestError) as caught:
        parse_request(head(first))
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["Content-Length: 5", "Content-Length: 5"], 400),
        (["Content-Length: 5", "Transfer-Encoding: chunked"], 400),
        (["Transfer-Encoding: chunked"], 411),
        (["Transfer-Encoding : chunked"], 400),
        (["Content-Length: +5"], 400),
        (["Content-Length: 5, 5"], 400),
        (["Content-Length: 0x5"], 400),
        (["Content-Length: 99999999999999999999"], 400),
        (["A: b", " folded"], 400),
        (["A: b\nContent-Length: 5"], 400),
        (["A: b\rX"], 400),
        (["A: b\0"], 400),
        (["no colon"], 400),
        ([": empty"], 400),
        (["A: b"] * 200, 400),
    ],
)
def test_ambiguous_heads_are_refused(lines, status):
    with pytest.raises(BadRequestError) as caught:
        parse_request(head("POST http://a.test/ HTTP/1.1", *lines))
    assert caught.value.status == status


def test_a_connection_option_cannot_drop_the_length():
    request = parse_request(
        head("POST http://a.test/ HTTP/1.1", "Connection: Content-Length", "Content-Length: 5")
    )
    assert request.body_length == 5
    assert b"Content-Length: 5\r\n" in request.head()


@given(st.binary(max_size=300))
def test_any_bytes_are_understood_or_refused(data):
    try:
        request = parse_request(data + b"\r\n\r\n")
    except BadRequestError:
        return
    assert request.head().count(b"\r\n\r\n") == 1


def test_responses():
    status, clean, length = parse_response(
        head("HTTP/1.0 200 OK", "Content-Length: 7", "Connection: keep-alive", "X: y"), "GET"
    )
    assert (status, length) == (200, 7)
    assert clean == head("HTTP/1.1 200 OK", "Content-Length: 7", "X: y", "Connection: close")
    assert parse_response(head("HTTP/1.1 200 OK", "Content-Length: 7"), "HEAD")[2] == 0
    assert parse_response(head("HTTP/1.1 304 No"), "GET")[2] == 0
    assert parse_response(head("HTTP/1.1 200"), "GET")[2] is None
    chunked = head("HTTP/1.1 200 OK", "Transfer-Encoding: chunked", "Content-Length: 3")
    assert parse_response(chunked, "GET")[2] is None
    for bad in (
        head("HTTP/2 200 OK"),
        head("200 OK"),
        head("HTTP/1.1 200 OK", "Content-Length: 1", "Content-Length: 2"),
        head("HTTP/1.1 200 OK", "x"),
    ):
        with pytest.raises(BadRequestError) as caught:
            parse_response(bad, "GET")
        assert caught.value.status == 502


def test_our_own_answers_have_a_length():
    first, _, body = answer(403, "no").partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 403 Forbidden\r\n")
    assert f"Content-Length: {len(body)}".encode() in first
