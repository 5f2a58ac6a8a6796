"""The Smolfile parser: what it reads, what it refuses, and that nothing else ever comes out."""

import string
import textwrap
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smolbuild.core.errors import Problem, SmolfileError, UsageError
from smolbuild.model.parse import parse_smolfile, parse_text, sibling_path
from smolbuild.model.schema import SHAPES
from smolbuild.model.smolfile import (
    Base,
    Copy,
    Dockerfile,
    ExecProbe,
    FileProbe,
    Health,
    HttpProbe,
    Network,
    Notice,
    PortProbe,
    Restart,
    Scrub,
    SecretSource,
    Smolfile,
)


def parse(text: str, **environment: str) -> Smolfile:
    return parse_text(textwrap.dedent(text), file="Smolfile", environment=environment)


def problems(text: str, sibling: str | None = None) -> list[str]:
    with pytest.raises(SmolfileError) as caught:
        parse_text(
            textwrap.dedent(text),
            file="Smolfile",
            environment={},
            sibling=None if sibling is None else ("smolbuild.toml", textwrap.dedent(sibling)),
        )
    assert caught.value.exit_status == 2
    return [str(problem) for problem in caught.value.problems]


def loud(smolfile: Smolfile) -> list[Notice]:
    return [notice for notice in smolfile.notices if notice.loud]


# What upstream knows


def test_a_plain_smolvm_file_builds_unchanged() -> None:
    smolfile = parse(
        """\
        image = "./image.tar"
        cpus = 2
        memory = 512
        init = ["apk add jq", '''
        cat <<'EOF' > /etc/x
        [smolbuild]
        a = "b"
        EOF
        ''']
        """
    )
    assert [step.name for step in smolfile.steps] == ["init-1", "init-2"]
    assert "[smolbuild]" in smolfile.steps[1].run
    assert [step.line for step in smolfile.steps] == [4, 4]
    assert smolfile.where(smolfile.steps[1].key) == ("Smolfile", 4)
    assert (smolfile.cpus, smolfile.memory, smolfile.overlay) == (2, 512, 10)
    assert smolfile.network == Network(mode="off")
    assert smolfile.notices == ()


def test_defaults_are_upstreams() -> None:
    smolfile = parse('image = "x"')
    assert (smolfile.cpus, smolfile.memory, smolfile.storage) == (4, 8192, 20)
    assert smolfile.restart == Restart(policy="never", max_retries=0, max_backoff=300)
    assert smolfile.entrypoint is None
    assert parse('image = "x"\nentrypoint = []').entrypoint is None


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("net = true", Network(mode="full")),
        ("net = false", Network(mode="off")),
        ("[network]", Network(mode="off")),
        ("net = true\n[network]", Network(mode="full")),
        (
            "net = false\n[network]\nallow_hosts = [' API.example.com. ', 'api.example.com']",
            Network(mode="allow", allow_hosts=("api.example.com",)),
        ),
        (
            "[network]\nallow_cidrs = ['192.0.2.7', '10.1.2.3/8', '2001:db8::1']",
            Network(mode="allow", allow_cidrs=("192.0.2.7/32", "10.0.0.0/8", "2001:db8::1/128")),
        ),
        (
            "[network]\nallow_host_patterns = ['*.example.com', 'a.example.com']",
            Network(mode="allow", allow_host_patterns=("*.example.com", "a.example.com")),
        ),
    ],
)
def test_network_modes(text: str, network: Network) -> None:
    assert parse(f'image = "x"\n{text}').network == network


def test_environment_follows_upstreams_rules() -> None:
    smolfile = parse(
        'image = "x"\nenv = [" A=1 ", "B=x=y", "C=", "HOME", "=dropped", "A=2"]', HOME="/home/me"
    )
    assert dict(smolfile.env) == {"A": "2", "B": "x=y", "C": "", "HOME": "/home/me"}
    assert smolfile.imported_env == ("HOME",)
    texts = {notice.key: notice.text for notice in smolfile.notices}
    assert "does not declare" in texts["env[3]"]
    assert "dropped" in texts["env[4]"]


def test_a_bare_name_that_the_host_lacks_is_an_error() -> None:
    (problem,) = problems('image = "x"\nenv = [\n  "A=1",\n  "TOKEN",\n]')
    assert problem.startswith("Smolfile:4: env[1]: TOKEN takes the host's value")


