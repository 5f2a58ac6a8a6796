"""What is seen of a directory, and the first Smolfile that comes of it."""

import json
from pathlib import Path

import pytest

from smolbuild.model.parse import parse_text
from smolbuild.model.smolfile import ExecProbe, HttpProbe
from smolbuild.starter.draft import draft_text
from smolbuild.starter.indexes import index_hosts
from smolbuild.starter.look import look_at
from smolbuild.starter.starters import first_draft

HOSTS = ("packages.example.com",)


def fill(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def drafted(root: Path, hosts=HOSTS):
    text = draft_text(first_draft(look_at(root), name="acme/x", hosts=hosts))
    return text, parse_text(text, file="Smolfile", environment={})


PYTHON = {
    "pyproject.toml": '[project]\nname = "x"\nversion = "1"\ndependencies = ["one"]\n',
    "requirements.txt": "one==1\n",
    "src/pkg/__init__.py": "",
    "app.py": 'app.run(host="0.0.0.0", port=8080)\n@app.get("/healthz")\n',
}


def test_python_installs_before_it_copies_and_asks_a_page(tmp_path):
    project = look_at(fill(tmp_path, PYTHON))
    assert (project.kind, project.start, project.source) == ("python", "python3 app.py", "src")
    assert (project.serves.port, project.serves.path) == (8080, "/healthz")
    _, smolfile = drafted(tmp_path)
    install, files = smolfile.steps
    assert [copy.source for copy in install.copy] == ["pyproject.toml", "requirements.txt"]
    assert [copy.source for copy in files.copy] == ["."]
    assert files.network is False
    assert smolfile.network.allow_hosts == HOSTS
    assert smolfile.health is not None
    assert smolfile.health.probe == HttpProbe(port=8080, path="/healthz")
    assert smolfile.services[0].run == "exec python3 app.py"


def test_without_a_known_index_the_install_is_a_comment_that_says_so(tmp_path):
    text, smolfile = drafted(fill(tmp_path, PYTHON), hosts=())
    assert [step.name for step in smolfile.steps] == ["files"]
    assert smolfile.network.mode == "off"
    assert "#[network]" in text
    assert '#name = "dependencies"' in text
    assert "pip install" in text


def test_a_library_is_checked_by_importing_it(tmp_path):
    fill(tmp_path, {"setup.py": "", "pkg/__init__.py": "", "tests/__init__.py": ""})
    _, smolfile = drafted(tmp_path)
    assert smolfile.services == ()
    assert smolfile.health is not None
    assert isinstance(smolfile.health.probe, ExecProbe)
    assert smolfile.health.probe.argv[2].endswith("import pkg")


@pytest.mark.parametrize(
    ("files", "kind", "start", "port"),
    [
        ({"package.json": json.dumps({"scripts": {"start": "node s.js --port 3000"}})},
         "node", "npm start", 3000),
        ({"package.json": "{}", "server.js": "http.createServer(f).listen(3000)"},
         "node", "node server.js", 3000),
        ({"package.json": "[broken"}, "node", "", None),
        ({"go.mod": "module x\n", "main.go": 'http.ListenAndServe(":8080", nil)'},
         "go", "/usr/local/bin/app", 8080),
        ({"go.mod": "module x\n\nrequire y v1\n", "cmd/x/main.go": "package main"}, "go", "", None),
        ({"Cargo.toml": '[package]\nname = "x"\n', "src/main.rs": 'bind("127.0.0.1:7000")'},
         "rust", "/app/target/release/x", 7000),
        ({"Cargo.toml": "broken ["}, "rust", "", None),
        ({"Procfile": "web: ./serve --port 9000\n", "serve": "x"},
         "plain", "./serve --port 9000", 9000),
        ({"pyproject.toml": "broken [", "x.py": "print(1)"}, "python", "", None),
        ({"x.py": "print(1)"}, "python", "", None),
        ({"README.md": "hi"}, "plain", "", None),
        ({}, "plain", "", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("hosts", [(), HOSTS])
def test_every_kind_gives_a_smolfile_with_a_check_that_is_no_true(
    tmp_path, files, kind, start, port, hosts
):
    project = look_at(fill(tmp_path, files))
    assert (project.kind, project.start, project.serves.port) == (kind, start, port)
    _, smolfile = drafted(tmp_path, hosts)
    assert smolfile.health is not None
    probe = smolfile.health.probe
    assert not isinstance(probe, ExecProbe) or probe.argv[0] not in ("true", "/bin/true")
    assert [service.name for service in smolfile.services] == (["main"] if start else [])


def test_files_that_import_reads_are_named(tmp_path):
    fill(tmp_path, {"Dockerfile": "FROM x\n", ".devcontainer/devcontainer.json": "{}"})
    assert look_at(tmp_path).importable == (".devcontainer/devcontainer.json", "Dockerfile")


def test_index_hosts_are_those_of_the_hosts_own_configuration(tmp_path):
    home = fill(
        tmp_path / "home",
        {
            ".config/pip/pip.conf": "[global]\nindex-url = https://u:secret@py.example.com/simple\n",
            ".npmrc": "registry=https://js.example.com/\n@a:registry = http://scoped.example.com\n",
            ".cargo/config.toml": '[source.x]\nregistry = "sparse+https://rs.example.com/i/"\n',
        },
    )
    environment = {
        "HOME": str(home),
        "PIP_EXTRA_INDEX_URL": "https://more.example.com/simple",
        "GOPROXY": "https://go.example.com,direct",
    }
    found = {k: index_hosts(k, tmp_path, environment) for k in ("node", "go", "rust", "plain")}
    assert found == {
        "node": ("js.example.com", "scoped.example.com"),
        "go": ("go.example.com",),
        "rust": ("rs.example.com",),
        "plain": (),
    }
    python = index_hosts("python", tmp_path, environment)
    assert {"py.example.com", "more.example.com"} <= set(python)
    assert not any("secret" in host for host in python)
