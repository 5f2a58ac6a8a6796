"""The command line without a machine: help, start-up, errors and their statuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

SCHEMA = json.loads((Path(__file__).parents[2] / "schemas" / "cli.v1.json").read_text())
COMMANDS = (
    "init",
    "import",
    "build",
    "plan",
    "lock",
    "run",
    "push",
    "pull",
    "verify",
    "ls",
    "inspect",
    "diff",
    "rm",
    "key",
)


def smolbuild(*args: str, home: Path, cwd: Path | None = None, **env: str):
    return subprocess.run(
        [sys.executable, "-m", "smolbuild.cli", *args],
        env={**os.environ, "SMOLBUILD_HOME": str(home), **env},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def check_document(text: str, definition: str) -> dict[str, object]:
    value = json.loads(text)
    jsonschema.validate(value, {**SCHEMA, "anyOf": [{"$ref": f"#/$defs/{definition}"}]})
    return value


@pytest.mark.parametrize("command", [*COMMANDS, "doctor"])
def test_every_command_has_help_with_an_example(command, tmp_path):
    done = smolbuild(command, "--help", home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    target = done.stdout
    if command == "key":
        target = smolbuild("key", "generate", "--help", home=tmp_path).stdout
    assert re.search(r"Examples?:", target)
    assert f"smolbuild {command}" in target
    assert "--json" in target


def test_the_root_help_lists_every_command(tmp_path):
    done = smolbuild("--help", home=tmp_path)
    assert all(re.search(rf"^  {name} ", done.stdout, re.MULTILINE) for name in COMMANDS)


def test_version_imports_nothing_heavy(tmp_path):
    code = (
        "import sys\nfrom smolbuild.cli.main import run\nassert run(['--version']) == 0\n"
        "heavy = {'oras', 'requests', 'rich', 'cryptography', 'zstandard', 'dbos', 'sqlalchemy',"
        " 'docker', 'smolbuild.machine', 'smolbuild.store'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == ["smolbuild 0.1.0", "[]"]


def test_an_unknown_command_names_the_nearest(tmp_path):
    done = smolbuild("buidl", home=tmp_path)
    assert done.returncode == 2
    assert "Did you mean `build`?" in done.stderr


def test_a_command_nobody_can_have_meant_lists_those_that_exist(tmp_path):
    done = smolbuild("frobnicate", home=tmp_path)
    assert done.returncode == 2
    assert "init, import, build, plan, lock" in done.stderr


def test_a_directory_as_an_argument_is_told_where_it_goes(tmp_path):
    done = smolbuild("build", ".", home=tmp_path)
    assert done.returncode == 2
    assert "hint: -C names the Smolfile's directory" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("ls", "-la"),
        ("hostname",),
        ("-n", "2", "head", "-n", "1", "f"),
        ("-n", "2", "x", "--", "y"),
    ],
)
def test_a_command_for_forks_must_stand_after_the_two_dashes(tmp_path, words):
    done = smolbuild("run", "any:v1", *words, home=tmp_path)
    assert done.returncode == 2
    assert "goes after `--`: smolbuild run ARTIFACT -- CMD" in done.stderr


def test_a_missing_smolfile_says_what_to_do(tmp_path):
    done = smolbuild("build", home=tmp_path / "home", cwd=tmp_path)
    assert done.returncode == 2
    assert "Smolfile" in done.stderr
    assert "Traceback" not in done.stderr


def test_all_problems_of_a_smolfile_come_at_once_with_their_lines(tmp_path):
    (tmp_path / "Smolfile").write_text('imagee = "x"\ncpus = 0\n\n[health]\ninterval = "soon"\n')
    done = smolbuild("plan", "--json", home=tmp_path / "home", cwd=tmp_path)
    assert done.returncode == 2
    error = check_document(done.stdout, "error")["error"]
    places = {(p["line"], p["key"]) for p in error["problems"]}
    assert {(1, "imagee"), (2, "cpus"), (5, "health.interval")} <= places
    assert "error: Smolfile:1: imagee: " in done.stderr  # as a person here would name the file
    assert "image" in done.stderr


def test_usage_errors_are_json_too(tmp_path):
    done = smolbuild("run", "nothing-there", "--json", home=tmp_path)
    assert done.returncode == 2
    error = check_document(done.stdout, "error")["error"]
    assert error["code"] == "not-found"
    assert error["exitStatus"] == 2


def test_ls_of_an_empty_store(tmp_path):
    assert check_document(smolbuild("ls", "--json", home=tmp_path).stdout, "ls") == {
        "artifacts": []
    }
    done = smolbuild("ls", home=tmp_path)
    assert done.returncode == 0
    assert "smolbuild build" in done.stderr


def test_keys_are_made_once_and_shown(tmp_path):
    made = check_document(smolbuild("key", "generate", "--json", home=tmp_path).stdout, "key")
    private = Path(made["path"])
    assert private.stat().st_mode & 0o777 == 0o600
    again = smolbuild("key", "generate", home=tmp_path)
    assert again.returncode == 2
    assert "exists already" in again.stderr
    shown = smolbuild("key", "show", home=tmp_path)
    assert shown.stdout == made["publicKey"]
    assert "PRIVATE" not in shown.stdout + shown.stderr
    assert smolbuild("key", "show", "--name", "other", home=tmp_path).returncode == 2
    assert smolbuild("key", "generate", "--name", "../x", home=tmp_path).returncode == 2


def test_a_home_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("x")
    done = smolbuild("ls", home=tmp_path / "file" / "home")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert str(tmp_path / "file") in done.stderr


def test_registry_down_is_exit_5_with_a_hint(tmp_path):
    done = smolbuild("pull", "127.0.0.1:1/x:y", "--json", home=tmp_path)
    assert done.returncode == 5
    error = check_document(done.stdout, "error")["error"]
    assert error["hint"]