@pytest.mark.parametrize(
    ("ports", "pairs"),
    [
        ('["8080:80"]', ((8080, 80),)),
        ('["8080"]', ((8080, 8080),)),
        ('["5173-5175:80-82", "1"]', ((5173, 80), (5174, 81), (5175, 82), (1, 1))),
        ('["7-8"]', ((7, 7), (8, 8))),
    ],
)
def test_ports(ports: str, pairs: tuple[tuple[int, int], ...]) -> None:
    assert parse(f'image = "x"\nports = {ports}').ports == pairs


def test_dev_is_left_out_loudly() -> None:
    smolfile = parse(
        """\
        image = "x"
        init = ["a"]
        [dev]
        init = ["make world"]
        env = ["A=1"]
        """
    )
    assert [step.run for step in smolfile.steps] == ["a"]
    assert smolfile.env == ()
    (notice,) = loud(smolfile)
    assert "smolbuild.use_dev = true" in notice.text
    assert notice.line == 4


def test_dev_is_applied_when_asked_for() -> None:
    smolfile = parse(
        """\
        image = "x"
        init = ["a"]
        env = ["A=1", "B=1"]
        workdir = "/top"
        user = "top"
        ports = ["1"]
        [dev]
        init = ["make world"]
        env = ["A=2"]
        workdir = "/dev/dir"
        user = "501:20"
        ports = ["2"]
        volumes = ["./src:/src:rw"]
        [smolbuild]
        use_dev = true
        """
    )
    assert [step.run for step in smolfile.steps] == ["make world"]
    assert dict(smolfile.env) == {"A": "2", "B": "1"}
    assert (smolfile.workdir, smolfile.user) == ("/dev/dir", "501:20")
    assert (smolfile.ports, smolfile.volumes) == (((2, 2),), ("./src:/src:rw",))
    assert not loud(smolfile)


def test_an_empty_dev_list_replaces_nothing() -> None:
    smolfile = parse('image="x"\ninit=["a"]\n[dev]\ninit=[]\n[smolbuild]\nuse_dev=true')
    assert [step.run for step in smolfile.steps] == ["a"]


def test_artifact_overrides_and_wins_over_pack() -> None:
    text = 'image="x"\ncpus=1\nmemory=64\ncmd=["a"]\n[pack]\ncpus=9\nmemory=99\n'
    assert parse(text).memory == 99
    both = parse(text + '[artifact]\ncpus=3\noci_platform="linux/arm64/v8"\n')
    assert (both.cpus, both.memory, both.cmd) == (3, 64, ("a",))
    assert both.platform == "linux/arm64/v8"
    assert [notice.key for notice in both.notices] == ["pack"]


@pytest.mark.parametrize(
    "line",
    [
        "gpu = true",
        "cuda = true",
        "auto_graph = true",
        "rosetta = true",
        "docker_socket = true",
        "stop_on_exit = true",
        "gpu_vram = 1024",
        'net_backend = "tsi"',
        'block_io = "async"',
        'ports = ["80"]',
        'volumes = ["./a:/a"]',
        "storage = 40",
        "auth.ssh_agent = true",
        "service.port = 80",
        'restart.policy = "Always"',
        "branch.enabled = true",
        "fork.enabled = true",
        'network.credentials = [{name="n", environment_variable="V", allowed_hosts=["h"]}]',
    ],
)
def test_what_is_not_part_of_the_artifact_is_said_once(line: str) -> None:
    notices = parse(f'image = "x"\n{line}').notices
    assert len(notices) == 1
    assert "not part of the artifact" in notices[0].text
    assert notices[0].line == 2
    assert not notices[0].loud


@pytest.mark.parametrize("line", ["gpu = false", "auth.ssh_agent = false", "stop_on_exit = false"])
def test_what_is_switched_off_needs_no_word(line: str) -> None:
    assert parse(f'image = "x"\n{line}').notices == ()


def test_health_of_upstream() -> None:
    text = 'image="x"\n[health]\nexec=["a","b"]\ninterval="500ms"\ntimeout="2s"\nretries=20'
    assert parse(text).health == Health(
        probe=ExecProbe(argv=("a", "b")), interval=0.5, timeout=2, retries=20
    )
    assert parse('image="x"\n[health]\ninterval="1"').health is None


def test_secrets_and_their_implied_sources() -> None:
    smolfile = parse(
        """\
        image = "x"
        [secrets]
        A = { from_env = "HOST_A" }
        B = { from_file = "/run/b" }
        [[smolbuild.step]]
        run = "x"
        secrets = ["A", "C"]
        """
    )
    assert smolfile.secrets == {
        "A": SecretSource(from_env="HOST_A"),
        "B": SecretSource(from_file="/run/b"),
        "C": SecretSource(from_env="C"),
    }


