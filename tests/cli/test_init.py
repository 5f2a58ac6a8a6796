"""init and import through the command line; what init writes builds as it is."""

import pytest

from smolbuild.model.parse import parse_smolfile
from smolbuild.model.smolfile import Dockerfile


def test_init_writes_a_smolfile_once(smolbuild, tmp_path):
    (tmp_path / "main.py").write_text("VALUE = 1\n")
    (tmp_path / "Dockerfile").write_text("FROM x\n")
    done = smolbuild("init", str(tmp_path), "--json")
    assert done.status == 0, done.stderr
    value = done.document("init")
    assert value["kind"] == "python"
    assert value["written"] == [str(tmp_path / "Smolfile"), str(tmp_path / ".smolbuildignore")]
    assert any("import Dockerfile" in line for line in value["todo"])
    parse_smolfile(tmp_path / "Smolfile", environment={})
    (tmp_path / "Smolfile").write_text("mine")
    again = smolbuild("init", str(tmp_path))
    assert again.status == 2
    assert "--force" in again.stderr
    assert (tmp_path / "Smolfile").read_text() == "mine"
    assert smolbuild("init", str(tmp_path), "--force").status == 0
    assert (tmp_path / "Smolfile").read_text() != "mine"


def test_import_translates_and_names_what_it_cannot(smolbuild, tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM registry.example.com/x\nLABEL a=b\nRUN echo hi\n")
    done = smolbuild("import", "Dockerfile", "--translate", "--json", cwd=tmp_path)
    assert done.status == 0, done.stderr
    value = done.document("import")
    assert value["written"] == [str(tmp_path / "Smolfile")]
    assert "LABEL" in value["leftOut"][0]
    assert "not translated: line 2: LABEL" in done.stderr
    smolfile = parse_smolfile(tmp_path / "Smolfile", environment={})
    assert smolfile.steps[0].run == "echo hi"
    again = smolbuild("import", "Dockerfile", "--translate", cwd=tmp_path)
    assert again.status == 2
    kept = smolbuild("import", "Dockerfile", "--force", cwd=tmp_path)
    assert kept.status == 0
    base = parse_smolfile(tmp_path / "Smolfile", environment={}).base
    assert base == Dockerfile(dockerfile="Dockerfile")


def test_import_of_a_devcontainer_writes_beside_its_directory(smolbuild, tmp_path):
    (tmp_path / ".devcontainer").mkdir()
    file = tmp_path / ".devcontainer" / "devcontainer.json"
    file.write_text('{"image": "registry.example.com/x", // c\n}')
    assert smolbuild("import", str(file)).status == 0
    assert parse_smolfile(tmp_path / "Smolfile", environment={}).image == "registry.example.com/x"
    bad = tmp_path / "bad.json"
    bad.write_bytes(b"\xff")
    assert "not UTF-8" in smolbuild("import", str(bad), "-o", str(tmp_path / "Other")).stderr


@pytest.mark.vm
def test_what_init_writes_for_a_python_service_builds_and_its_check_can_fail(smolbuild, tmp_path):
    """The one test here that installs Debian packages; they are cached between runs."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1"\n')
    (tmp_path / "app.py").write_text(
        "from http.server import HTTPServer, SimpleHTTPRequestHandler\n"
        'HTTPServer(("127.0.0.1", 8000), SimpleHTTPRequestHandler).serve_forever()\n'
    )
    assert smolbuild("init", str(tmp_path)).status == 0
    done = smolbuild("build", "-C", str(tmp_path), "-t", "init:v1", "--json")
    assert done.status == 0, done.stderr
    assert "200" in done.document("build")["health"]
    text = (tmp_path / "app.py").read_text()
    # It still starts and listens, but answers no page.
    (tmp_path / "app.py").write_text(text.replace("SimpleHTTP", "BaseHTTP"))
    broken = smolbuild("build", "-C", str(tmp_path), "-t", "init:v2")
    assert broken.status == 3, broken.stderr
