#!/usr/bin/env bash
# Make this checkout ready: system programs, .venv, smolbuild itself. Idempotent; a second run installs nothing.
#
#   scripts/setup.sh          what `make demo` needs
#   scripts/setup.sh --dev    also what `make check` and `make test` need
#
# Exit status: 0 ready, 1 an install failed, 2 something has to be installed by hand (said by name).
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
venv=$root/.venv

# Debian keeps mke2fs, debugfs and others out of a plain user's PATH.
export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"

# One line for each thing needed: what to look for (a program, or an absolute path), and the Debian package.
RUN_NEEDS="
qemu-system-x86_64 qemu-system-x86
qemu-img qemu-utils
mke2fs e2fsprogs
mmdebstrap mmdebstrap
gpg gpg
/usr/share/keyrings/debian-archive-keyring.gpg debian-archive-keyring
musl-gcc musl-tools
gcc gcc
/usr/include/linux/version.h linux-libc-dev
dpkg-deb dpkg
docker-registry docker-registry
setpriv util-linux
newuidmap uidmap
"
DEV_NEEDS="
git git
/usr/include/poll.h libc6-dev
skopeo skopeo
umoci umoci
openssl openssl
cpio cpio
/bin/busybox busybox-static
dockerd docker.io
node nodejs
npm npm
"

# How mmdebstrap works without root where user namespaces are not to be had: in some containers, in a
# chroot, or because the system forbids them.
NO_NAMESPACES_NEEDS="
fakechroot fakechroot
fakeroot fakeroot
"

say() { printf 'setup: %s\n' "$*" >&2; }
stop() { say "$*"; exit 2; }

dev=no
case "${1:-}" in
  "") ;;
  --dev) dev=yes ;;
  *) stop "unknown option $1 (known: --dev)" ;;
esac

as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