# What smolbuild adds


def test_secrets_of_ours_may_be_relative_or_come_from_a_command() -> None:
    smolfile = parse(
        """\
        image = "x"
        [secrets]
        A = { from_env = "HOST_A" }
        [smolbuild.secrets]
        B = { from_file = "keys/b" }
        C = { from_command = ["pass", "show", "c"] }
        [smolbuild.scrub]
        run = ["rm /x"]
        allow = ["sha256:0123456789abcdef", "/etc/ssh/"]
        """
    )
    assert smolfile.secrets == {
        "A": SecretSource(from_env="HOST_A"),
        "B": SecretSource(from_file="keys/b"),
        "C": SecretSource(from_command=("pass", "show", "c")),
    }
    assert smolfile.scrub == Scrub(run=("rm /x",), allow=("sha256:0123456789abcdef", "/etc/ssh/"))
    assert smolfile.guarded


def test_a_scrub_table_without_commands_cleans_only_with_an_empty_list() -> None:
    assert parse('image = "x"\n[smolbuild.scrub]').scrub.run is None
    assert parse('image = "x"\n[smolbuild.scrub]\nrun = []').scrub.run == ()
    assert not parse('image = "x"').guarded


def base_of(text: str) -> Base | Dockerfile | None:
    return parse(f"[smolbuild.base]\n{text}").base


def test_a_dockerfile_as_base() -> None:
    assert base_of('dockerfile = "./d//Dockerfile"') == Dockerfile(dockerfile="d/Dockerfile")
    text = 'dockerfile = "D"\ntarget = "run"\nargs = { B = "2", A = "" }\ncontext = "app/"'
    assert base_of(text) == Dockerfile(
        dockerfile="D", target="run", args=(("A", ""), ("B", "2")), context="app"
    )
    sibling = parse_text(
        "", file="Smolfile", sibling=("smolbuild.toml", '[base]\ndockerfile = "Dockerfile"')
    )
    assert sibling.base == Dockerfile(dockerfile="Dockerfile")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "debian is missing, or dockerfile"),
        ('debian = "bookworm"\ndockerfile = "D"', "debian and dockerfile are both there"),
        ('debian = "bookworm"\ntarget = "x"', "target: it means nothing beside debian"),
        ('dockerfile = "D"\npackages = ["x"]', "packages: it means nothing beside dockerfile"),
        ('dockerfile = "D"\nargs = ["A=1"]', "expected a table of strings, got a list"),
        ('dockerfile = "D"\nargs = { A = 1 }', "args.A: expected a string, got 1"),
        ('dockerfile = "D"\nargs = { "A B" = "1" }', "expected a name"),
        ('dockerfile = "../D"', "base.dockerfile"),
        ('dockerfile = "D"\ncontext = "/x"', "base.context"),
    ],
)
def test_what_a_base_cannot_be(text: str, message: str) -> None:
    found = problems(f"[smolbuild.base]\n{text}")
    assert any(message in problem for problem in found), found


def test_arguments_that_look_like_secrets_get_a_loud_word() -> None:
    text = '[smolbuild.base]\ndockerfile = "D"\nargs = { NPM_TOKEN = "x", VERSION = "1" }'
    (notice,) = parse(text).notices
    assert notice.loud
    assert "NPM_TOKEN looks like a secret" in notice.text


