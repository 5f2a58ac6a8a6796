"""The keys of ``[smolbuild]``: what smolbuild adds to smolvm's Smolfile."""

from collections.abc import Mapping

from smolbuild.model.keys import GUEST_PATH, NAME, USER, Key, Kind, Shape

__all__ = ["SMOLBUILD"]

_PATH = "an absolute path in the guest"
_NAME_WORDS = "a name of letters, digits, `.`, `_` and `-`"
_PORT = Key(kind=Kind.INTEGER, about="TCP port in the guest.", low=1, high=65535)
_RUN_PATTERN = r"[^\x00]*[^\s\x00][^\x00]*"
_RUN_WORDS = "a command"
_SOURCE_WORDS = "a relative path inside the Smolfile's directory"
_SOURCE = r"[^/\x00][^\x00]*"
_WORKDIR = Key(
    kind=Kind.TEXT,
    about="Working directory; otherwise the top-level `workdir`.",
    pattern=GUEST_PATH,
    expected=_PATH,
)
_ENV = Key(kind=Kind.TEXTS, about="More variables as `KEY=VALUE`.", default=[])
_COPY = Key(
    kind=Kind.TABLES,
    about="Files and directories that are copied into the guest before the first step.",
    shape="copy",
)
_HTTP = Key(
    kind=Kind.TEXT_OR_TABLE,
    about="An HTTP GET answers: a URL, or port, path, status and contains.",
    pattern=r"http://.+",
    expected="a URL such as http://127.0.0.1:8000/healthz",
    shape="http",
)
_FILE = Key(
    kind=Kind.TEXT, about="This path exists in the guest.", pattern=GUEST_PATH, expected=_PATH
)
_HOST = Key(
    kind=Kind.TEXT,
    about="IPv4 address in the guest, or localhost.",
    default="127.0.0.1",
    pattern=r"localhost|[0-9]{1,3}(\.[0-9]{1,3}){3}",
    expected="an IPv4 address of the guest, or localhost",
)
_EXEC = Key(kind=Kind.TEXTS, about="This command, an argument list, exits 0 in the guest.")


def _duration(about: str, default: str | None = None) -> Key:
    return Key(kind=Kind.DURATION, about=about, default=default)


def _user(otherwise: str) -> Key:
    return Key(
        kind=Kind.TEXT,
        about=f"User it runs as: a name or uid, with an optional :group; otherwise {otherwise}.",
        pattern=USER,
        expected="a user name or uid, with an optional :group",
    )


_TABLE: Shape = {
    "name": Key(
        kind=Kind.TEXT,
        about="The artifact's name, `acme/agent-env` for example. Not part of its key.",
        pattern=r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*",
        expected="a lower-case name such as acme/agent-env, without a tag",
    ),
    "use_dev": Key(kind=Kind.FLAG, about="Build with the `[dev]` profile applied.", default=False),
    "resume": Key(
        kind=Kind.TEXT,
        about="What the step cache keeps after each step: the whole machine (memory) or its disk.",
        choices=("memory", "disk"),
        default="memory",
    ),
    "kernel": Key(
        kind=Kind.TEXT,
        about="Path of a kernel to use instead of Debian's cloud kernel.",
        pattern=r"[^\x00]+",
        expected="the path of a kernel",
    ),
    "base": Key(
        kind=Kind.TABLE,
        about="Instead of `image`: a Debian root made on the spot, or a Dockerfile that is built.",
        shape="base",
    ),
    "copy": _COPY,
    "step": Key(kind=Kind.TABLES, about="Set-up steps, run in order after `init`.", shape="step"),
    "service": Key(
        kind=Kind.TABLES, about="Processes that are alive in the checkpoint.", shape="built-service"
    ),
    "health": Key(
        kind=Kind.TABLE,
        about="Health check by HTTP, port, file or command, instead of `[health]`.",
        shape="built-health",
    ),
    "restore": Key(
        kind=Kind.TABLE, about="What makes each fork fresh before it is used.", shape="restore"
    ),
    "policy": Key(kind=Kind.TABLE, about="When to rebuild, warn or fail.", shape="policy"),
    "cache": Key(kind=Kind.TABLE, about="The local cache, and a remote one.", shape="cache"),
    "secrets": Key(
        kind=Kind.TABLE_OF_TABLES,
        about="More secrets as in the top level's `[secrets]`, from a command too.",
        shape="built-secret",
    ),
    "scrub": Key(
        kind=Kind.TABLE,
        about="What cleans the machine before its checkpoint, and what may stay in it.",
        shape="scrub",
    ),
}

