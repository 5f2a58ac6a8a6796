"""Plain smolvm Smolfiles over every kind of local image, and what is said loudly about them."""

import pytest

from smolbuild.core.process import run

PLAIN = """\
image = "./image.tar"
cpus = 1
memory = 128
overlay = 1
env = ["GREETING=hello"]
ports = ["8080:80"]
volumes = ["./src:/src"]

init = [
  "mkdir -p /opt",
  \"\"\"
cat > /opt/greet <<'SCRIPT'
#!/bin/sh
cat <<TEXT
$GREETING, "${1:-it's me}"
TEXT
SCRIPT
chmod 0755 /opt/greet
\"\"\",
]

[dev]
init = ["echo never > /dev-was-here"]

[health]
exec = ["/opt/greet", "prober"]
interval = "200ms"
timeout = "5s"
retries = 2
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory, project):
    """Give a directory with one image as layout, OCI archive and Docker archive."""
    directory = tmp_path_factory.mktemp("images")
    image = f"{directory}/layout:base"
    for argv in (
        ["umoci", "init", "--layout", f"{directory}/layout"],
        ["umoci", "new", "--image", image],
        ["umoci", "insert", "--rootless", "--image", image, str(project / "rootfs"), "/"],
        ["umoci", "config", "--image", image, "--config.cmd", "sh", "--config.user", "1000:1000"],
        ["skopeo", "copy", f"oci:{image}", f"docker-archive:{directory}/image.tar:base:1"],
        ["skopeo", "copy", f"oci:{image}", f"oci-archive:{directory}/oci.tar:base"],
    ):
        done = run(argv, timeout=60)
        assert done.status == 0, done.stderr
    return directory


def test_a_plain_smolfile_builds_unchanged(smolbuild, images, tmp_path):
    (tmp_path / "image.tar").symlink_to(images / "image.tar")
    (tmp_path / "Smolfile").write_text(PLAIN)
    done = smolbuild("build", "-C", str(tmp_path), "-t", "plain:v1", "--json")
    assert done.status == 0, done.stderr
    assert "warning: Smolfile:23" in done.stderr
    assert "smolbuild.use_dev = true" in done.stderr
    assert "not part of the artifact" in done.stderr
    out = smolbuild("run", "plain:v1", "--", "sh", "-c", "/opt/greet; id -u; ls /dev-was-here")
    assert out.stdout == 'hello, "it\'s me"\n1000\n', out.stderr
    assert out.status != 0


@pytest.mark.parametrize("kind", ["./layout/", "./layout:base", "./oci.tar", "./image.tar"])
def test_every_kind_of_local_image_is_planned(smolbuild, images, kind):
    (images / "Smolfile").write_text(PLAIN.replace("./image.tar", kind))
    value = smolbuild("plan", "-C", str(images), "--json").document("plan")
    again = smolbuild("plan", "-C", str(images), "--json").document("plan")
    assert value["key"] == again["key"]
    assert again["lock"]["state"] == "locked"
    loud = [notice for notice in value["notices"] if notice["loud"]]
    assert [notice["key"] for notice in loud] == ["dev.init"]


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("./missing.tar", ["missing.tar"]),
        ("./empty/", ["empty"]),
        ("docker-daemon:x", ["Docker"]),
        ("127.0.0.1:1/no/registry:1", ["127.0.0.1:1"]),
    ],
)
def test_an_image_that_is_not_there_is_named(smolbuild, tmp_path, image, words):
    (tmp_path / "Smolfile").write_text(PLAIN.replace("./image.tar", image))
    done = smolbuild("plan", "-C", str(tmp_path), "--json")
    assert done.status in (1, 2, 5)
    error = done.document("error")["error"]
    assert error["hint"]
    for word in words:
        assert word in error["message"]


def test_a_kernel_of_ones_own_must_be_a_kernel(smolbuild, own_project):
    (own_project / "vmlinuz").write_bytes(b"not a kernel")
    text = (own_project / "Smolfile").read_text()
    (own_project / "Smolfile").write_text(
        text.replace('name = "test/tiny"', 'name = "test/tiny"\nkernel = "vmlinuz"')
    )
    done = smolbuild("build", "-C", str(own_project), "-t", "kernel:v1", "--json")
    assert done.status in (1, 2)
    assert "vmlinuz" in done.document("error")["error"]["message"]