def test_smolbuild_keys() -> None:
    smolfile = parse(
        """\
        init = ["one"]
        [smolbuild]
        name = "acme/agent-env"
        resume = "disk"
        kernel = "./vmlinuz"
        copy = [{ from = "./src//x/", to = "//app/./y/", mode = "0640", owner = "a:b" }]
        [smolbuild.base]
        debian = "bookworm"
        packages = ["postgresql", "python3=3.11.2-1+b1"]
        [[smolbuild.step]]
        run = "seed"
        inputs = ["seed.sql", "."]
        network = ["A.example.com"]
        env = ["X=1"]
        timeout = 90
        [[smolbuild.step]]
        name = "last"
        run = "x"
        network = false
        [smolbuild.restore]
        regenerate = ["machine-id"]
        hold = true
        [smolbuild.policy]
        max_age = "7d"
        max_ready_ms = 900
        [smolbuild.cache]
        max_size = "1GiB"
        """
    )
    assert smolfile.name == "acme/agent-env"
    assert smolfile.base == Base(debian="bookworm", packages=("postgresql", "python3=3.11.2-1+b1"))
    assert smolfile.copy == (Copy(source="src/x", to="/app/y/", mode=0o640, owner="a:b"),)
    assert [step.name for step in smolfile.steps] == ["init-1", "step-1", "last"]
    seed = smolfile.steps[1]
    assert (seed.inputs, seed.timeout, seed.env) == (("seed.sql", "."), 90, (("X", "1"),))
    assert smolfile.network_of(seed) == Network(mode="allow", allow_hosts=("a.example.com",))
    assert smolfile.network_of(smolfile.steps[2]) == Network(mode="off")
    assert smolfile.where(seed.key) == ("Smolfile", 10)
    assert smolfile.restore.regenerate == ("machine-id",)
    assert smolfile.policy.max_age == 7 * 86400
    assert smolfile.cache.max_size == 1 << 30


@pytest.mark.parametrize(
    ("ready", "probe"),
    [
        ("{ port = 80 }", PortProbe(port=80)),
        ("{ port = 80, host = 'localhost' }", PortProbe(port=80)),
        ("{ http = 'http://localhost:8000/x?y=1' }", HttpProbe(port=8000, path="/x?y=1")),
        ("{ http = 'http://127.0.0.1' }", HttpProbe(port=80)),
        (
            "{ http = { port = 8, path = '/h', status = 204, contains = 'ok' } }",
            HttpProbe(port=8, path="/h", status=204, contains="ok"),
        ),
        ("{ file = '/run/x' }", FileProbe(path="/run/x")),
        ("{ exec = ['a', 'b c'] }", ExecProbe(argv=("a", "b c"))),
    ],
)
def test_probes(ready: str, probe: object) -> None:
    service = f"[[smolbuild.service]]\nname='s'\nrun='r'\nready={ready}"
    assert parse(f'image="x"\n{service}').services[0].ready == probe
    fields = ready.strip("{} ").replace(", host", "\nhost")
    if "port = 8," not in ready:
        health = parse(f'image="x"\n[smolbuild.health]\n{fields}\nretries=7').health
        assert health is not None
        assert (health.probe, health.retries) == (probe, 7)


def test_the_sibling_file_says_the_same(tmp_path: Path) -> None:
    upstream = 'image = "x"\n'
    inner = '\nname = "n"\n[[step]]\nrun = "seed"\n[policy]\nmax_age = "1d"\n'
    one = (
        upstream
        + "[smolbuild]"
        + inner.replace("[[step", "[[smolbuild.step").replace("[policy", "[smolbuild.policy")
    )
    (tmp_path / "one").mkdir()
    (tmp_path / "one/Smolfile").write_text(one)
    (tmp_path / "Smolfile").write_text(upstream)
    (tmp_path / "smolbuild.toml").write_text(inner)
    alone = parse_smolfile(tmp_path / "one/Smolfile", environment={})
    both = parse_smolfile(tmp_path / "Smolfile", environment={})
    assert (both.name, both.steps, both.policy) == (alone.name, alone.steps, alone.policy)
    assert both.sibling == tmp_path / "smolbuild.toml"
    assert both.where(both.steps[0].key) == (str(tmp_path / "smolbuild.toml"), 3)
    assert alone.where(alone.steps[0].key) == (str(tmp_path / "one/Smolfile"), 4)


def test_names_of_sibling_files() -> None:
    assert sibling_path(Path("d/Smolfile")) == Path("d/smolbuild.toml")
    assert sibling_path(Path("d/db.smolfile")) == Path("d/db.smolbuild.toml")


def test_problems_of_both_files_come_together() -> None:
    found = problems('image = "x"\ncpu = 1\n', "steps = []\n[cache]\nmax_size = 'big'\n")
    assert [text.split(":")[:3] for text in found] == [
        ["Smolfile", "2", " cpu"],
        ["smolbuild.toml", "1", " steps"],
        ["smolbuild.toml", "3", " cache.max_size"],
    ]


def test_our_table_in_both_files_is_an_error() -> None:
    (problem,) = problems('image = "x"\n[smolbuild]\nname = "a"', "name = 'b'")
    assert (
        problem
        == "Smolfile:2: smolbuild: smolbuild.toml holds the same table (keep one of the two)"
    )


# What is refused