SMOLBUILD: Mapping[str, Shape] = {
    "smolbuild": _TABLE,
    "base": {
        "debian": Key(
            kind=Kind.TEXT,
            about="Suite: `bookworm`, for example.",
            pattern=r"[a-z][a-z0-9-]*",
            expected="the name of a Debian suite such as bookworm",
        ),
        "dockerfile": Key(
            kind=Kind.TEXT,
            about="Path of a Dockerfile that a Docker engine builds, instead of `debian`.",
            pattern=_SOURCE,
            expected=_SOURCE_WORDS,
        ),
        "target": Key(
            kind=Kind.TEXT,
            about="The Dockerfile's stage to stop at.",
            pattern=r"[A-Za-z0-9][A-Za-z0-9_.-]*",
            expected="the name or number of a stage",
        ),
        "args": Key(
            kind=Kind.TABLE_OF_TEXTS,
            about="Values for the Dockerfile's `ARG` instructions. No place for secrets.",
            names=r"[A-Za-z_][A-Za-z0-9_]*",
        ),
        "context": Key(
            kind=Kind.TEXT,
            about="Directory whose files the Dockerfile may copy; `.dockerignore` counts.",
            default=".",
            pattern=_SOURCE,
            expected=_SOURCE_WORDS,
        ),
        "packages": Key(
            kind=Kind.TEXTS,
            about="Packages to install, with an optional `=VERSION`.",
            default=[],
            pattern=r"[a-z0-9][a-z0-9+.-]*(:[a-z0-9-]+)?(=[A-Za-z0-9.+:~-]+)?",
            expected="a package name such as postgresql or python3=3.11.2-1+b1",
        ),
        "variant": Key(
            kind=Kind.TEXT,
            about="Which packages belong to the root besides `packages`.",
            default="minbase",
            choices=(
                "essential",
                "apt",
                "required",
                "minbase",
                "buildd",
                "important",
                "debootstrap",
                "standard",
            ),
        ),
        "mirror": Key(
            kind=Kind.TEXT,
            about="Debian mirror; without it the one in the host's apt configuration. "
            "`{snapshot}` in it stands for `snapshot`.",
            pattern=r"(http|https|file|copy)://?[^\s\x00]+",
            expected="a URL such as https://debian.example.com/debian",
        ),
        "snapshot": Key(
            kind=Kind.TEXT,
            about="Date of a snapshot archive, for `{snapshot}` in `mirror`.",
            pattern=r"[0-9]{8}T[0-9]{6}Z",
            expected="a time such as 20261101T000000Z",
        ),
        "components": Key(
            kind=Kind.TEXTS,
            about="Archive components.",
            default=["main"],
            pattern=r"[a-z0-9][a-z0-9/-]*",
            expected="a component such as main",
        ),
    },
    "copy": {
        "from": Key(
            kind=Kind.TEXT,
            about="File or directory in the Smolfile's directory.",
            pattern=_SOURCE,
            expected=_SOURCE_WORDS,
            required=True,
        ),
        "to": Key(
            kind=Kind.TEXT,
            about="Target in the guest; one that ends in `/` is a directory to copy into.",
            pattern=GUEST_PATH,
            expected=_PATH,
            required=True,
        ),
        "mode": Key(
            kind=Kind.TEXT,
            about="Mode of each copied file, octal; without it 0644, or 0755 if executable.",
            pattern=r"0?[0-7]{3,4}",
            expected='an octal mode such as "0600"',
        ),
        "owner": Key(
            kind=Kind.TEXT,
            about="Owner `user` or `user:group`, names or numbers; without it root.",
            pattern=USER,
            expected='an owner such as "postgres", "postgres:postgres" or "1000:1000"',
        ),
    },
    "step": {
        "name": Key(
            kind=Kind.TEXT,
            about="Unique name; without it `step-1`, `step-2` and so on.",
            pattern=NAME,
            expected=_NAME_WORDS,
        ),
        "run": Key(
            kind=Kind.TEXT,
            about="Command, run with `sh -c`.",
            pattern=_RUN_PATTERN,
            expected=_RUN_WORDS,
            required=True,
        ),
        "inputs": Key(
            kind=Kind.TEXTS,
            about="Files and directories whose change makes this step run again.",
            default=[],
            pattern=_SOURCE,
            expected=_SOURCE_WORDS,
        ),
        "copy": Key(kind=Kind.TABLES, about="Copied before this step only.", shape="copy"),
        "env": _ENV,
        "workdir": _WORKDIR,
        "user": _user("root"),
        "network": Key(
            kind=Kind.FLAG_OR_TEXTS,
            about="false: none; a list: these hosts only; without it as `[network]` says.",
        ),
        "secrets": Key(
            kind=Kind.TEXTS,
            about="Secrets that are there, as variable and file, during this step only.",
            default=[],
            pattern=r"[A-Za-z_][A-Za-z0-9_]*",
            expected="the name of a secret",
        ),
        "timeout": _duration("The step fails after this time.", "30m"),
    },
    "built-service": {
        "name": Key(
            kind=Kind.TEXT, about="Unique name.", pattern=NAME, expected=_NAME_WORDS, required=True
        ),
        "run": Key(
            kind=Kind.TEXT,
            about="Command, run with `sh -c`; it stays in the foreground.",
            pattern=_RUN_PATTERN,
            expected=_RUN_WORDS,
            required=True,
        ),
        "ready": Key(kind=Kind.TABLE, about="When it counts as ready.", shape="probe"),
        "ready_timeout": _duration("It must be ready within this time.", "2m"),
        "env": _ENV,
        "workdir": _WORKDIR,
        "user": _user("the top-level `user`"),
    },
    "probe": {"port": _PORT, "host": _HOST, "http": _HTTP, "file": _FILE, "exec": _EXEC},
    "http": {
        "port": Key(
            kind=Kind.INTEGER, about="TCP port in the guest.", low=1, high=65535, required=True
        ),
        "path": Key(
            kind=Kind.TEXT,
            about="Path of the request.",
            default="/",
            pattern=r"/[!-~]*",
            expected="a path such as /healthz, without spaces",
        ),
        "host": _HOST,
        "status": Key(kind=Kind.INTEGER, about="Expected status.", default=200, low=100, high=599),
        "contains": Key(kind=Kind.TEXT, about="Text that the body must hold.", default=""),
    },
    "built-health": {
        "port": _PORT,
        "host": _HOST,
        "http": _HTTP,
        "file": _FILE,
        "exec": _EXEC,
        "interval": _duration("Time between attempts.", "5s"),
        "timeout": _duration("Time that one attempt may take.", "5s"),
        "startup_grace": _duration("Failures in this first time do not count.", "0s"),
        "retries": Key(
            kind=Kind.INTEGER,
            about="Failures in a row that make it unhealthy.",
            default=3,
            low=1,
            high=2**32 - 1,
        ),
    },
    "restore": {
        "regenerate": Key(
            kind=Kind.TEXTS,
            about="What each fork gets anew.",
            default=["machine-id", "hostname"],
            choices=("machine-id", "hostname", "ssh-host-keys"),
        ),
        "run": Key(
            kind=Kind.TEXTS,
            about="Commands, each run with `sh -c` in every fork before it is used.",
            default=[],
            pattern=_RUN_PATTERN,
            expected=_RUN_WORDS,
        ),
        "hold": Key(
            kind=Kind.FLAG,
            about="Keep services stopped until the fork is fresh.",
            default=False,
        ),
    },
    "policy": {
        "max_age": _duration("Rebuild an artifact that is older."),
        "on_base_drift": Key(
            kind=Kind.TEXT,
            about="What to do when tag, suite or kernel name something else than the lock; "
            "without it nobody asks.",
            choices=("rebuild", "warn", "fail"),
        ),
        "undeclared": Key(
            kind=Kind.TEXT,
            about="What to do about inputs that are not declared.",
            choices=("warn", "fail"),
            default="warn",
        ),
        "max_ready_ms": Key(
            kind=Kind.INTEGER,
            about="The build fails when a fork takes longer to be ready, in milliseconds.",
            low=1,
            high=86_400_000,
        ),
    },
    "cache": {
        "max_size": Key(
            kind=Kind.SIZE,
            about="Largest size of the step cache; what was used longest ago goes first.",
            default="20GiB",
        ),
        "registry": Key(
            kind=Kind.TEXT,
            about="Repository where a build looks for its artifact before it builds one.",
            pattern=r"[^\s\x00]+",
            expected="a repository such as registry.example.com/team/env, without a tag",
        ),
        "push": Key(
            kind=Kind.FLAG,
            about="Publish what is built to `registry`, for the other builders.",
            default=False,
        ),
    },
    "built-secret": {
        "from_env": Key(
            kind=Kind.TEXT,
            about="Host variable that holds the value.",
            pattern=r"[^=\x00]+",
            expected="a variable's name",
        ),
        "from_file": Key(
            kind=Kind.TEXT,
            about="Host file that holds the value; relative to the Smolfile's directory.",
            pattern=r"[^\x00]+",
            expected="the path of a file",
        ),
        "from_command": Key(
            kind=Kind.TEXTS,
            about="Host command, an argument list, whose output is the value.",
            pattern=r"[^\x00]+",
            expected='an argument list such as ["pass", "show", "token"]',
        ),
    },
    "scrub": {
        "run": Key(
            kind=Kind.TEXTS,
            about="Commands, each run with `sh -c` as root when the services are ready; then free "
            "disk blocks are zeroed. An empty list zeroes them too.",
            pattern=_RUN_PATTERN,
            expected=_RUN_WORDS,
        ),
        "allow": Key(
            kind=Kind.TEXTS,
            about="Private keys and tokens that may stay: a fingerprint that the error printed, or "
            "an absolute guest path (one that ends in `/` is a directory).",
            default=[],
            pattern=r"sha256:[0-9a-f]{16}|/[^\x00]+",
            expected='"sha256:" and the 16 digits that the error printed, or an absolute path',
        ),
    },
}
"""Shapes of smolbuild's tables by name; ``smolbuild`` is the ``[smolbuild]`` table."""
