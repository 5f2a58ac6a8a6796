from smolbuild.machine.egress_account import Account
from smolbuild.model.egress import EgressRecord


def record(url="", host="a.example", **more):
    return EgressRecord(host=host, port=80, url=url, status=more.pop("status", 200), **more)


def test_alike_requests_are_one_record_and_are_told_once():
    account = Account()
    for _ in range(3):
        account.add(record("http://a.example/x", sent=1, received=10))
    account.add(record("http://a.example/x", status=404))
    first, second = account.take()
    assert (first.requests, first.sent, first.received) == (3, 3, 30)
    assert (second.requests, second.status) == (1, 404)
    assert account.take() == ()


def test_what_is_open_counts_as_it_stands_and_not_again():
    account = Account()
    number = account.begin(record(status=0))
    assert account.take() == (record(status=0),)
    account.end(number, record(status=200))
    assert account.take() == ()


def test_a_flood_of_requests_is_bounded_and_pushes_nothing_out():
    account = Account()
    account.add(record("http://a.example/first"))
    account.add(record(host="evil.example", denied=True, status=403))
    for n in range(25_000):
        account.add(record(f"http://a.example/{n}"))
    account.add(record(host="late.example"))
    for n in range(30_000):
        account.add(record(host=f"{n}.example"))
    taken = account.take()
    assert len(taken) < 20_003
    assert sum(r.requests for r in taken) == 55_003
    hosts = {r.host for r in taken}
    assert {"a.example", "late.example", "evil.example", "*"} <= hosts
    assert record("http://a.example/first") in taken