def test_an_unknown_key_that_is_near_none_lists_a_small_table() -> None:
    service = """
        image = "x"
        [[smolbuild.service]]
        name = "a"
        run = "b"
        ready = { port = 80, timeout = "5s" }
        """
    (problem,) = problems(service)
    assert problem == (
        "Smolfile:6: smolbuild.service[0].ready.timeout: unknown key "
        "(known here: port, host, http, file, exec)"
    )


def test_all_problems_at_once_with_line_key_and_nearest_key() -> None:
    found = problems(
        """\
        image = "x"
        memroy = 512
        cpus = 0
        [health]
        exec = "curl"
        interval = "5 parsecs"
        [restart]
        policy = "allways"
        [smolbuild]
        steps = []
        [[smolbuild.step]]
        run = "a"
        timeout = "1.5h"
        """
    )
    assert found == [
        "Smolfile:2: memroy: unknown key (did you mean memory?)",
        "Smolfile:3: cpus: expected a whole number from 1 to 255, got 0",
        'Smolfile:5: health.exec: expected a list of strings, got "curl" (write exec = ["curl"])',
        (
            "Smolfile:6: health.interval: expected a duration such as 500ms, 2s, 5m, 1h or 7d, or "
            'whole seconds, got "5 parsecs"'
        ),
        (
            'Smolfile:8: restart.policy: expected one of "never", "always", "on-failure", '
            '"unless-stopped", got "allways" (did you mean always?)'
        ),
        "Smolfile:10: smolbuild.steps: unknown key (did you mean step?)",
        (
            "Smolfile:13: smolbuild.step[0].timeout: expected a duration such as 500ms, 2s, 5m, "
            '1h or 7d, or whole seconds, got "1.5h"'
        ),
    ]


