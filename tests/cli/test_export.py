"""`smolbuild export` of a built machine."""

import json
import subprocess
import tarfile
import tomllib

import pytest


@pytest.fixture
def exported(smolbuild, built, tmp_path):
    def export(form: str, *more: str):
        done = smolbuild("export", form, "tiny:v1", *more, "--json", cwd=tmp_path)
        assert done.status == 0, done.stderr
        said = done.document("export")
        assert said["digest"] == built["digest"]
        return tmp_path / said["path"]

    return export


def test_the_archive_runs_in_docker(exported, docker_engine, project):
    path = exported("docker-archive")
    assert path.name == "tiny.docker.tar"
    with path.open("rb") as stream:
        (image,) = docker_engine.client.images.load(stream)
    assert image.tags == ["tiny:v1"]
    assert "GREETING=hello" in image.attrs["Config"]["Env"]
    said = docker_engine.client.containers.run(
        image.id, ["cat", "/one", "/two", "/srv/www/index.html"], network_mode="none", remove=True
    )
    assert said == b"one\ntwo\nit works\n"


def test_the_other_forms(exported, smolbuild, tmp_path):
    oci = exported("oci-archive", "-o", "x.tar", "--name", "acme/tiny:v9")
    with tarfile.open(oci) as archive:
        index = json.load(archive.extractfile("index.json"))
    annotations = index["manifests"][0]["annotations"]
    assert annotations == {"org.opencontainers.image.ref.name": "v9"}
    root = exported("rootfs", "--no-owner")
    assert (root / "two").read_text() == "two\n"
    disk = exported("qcow2", "-c")
    shown = subprocess.run(
        ["qemu-img", "info", "--output=json", str(disk)],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert json.loads(shown.stdout)["virtual-size"] == 1 << 30
    again = smolbuild("export", "qcow2", "tiny:v1", "-c", cwd=tmp_path)
    assert again.status == 2
    assert "--force replaces it" in again.stderr
    assert smolbuild("export", "qcow2", "tiny:v1", "--force", cwd=tmp_path).status == 0
    full = smolbuild("export", "rootfs", "tiny:v1", cwd=tmp_path)
    assert full.status == 2
    assert smolbuild("export", "qcow2", "nothing:v1", cwd=tmp_path).status == 2
    nowhere = smolbuild("export", "qcow2", "tiny:v1", "-o", "no/x", cwd=tmp_path)
    assert "no directory no" in nowhere.stderr


def test_an_exported_root_is_a_base_again(exported, smolbuild, tmp_path):
    exported("rootfs", "-o", "root", "--no-owner")
    exported("docker-archive", "-o", "root.tar")
    for image in ("./root", "./root.tar"):
        project = tmp_path / ("of-" + image.removeprefix("./"))
        project.mkdir()
        (project / "Smolfile").write_text(f'image = ".{image}"\nmemory = 128\noverlay = 1\n')
        assert smolbuild("plan", "-C", str(project)).status == 0


def test_a_smolfile_without_ours(smolbuild, project, tmp_path):
    done = smolbuild("export", "smolfile", "-C", str(project))
    assert done.status == 0
    text = (project / "Smolfile").read_text()
    wanted = tomllib.loads(text)
    del wanted["smolbuild"]
    assert tomllib.loads(done.stdout) == wanted
    refused = smolbuild("export", "smolfile", "tiny:v1")
    assert refused.status == 2
    assert "does not carry its Smolfile" in refused.stderr
    assert smolbuild("export", "smolfile", "-f", str(tmp_path / "none")).status == 2