present() {
  case "$1" in
    /*) [ -e "$1" ] ;;
    *) command -v "$1" >/dev/null 2>&1 ;;
  esac
}

# Packages from the list in $1 whose program or file is not there, one a line.
missing_packages() {
  while read -r what package; do
    [ -n "$what" ] || continue
    present "$what" || printf '%s\n' "$package"
  done <<<"$1" | sort -u
}

apt_lists_empty() {
  [ -z "$(find /var/lib/apt/lists -maxdepth 1 -name '*Packages*' -print -quit 2>/dev/null)" ]
}

# Debian starts docker-registry and docker.io as services when they are installed, unasked.
# A policy-rc.d that says "not allowed" (status 101) is the documented way to prevent it.
policy=/usr/sbin/policy-rc.d
policy_is_ours=no
forbid_services() {
  [ -e "$policy" ] && return
  policy_is_ours=yes
  printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null
  as_root chmod 0755 "$policy"
}
allow_services() {
  [ "$policy_is_ours" = no ] && return
  policy_is_ours=no
  as_root rm -f "$policy"
}
trap allow_services EXIT

# apt says hundreds of lines: they are shown when it fails.
quietly() {
  local log status=0
  log=$(mktemp)
  as_root env DEBIAN_FRONTEND=noninteractive "$@" >"$log" 2>&1 </dev/null || status=$?
  [ "$status" -eq 0 ] || tail -n 40 "$log" >&2
  rm -f "$log"
  return "$status"
}

apt_install() {
  local install=(apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=120 "$@")
  local updated=no
  if apt_lists_empty; then
    quietly apt-get update -q || return 1
    updated=yes
  fi
  forbid_services
  if ! quietly "${install[@]}"; then
    [ "$updated" = no ] || return 1
    say "the install failed; trying again with fresh package lists"
    quietly apt-get update -q || return 1
    quietly "${install[@]}" || return 1
  fi
  allow_services
  # Installed by us for their programs only: they must not start at the next boot either.
  [ -d /run/systemd/system ] || return 0
  case " $* " in
    *" docker-registry "*) quietly systemctl disable docker-registry.service || true ;;
  esac
  case " $* " in
    *" docker.io "*) quietly systemctl disable docker.service docker.socket containerd.service || true ;;
  esac
}

# smolbuild asks apt for the guest's kernel, and apt knows nothing without its lists.
package_lists() {
  command -v apt-get >/dev/null 2>&1 && apt_lists_empty || return 0
  say "fetching apt's package lists"
  quietly apt-get update -q || say "that failed; building a first artifact will need them"
}

install_by_hand() {
  say "this system lacks programs that smolbuild needs."
  say "install what brings these (in brackets: the Debian and Ubuntu package), then run this again:"
  while read -r what package; do
    [ -n "$what" ] || continue
    present "$what" || say "  $what  ($package)"
  done <<<"$1"
  exit 2
}

no_namespaces() {
  [ "$(id -u)" -ne 0 ] && ! mmdebstrap --unshare-helper true >/dev/null 2>&1
}

system_packages() {
  local needs=$RUN_NEEDS
  [ "$dev" = yes ] && needs=$RUN_NEEDS$DEV_NEEDS
  install_missing "$needs"
  if no_namespaces; then
    install_missing "$NO_NAMESPACES_NEEDS"
  fi
}

install_missing() {
  local needs=$1 packages
  mapfile -t packages < <(missing_packages "$needs")
  if [ "${#packages[@]}" -eq 0 ]; then
    package_lists
    return 0
  fi
  command -v apt-get >/dev/null 2>&1 || install_by_hand "$needs"
  if [ "$(id -u)" -ne 0 ] && ! command -v sudo >/dev/null 2>&1; then
    stop "no sudo here; as root, run: apt-get install --no-install-recommends ${packages[*]}"
  fi
  say "installing with apt: ${packages[*]}"
  apt_install "${packages[@]}" || { say "apt could not install: ${packages[*]}"; exit 1; }
  [ -z "$(missing_packages "$needs")" ] || install_by_hand "$needs"
}

# The first Python that is new enough. Prints its path; nothing when there is none.
find_python() {
  local name path
  for name in python3.13 python3.12 python3.11 python3 /usr/bin/python3; do
    path=$(command -v "$name") || continue
    if "$path" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s\n' "$path"
      return
    fi
  done
}

make_venv() {
  "$venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && return
  local python version
  python=$(find_python)
  if [ -z "$python" ]; then
    command -v apt-get >/dev/null 2>&1 || stop "Python 3.11 or newer is needed; install python3.11 with its venv module"
    say "no Python 3.11 or newer; installing one with apt"
    apt_install python3 python3-venv || true
    python=$(find_python)
    if [ -z "$python" ]; then
      apt_install python3.11 python3.11-venv || true
      python=$(find_python)
    fi
    [ -n "$python" ] || stop "Python 3.11 or newer is needed, and apt has none; install python3.11 and python3.11-venv"
  fi
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    command -v apt-get >/dev/null 2>&1 || stop "$python has no venv module; install python$version-venv"
    say "installing python$version-venv with apt"
    apt_install "python$version-venv" || stop "$python has no venv module; install python$version-venv"
  fi
  say "making .venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
}

# What an install depends on: when none of it changed, pip has nothing to do.
fingerprint() {
  {
    printf '%s\n' "$root"
    "$venv/bin/python" -c 'import sys; print(sys.version, sys.base_prefix)'
    cat pyproject.toml scripts/setup.sh
  } | sha256sum
}

# The dev group of pyproject.toml, one requirement a line; `pip install --group` needs pip 25.1.
dev_requirements() {
  "$venv/bin/python" -c '
import tomllib
with open("pyproject.toml", "rb") as stream:
    print("\n".join(tomllib.load(stream)["dependency-groups"]["dev"]))
'
}

python_packages() {
  local want wanted=run
  [ "$dev" = yes ] && wanted=dev
  want=$(fingerprint)
  # A dev install holds all that a run install does.
  for stamp in "$venv/.smolbuild-dev" "$venv/.smolbuild-$wanted"; do
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && [ -x "$venv/bin/smolbuild" ] && return
  done
  say "installing smolbuild into .venv ($wanted)"
  if [ "$dev" = yes ]; then
    dev_requirements >"$venv/dev-requirements.txt"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e . -r "$venv/dev-requirements.txt"
  else
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e .
  fi
  printf '%s\n' "$want" >"$venv/.smolbuild-$wanted"
}

# Other people's verifiers, for the tests that do not want to trust our own.
node_packages() {
  local directory=tests/trust/node command=install
  [ "$dev" = yes ] && [ -f "$directory/package.json" ] || return 0
  [ -f "$directory/package-lock.json" ] && command=ci
  local want stamp=$directory/node_modules/.smolbuild
  want=$(cat "$directory"/package*.json | sha256sum)
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && return
  say "installing the signature verifiers of $directory"
  (cd "$directory" && npm "$command" --no-audit --no-fund --ignore-scripts --loglevel=error)
  mkdir -p "$directory/node_modules"
  printf '%s\n' "$want" >"$stamp"
}

# A third of what a build with nothing to do takes would be compiling this, where PYTHONDONTWRITEBYTECODE
# is set or the checkout belongs to somebody else. What is compiled already is left alone.
bytecode() {
  "$venv/bin/python" -m compileall -q smolbuild || say "smolbuild is not compiled; it starts more slowly"
}

system_packages
make_venv
python_packages
bytecode
node_packages