STEP = "[[smolbuild.step]]\nrun = 'x'\n"
SERVICE = "[[smolbuild.service]]\nname = 's'\nrun = 'x'\n"
COPY = "[smolbuild]\ncopy = [{ from = 'a', to = '/a', %s }]"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("cpus = true", 2, "cpus: expected a whole number"),
        ("memory = 63", 2, "from 64"),
        ("memory = 5000000000", 2, "from 64"),
        ("overlay = 0", 2, "overlay"),
        ("storage = -1", 2, "storage"),
        ("net = 'yes'", 2, "net: expected true or false"),
        ("workdir = 'app'", 2, "absolute path"),
        ("user = 'a b'", 2, "user name or uid"),
        ("user = ''", 2, "user name or uid"),
        ("env = ['A B=1']", 2, "white space"),
        ("env = 'A=1'", 2, "write env = ["),
        ("env = [1]", 2, "env[0]: expected a string, got 1"),
        ("ports = ['0']", 2, "1 to 65535"),
        ("ports = ['80:70000']", 2, "1 to 65535"),
        ("ports = ['2-1']", 2, "1 to 65535"),
        ("ports = ['1-2:1']", 2, "differ in length"),
        ("ports = ['http']", 2, "expected ports such as"),
        ("ports = [\n'1',\n'1:2']", 4, "host port 1 is mapped twice"),
        ("ports = ['1-65']", 2, "more than 64"),
        ("volumes = ['./a']", 2, "expected a volume"),
        ("volumes = ['./a:b']", 2, "expected a volume"),
        ("volumes = ['./a:/b:rx']", 2, "expected a volume"),
        ("volumes = ['a:/x', 'b:/x/']", 2, "two volumes"),
        ("net_backend = 'tap'", 2, "virtio-net"),
        ("network.allow_hosts = ['https://example.com/x']", 2, "without scheme"),
        ("network.allow_hosts = ['*.example.com']", 2, "subdomains are allowed too"),
        ("network.allow_host_patterns = ['a.*.example.com']", 2, "host name"),
        ("network.allow_cidrs = ['10.0.0.0/33']", 2, "range such as"),
        ("network.credentials = [{ name = 'n' }]", 2, "environment_variable is missing"),
        ("branch.pool_size = 2", 2, "needs cuda"),
        ("branch.pool_size = 0\ncuda = true", 2, "from 1"),
        ("branch.cuda_vram_limit_mib = 2", 2, "needs pool_size"),
        ("branch.enabled = true\nfork.enabled = true", 3, "two names of one table"),
        ("secrets.A = {}", 2, "exactly one of"),
        ("secrets.A = { from_env = 'A', from_file = '/a' }", 2, "exactly one of"),
        ("secrets.A = { from_file = 'a' }", 2, "absolute path"),
        ("secrets.A = { from_stor = 'a' }", 2, "unknown key"),
        ("secrets.A = 'value'", 2, "expected a table"),
        ("secrets.A = { from_command = ['a'] }", 2, "unknown key"),
        ("smolbuild.secrets.A = {}", 2, "exactly one of"),
        ("smolbuild.secrets.A = { from_command = [] }", 2, "a program and its arguments"),
        ("smolbuild.secrets.A = { from_command = 'pass x' }", 2, "expected a list"),
        ("secrets.A.from_env = 'A'\nsmolbuild.secrets.A.from_env = 'A'", 3, "names it too"),
        ("smolbuild.scrub.allow = ['etc']", 2, "absolute path"),
        ("artifact.oci_platform = 'amd64'", 2, "linux/amd64"),
        ("step = []", 2, "belongs into [smolbuild]"),
        ("health.retries = 0", 2, "from 1"),
        ("health.timeout = '0s'\nhealth.exec = ['a']", 2, "above zero"),
        ("run = 'a\\u0000b'\n" + STEP, 2, "unknown key"),
        ('entrypoint = ["a\\u0000b"]', 2, "NUL"),
        (STEP + "name = 'a b'", 4, "a name of letters"),
        (STEP + "name = 'a'\n" + STEP + "name = 'a'", 7, "another step named a"),
        ("init = ['x']\n" + STEP + "name = 'init-1'", 5, "another step named init-1"),
        (STEP + STEP + "name = 'step-1'", 6, "another step named step-1"),
        (SERVICE + SERVICE, 6, "another service named s"),
        ("[[smolbuild.service]]\nname = 's'", 2, "run is missing"),
        ("[smolbuild.cache]\nregistry = 'r.example.com/x:tag'", 3, "no tag and no digest"),
        ("[smolbuild.cache]\nregistry = 'https://r.example.com/x'", 3, "scheme"),
        ("[[smolbuild.service]]\nrun = 's'", 2, "name is missing"),
        ("[[smolbuild.step]]\nrun = ' '", 3, "expected a command"),
        ("[smolbuild.step]\nrun = 'x'", 2, "expected a list of tables"),
        (STEP + "network = true", 4, "allows no network"),
        (STEP + "network = 'x'", 4, "true, false or a list"),
        (STEP + "inputs = ['../x']", 4, "outside the Smolfile's directory"),
        (STEP + "inputs = ['/etc/passwd']", 4, "relative path"),
        (STEP + "inputs = ['a/../../x']", 4, "outside"),
        (STEP + "secrets = ['A B']", 4, "name of a secret"),
        (STEP + "timeout = 0", 4, "above zero"),
        (SERVICE + "ready_timeout = '0s'", 5, "above zero"),
        (SERVICE + "ready = {}", 5, "expected one of port, http, file and exec, got none"),
        (SERVICE + "ready = { port = 1, file = '/x' }", 5, "got port and file"),
        (SERVICE + "ready = { port = 0 }", 5, "1 to 65535"),
        (SERVICE + "ready = { port = 1, host = 'db' }", 5, "IPv4 address"),
        (SERVICE + "ready = { file = '/x', host = '127.0.0.1' }", 5, "host goes with port"),
        (SERVICE + "ready = { http = 'https://127.0.0.1/' }", 5, "http://"),
        (SERVICE + "ready = { http = 'http://example.com/' }", 5, "looks up no names"),
        (SERVICE + "ready = { http = 'http://127.0.0.1:99999/' }", 5, "expected a URL"),
        (SERVICE + "ready = { http = 'http://[::1' }", 5, "expected a URL"),
        (SERVICE + "ready = { http = 'http://u@127.0.0.1/' }", 5, "expected a URL"),
        (SERVICE + "ready = { http = { path = '/' } }", 5, "port is missing"),
        (SERVICE + "ready = { exec = [] }", 5, "expected a command"),
        (SERVICE + "ready = { file = 'x' }", 5, "absolute path"),
        (COPY % "mode = '0888'", 3, "octal mode"),
        (COPY % "mode = 644", 3, "expected a string"),
        (COPY % "owner = 'a b'", 3, "an owner such as"),
        ("[smolbuild]\ncopy = [{ from = '..', to = '/a' }]", 3, "outside"),
        ("[smolbuild]\ncopy = [{ from = 'a', to = 'b' }]", 3, "absolute path"),
        ("[smolbuild]\ncopy = [{ from = 'a', to = '/b/../c' }]", 3, "without .."),
        ("[smolbuild]\ncopy = [{ to = '/b' }]", 3, "from is missing"),
        ("[smolbuild]\nname = 'Acme:1'", 3, "without a tag"),
        ("[smolbuild]\nresume = 'ram'", 3, '"memory", "disk"'),
        ("[smolbuild]\ncache.max_size = '1.5G'", 3, "a size such as"),
        ("[smolbuild.restore]\nregenerate = ['machineid']", 3, "did you mean machine-id?"),
        ("[smolbuild.policy]\non_base_drift = 'explode'", 3, "one of"),
        ("[smolbuild.base]\ndebian = 'bookworm'", 1, "keep one of the two"),
        ("[health]\nexec = ['a']\n[smolbuild.health]\nport = 1", 4, "keep one of the two"),
        ("a = [", 2, "not valid TOML"),
        ("a = 1\na = 2", 3, "not valid TOML: Cannot overwrite a value"),
        ("a = " + "[" * 100, 2, "nested more than"),
        ("cpus = " + "1" * 5000, 0, "a number is too long"),
        ("cpus = 0x" + "f" * 5000, 2, "got a number beyond 64 bits"),
        ("cpus = 1979-05-27", 2, "got a date or time"),
        ("cpus = nan", 2, "got a fraction"),
    ],
)
def test_refused(text: str, line: int, words: str) -> None:
    found = problems(f'image = "x"\n{text}\n')
    assert any(words in problem for problem in found), found
    place = f"Smolfile:{line}:" if line else "Smolfile:"
    assert any(problem.startswith(place) for problem in found if words in problem), found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "neither image nor [smolbuild.base]"),
        ("# nothing\n", "neither image nor [smolbuild.base]"),
        ("cpus = 2", "neither image nor [smolbuild.base]"),
        ("image = ''", "image reference or path"),
        ("image = 'a b'", "without spaces"),
        ("[smolbuild.base]", "debian is missing"),
        ("[smolbuild.base]\ndebian = 'Bookworm'", "name of a Debian suite"),
        ("[smolbuild.base]\ndebian = 'sid'\npackages = ['a;b']", "a package name"),
        ("[smolbuild.base]\ndebian = 'sid'\nvariant = 'maxbase'", "did you mean minbase?"),
        ("[smolbuild.base]\ndebian = 'sid'\nmirror = 'debian'", "a URL"),
    ],
)
def test_a_file_needs_a_base(text: str, words: str) -> None:
    assert any(words in problem for problem in problems(text))


