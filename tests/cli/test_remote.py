"""The remote cache through the command: another home gets the artifact and builds nothing."""

import shutil
from pathlib import Path

import pytest
from testing_registry import docker_registry

from smolbuild.store.artifact import open_artifact
from smolbuild.store.evidence import StoreEvidence
from smolbuild.store.layout import Store
from smolbuild.trust.keyring import trusted_keys
from smolbuild.trust.statement import PROVENANCE_TYPE
from smolbuild.trust.verify import verify_signed


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    with docker_registry(Path(tmp_path_factory.mktemp("remote-registry"))) as host:
        yield host


@pytest.fixture(scope="module")
def published(smolbuild, built, project, registry):
    """Give the repository that holds the tiny project's artifact under its key."""
    done = smolbuild(
        "build", "-C", str(project), "-t", "tiny:v1", "--push", f"{registry}/team/env:v1", "--json"
    )
    assert done.status == 0, done.stderr
    assert done.document("build")["pushed"]["digest"] == built["digest"]
    return f"{registry}/team/env"


@pytest.fixture
def desk(fresh, smolbuild):
    """Give a home with an empty cache, kernel and agent too, that trusts the publisher."""
    for shared in ("kernel", "agent", "debs"):
        (fresh.home.cache / shared).unlink()
    shutil.copy(smolbuild.home.keys / "default.pub", fresh.home.keys / "ci.pub")
    return fresh


def checkout(project: Path, directory: Path) -> Path:
    """Copy the project as another machine would have it."""
    return Path(shutil.copytree(project, directory, symlinks=True))


def test_another_home_gets_the_artifact_without_booting_a_machine(
    desk, built, published, project, tmp_path
):
    tree = checkout(project, tmp_path / "elsewhere")
    boots = desk.boots()
    done = desk("build", "-C", str(tree), "--locked", "--cache-registry", published, "--json")
    assert done.status == 0, done.stderr
    value = done.document("build")
    assert (value["digest"], value["key"]) == (built["digest"], built["key"])
    assert (value["origin"], value["reused"]) == ("remote", True)
    assert desk.boots() == boots
    for part in ("base", "kernel", "agent", "debs"):  # nothing is made, fetched or compiled
        assert not (desk.home.cache / part).exists()
    again = desk("build", "-C", str(tree), "--json").document("build")
    assert (again["digest"], again["origin"]) == (built["digest"], "local")
    assert desk.boots() == boots
    store = Store(desk.home.store)
    made = verify_signed(
        open_artifact(store, value["digest"]).manifest.descriptor,
        StoreEvidence(store),
        predicate_type=PROVENANCE_TYPE,
        keys=trusted_keys(desk.home),
    )
    definition = made.statement.predicate["buildDefinition"]
    assert definition["externalParameters"]["key"] == built["key"]
    names = {entry.get("name") for entry in definition["resolvedDependencies"]}
    assert {"base", "kernel", "two.txt", "www/index.html"} <= names
    out = desk("run", value["name"], "--", "cat", "/one")
    assert (out.status, out.stdout) == (0, "one\n"), out.stderr


def test_an_untrusted_cache_is_a_warning_and_the_build_goes_on(
    fresh, built, published, own_project
):
    fresh("key", "generate")  # some other key
    smolfile = own_project / "Smolfile"
    smolfile.write_text(smolfile.read_text() + f'\n[smolbuild.cache]\nregistry = "{published}"\n')
    done = fresh("build", "-C", str(own_project), "--json")
    assert done.status == 0, done.stderr
    value = done.document("build")
    assert value["key"] == built["key"], "the cache's address is not part of the key"
    assert value["origin"] == "built"
    assert "a key you do not trust" in done.stderr


def test_a_cache_without_a_registry_is_a_usage_error(smolbuild, built, project):
    done = smolbuild("build", "-C", str(project), "--cache-push", "--json")
    assert done.status == 2
    assert done.document("error")["error"]["code"] == "cache-registry"


def test_plan_says_what_the_policies_and_the_remote_cache_mean(
    smolbuild, built, published, own_project
):
    smolfile = own_project / "Smolfile"
    plain = smolfile.read_text()
    smolfile.write_text(plain + '\n[smolbuild.policy]\nmax_age = "1s"\n')
    over = smolbuild("plan", "-C", str(own_project), "--json").document("plan")
    assert over["key"] == built["key"]
    assert (over["artifact"], over["age"]["over"], over["age"]["limit"]) == (None, True, 1)
    assert {step["state"] for step in over["steps"]} == {"will run"}
    assert "older than 1s" in over["steps"][0]["why"]
    assert (over["remote"], over["drift"]) == (None, None)
    smolfile.write_text(plain + '\n[smolbuild.policy]\nmax_age = "7d"\n')
    argv = ("plan", "-C", str(own_project), "--remote", "--cache-registry")
    young = smolbuild(*argv, published, "--check-drift", "--json").document("plan")
    assert (young["artifact"], young["age"]["over"]) == (built["digest"], False)
    assert (young["remote"], young["drift"]["state"]) == ("yes", "none")
    text = smolbuild(*argv, published.replace("team", "nobody")).stdout
    assert "\nremote   no\n" in text
    assert "limit 7d" in text


def test_undeclared_inputs_end_the_build_where_the_policy_says_so(smolbuild, built, own_project):
    smolfile = own_project / "Smolfile"
    policy = '\n[smolbuild.policy]\nundeclared = "fail"\n'
    plain = smolfile.read_text()
    smolfile.write_text(plain.replace('"GREETING=hello"', '"HOME"') + policy)
    assert smolbuild("lock", "-C", str(own_project)).status == 0
    boots = smolbuild.boots()
    early = smolbuild("build", "-C", str(own_project), "--json")
    assert early.status == 2
    error = early.document("error")["error"]
    assert error["code"] == "undeclared"
    assert "HOME takes the host's value" in error["message"]
    assert smolbuild.boots() == boots

    # A static busybox can ask a proxy by its address, but look up no names.
    step = 'run = "wget -q http://elsewhere.example.com:80/ || echo one > /one"'
    asking = plain.replace('run = "echo one > /one; echo said by step one"', step)
    assert asking != plain
    smolfile.write_text(
        asking.replace(
            "\n[smolbuild]\n", '\n[network]\nallow_hosts = ["x.example.com"]\n[smolbuild]\n'
        )
        + policy
    )
    late = smolbuild("build", "-C", str(own_project), "--json")
    assert late.status == 1, late.stderr
    error = late.document("error")["error"]
    assert error["code"] == "undeclared"
    assert "step one asked for" in error["message"]
    assert "elsewhere.example.com" in error["message"]
