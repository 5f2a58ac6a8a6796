import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smolbuild.machine.egress_rules import Rules, normal_host

NAMES = st.from_regex(r"[a-z][a-z0-9]{0,8}(\.[a-z][a-z0-9]{0,8}){1,3}", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("Example.COM.", "example.com"),
        ("192.0.2.1", "192.0.2.1"),
        ("[2001:DB8::1]", "2001:db8::1"),
        ("localhost", "localhost"),
        ("_srv.example.com", "_srv.example.com"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
    ],
)
def test_hosts_have_one_form(text, host):
    assert normal_host(text) == host


@pytest.mark.parametrize(
    "text",
    ["", ".", "a..b", "127.1", "0x7f000001", "2130706433", "0177.0.0.1", "1.2.3.4.5", "a b", "a/b",
     "-a.example", "a@b", "bücher.example", "[192.0.2.1]", "[::1", "fe80::1%eth0", "a" * 64,
     "x\0y"],
)  # fmt: skip
def test_what_is_no_host(text):
    assert normal_host(text) is None


def test_names_and_patterns():
    rules = Rules.parse(("Example.com", "*.example.org", "api-*.example.net"), ())
    assert rules.allow_name("example.com")
    assert rules.allow_name("a.b.example.org")
    assert rules.allow_name("api-7.example.net")
    assert Rules.parse(("*",), ()).allow_name("anything.example")
    for host in ("www.example.com", "example.org", "example.com.evil.test", "evil-example.org",
                 "aexample.com", "api-.example.net", "exampleXorg"):  # fmt: skip
        assert not rules.allow_name(host)


@given(NAMES, NAMES)
def test_a_name_allows_itself_only(name, other):
    rules = Rules.parse((name,), ())
    assert rules.allow_name(name)
    assert rules.allow_name(other) == (other == name)
    assert Rules.parse((f"*.{name}",), ()).allow_name(f"{other}.{name}")
    assert not Rules.parse((f"*.{name}",), ()).allow_name(name)


@pytest.mark.parametrize("entry", ["", "http://a", "a:80", "a b", "a.*b c", "300.1.1.1", "127.1"])
def test_junk_is_refused(entry):
    with pytest.raises(ValueError, match=r"."):
        Rules.parse((entry,), ())


def choose(rules, host, *addresses, own=()):
    parsed = [ipaddress.ip_address(a) for a in addresses]
    chosen = rules.choose(host, parsed, own=frozenset(ipaddress.ip_address(a) for a in own))
    return [str(address) for address in chosen]


def test_a_name_that_points_at_the_host_is_refused():
    rules = Rules.parse(("example.com",), ())
    bad = ["127.0.0.1", "127.9.9.9", "169.254.169.254", "0.0.0.0", "224.0.0.1", "255.255.255.255",
           "::1", "fe80::1", "::", "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.1.1"]  # fmt: skip
    assert choose(rules, "example.com", *bad) == []
    assert choose(rules, "example.com", "203.0.113.9", "10.0.0.5", own=("10.0.0.5",)) == [
        "203.0.113.9"
    ]
    assert choose(rules, "example.com", "10.0.0.6", "2606:4700::1") == ["10.0.0.6", "2606:4700::1"]
    assert choose(rules, "other.example", "203.0.113.9") == []


def test_a_network_allows_even_the_host_when_it_says_so():
    rules = Rules.parse(("127.0.0.1",), ("198.51.100.0/24", "2001:db8::/32"))
    assert choose(rules, "127.0.0.1", "127.0.0.1", own=("127.0.0.1",)) == ["127.0.0.1"]
    assert choose(rules, "127.0.0.2", "127.0.0.2") == []
    assert choose(rules, "x.example", "198.51.100.7", "203.0.113.1", "2001:db8::5") == [
        "198.51.100.7",
        "2001:db8::5",
    ]
    assert choose(rules, "x.example", "::ffff:198.51.100.7") == ["::ffff:c633:6407"]


def test_an_empty_list_allows_nothing():
    assert choose(Rules(), "example.com", "203.0.113.1") == []


def test_a_network_that_holds_everything_does_not_mean_the_host_itself():
    rules = Rules.parse(("example.com",), ("0.0.0.0/0", "192.168.0.0/16"))
    assert choose(rules, "x.example", "127.0.0.1", "169.254.169.254") == []
    own = ("10.0.0.5", "192.168.0.5")
    assert choose(rules, "x.example", "10.0.0.5", "192.168.0.5", "10.0.0.6", own=own) == [
        "192.168.0.5",
        "10.0.0.6",
    ]


def test_only_what_is_named_is_looked_up():
    rules = Rules.parse(("example.com",), ("192.0.2.0/24",))
    assert rules.may_ask("example.com")
    assert rules.may_ask("192.0.2.7")
    assert not rules.may_ask("198.51.100.7")
    assert not rules.may_ask("data.evil.example")
    assert Rules.parse((), ("0.0.0.0/0",)).may_ask("any.example")