def test_a_huge_file_is_refused_at_once() -> None:
    (problem,) = problems("# " + "x" * (1 << 20))
    assert "more than 1,048,576 bytes" in problem


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        parse_smolfile(tmp_path / "Smolfile", environment={})
    assert "Smolfile.example" in caught.value.hint
    (tmp_path / "Smolfile").mkdir()
    with pytest.raises(UsageError, match="cannot be read"):
        parse_smolfile(tmp_path / "Smolfile", environment={})
    (tmp_path / "bad.smolfile").write_bytes(b'image = "x"\n# \xff\n')
    with pytest.raises(SmolfileError, match=r"bad\.smolfile:2: expected UTF-8"):
        parse_smolfile(tmp_path / "bad.smolfile", environment={})


def test_a_byte_order_mark_and_crlf_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "Smolfile"
    path.write_bytes(b'\xef\xbb\xbfimage = "x"\r\ninit = ["""\r\na\r\nb"""]\r\n')
    smolfile = parse_smolfile(path, environment={})
    assert smolfile.steps[0].run == "a\nb"
    assert smolfile.positions["init"] == 2


# Nothing but our own errors, whatever comes in

VALUES = st.deferred(
    lambda: (
        st.sampled_from(
            [
                "1",
                "0",
                "-1",
                "true",
                "1.5",
                "nan",
                "1979-05-27",
                "''",
                "'x'",
                "'/x'",
                "'5s'",
                "'A=1'",
                "'http://127.0.0.1:1/'",
                "'http://['",
                "'..'",
                "'\\u0000'",
                '"\\u0000"',
                "'1:1'",
                "99999999999",
            ]
        )
        | st.lists(VALUES, max_size=3).map(lambda items: "[" + ", ".join(items) + "]")
        | st.dictionaries(NAMES, VALUES, max_size=3).map(
            lambda entries: (
                "{" + ", ".join(f"{key} = {value}" for key, value in entries.items()) + "}"
            )
        )
    )
)
NAMES = st.sampled_from(sorted({name for shape in SHAPES.values() for name in shape} | {"x"}))
DOTTED = st.lists(NAMES, min_size=1, max_size=3).map(".".join)


@st.composite
def near_smolfiles(draw: st.DrawFn) -> str:
    lines = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.integers(0, 3))
        key = draw(DOTTED)
        if kind < 2:
            lines.append(f"{key} = {draw(VALUES)}")
        else:
            lines.append(f"[{key}]" if kind == 2 else f"[[{key}]]")
    return "\n".join(lines)


def only_our_errors(text: str) -> None:
    found: tuple[Problem, ...] = ()
    try:
        parse_text(text, file="Smolfile", environment={"A": "\udcff"})
    except SmolfileError as error:
        found = error.problems
        if not found:
            pytest.fail("an error without a problem")
    for problem in found:
        assert 0 <= problem.line <= text.count("\n") + 1
        assert str(problem).isprintable()


@given(near_smolfiles())
@settings(max_examples=600, deadline=None)
def test_only_our_errors_for_near_smolfiles(text: str) -> None:
    only_our_errors(text)


@given(st.text(max_size=300))
@settings(max_examples=300, deadline=None)
@example("\ufeff")
@example("env = ['A']\nimage = 'x'")
@example("'\x00' = 1")
@example('"\\u0000\\n" = 1')
@example("image = '\udcff'")
@example("a" * 5000 + " = 1")
def test_only_our_errors_for_any_text(text: str) -> None:
    only_our_errors(text)


@pytest.mark.parametrize(
    "text",
    [
        "".join(
            f"{a}{b}{c}{d} = 1\n"
            for a in string.ascii_lowercase
            for b in "abcdefghij"
            for c in "abcdefghij"
            for d in "abcd"
        ),
        "x = {" + ", ".join(f"a{i} = 1" for i in range(20_000)) + "}",
        "[smolbuild]\nstep = [" + "{}," * 50_000 + "]",
        'x = "' + "\\n" * 200_000 + '"',
        '"' + "a.b[" * 50_000 + '" = 1',
        "x = " + "[" * 5_000,
        "x = " + "{a=" * 5_000,
        "a." * 200_000 + "a = 1",
    ],
)
@pytest.mark.timeout(60)
def test_hostile_files_end_soon(text: str) -> None:
    only_our_errors(text)


def test_what_is_asked_for_and_not_done_is_said_loudly() -> None:
    asked = parse(
        """
        image = "x"
        [smolbuild]
        [smolbuild.restore]
        hold = true
        [smolbuild.policy]
        max_ready_ms = 100
        """
    )
    assert all(notice.loud and notice.line for notice in asked.notices)
    assert {notice.key for notice in asked.notices} == {
        "smolbuild.restore.hold",
        "smolbuild.policy.max_ready_ms",
    }
    usual = parse(
        """
        image = "x"
        [smolbuild]
        resume = "disk"
        [smolbuild.restore]
        hold = false
        [smolbuild.policy]
        max_age = "7d"
        on_base_drift = "rebuild"
        undeclared = "fail"
        [smolbuild.cache]
        max_size = "1GiB"
        """
    )
    assert usual.notices == ()


@pytest.mark.parametrize(
    ("mirror", "snapshot", "line"),
    [
        ("https://snapshot.example.com/{snapshot}", None, 4),
        ("https://debian.example.com/debian", "20261101T000000Z", 5),
        (None, "20261101T000000Z", 4),
        ("https://snapshot.example.com/{snapshot}", "2026-11-01", 5),
    ],
)
def test_a_snapshot_and_its_place_in_the_mirror_go_together(
    mirror: str | None, snapshot: str | None, line: int
) -> None:
    text = '\n[smolbuild.base]\ndebian = "bookworm"\n'
    text += f'mirror = "{mirror}"\n' if mirror else ""
    text += f'snapshot = "{snapshot}"\n' if snapshot else ""
    with pytest.raises(SmolfileError) as caught:
        parse_text(text, file="Smolfile")
    assert caught.value.problems[0].line == line
    whole = '[smolbuild.base]\ndebian = "bookworm"\nmirror = "http://x/{snapshot}"\n'
    base = parse_text(whole + 'snapshot = "20261101T000000Z"', file="Smolfile").base
    assert base is not None
    assert base.archive == "http://x/20261101T000000Z"
