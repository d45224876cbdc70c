"""Image builds with buildah: a Debian base from debootstrap, and the Dockerfiles on top of it."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.error import URLError

SUITE = "bookworm"
_APT = Path("/etc/apt")
# Adds to Debian what NVIDIA's image has: PyTorch in the system's Python, and pip constraints.
_KEPT = """\
FROM {base}
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates python3 python3-pip && \\
    python3 -m pip install --no-cache-dir --break-system-packages {torch} && rm -rf /var/lib/apt/lists/* && \\
    mkdir /etc/pip && echo pydantic==1.10.2 > /etc/pip/constraint.txt
ENV PIP_CONSTRAINT=/etc/pip/constraint.txt
"""


class Buildah:
    """buildah with its own storage under `folder`, whose builds have this machine's configuration of pip."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._driver = "overlay" if _can_overlay(folder) else "vfs"
        self._pip = _pip_options(folder)

    def command(self, verb: str, *arguments: str) -> list[str]:
        """Command line of a buildah command."""
        storage = ["--root", str(self.folder / "storage"), "--runroot", str(self.folder / "run")]
        return ["buildah", *storage, "--storage-driver", self._driver, verb, *arguments]

    def start(self, image: str, *words: str, entrypoint: Sequence[str] = ()) -> str:
        """Run the image's program, or the one given, with these words and return its output.

        Raises:
            RuntimeError: it failed; includes the end of its output.
        """
        return _run(self.program(image, *words, entrypoint=entrypoint))

    def program(
        self,
        image: str,
        *words: str,
        entrypoint: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        volumes: Mapping[Path, str] | None = None,
    ) -> list[str]:
        """Command line of the image's program in a new container; `volumes` are folders here → there."""
        container = _run(self.command("from", "--pull-never", image)).strip()
        config = json.loads(_run(self.command("inspect", container)))["OCIv1"]["config"]
        # torchrun looks up the host name. Container engines add it to /etc/hosts, but buildah's chroot does not.
        options = ["--isolation", "chroot", "--network", "host", "--hostname", "localhost"]
        options += [word for name, value in (environment or {}).items() for word in ("--env", f"{name}={value}")]
        options += [word for here, there in (volumes or {}).items() for word in ("--volume", f"{here}:{there}")]
        return self.command("run", *options, container, "--", *(entrypoint or config["Entrypoint"]), *words)

    def build(self, image: str, dockerfile: Path, context: Path, arguments: dict[str, str], log: Path) -> None:
        """Build an image, writing the output to `log`.

        Raises:
            RuntimeError: the build failed; includes the end of the log.
        """
        values = [option for name, value in arguments.items() for option in ("--build-arg", f"{name}={value}")]
        options = ["--isolation", "chroot", "--network", "host", "--layers", "--pull-never", *self._pip, *values]
        _run(self.command("build", *options, "--tag", image, "--file", str(dockerfile), str(context)), log)


def debian(buildah: Buildah, image: str) -> None:
    """Build a minimal Debian image with debootstrap."""
    context = buildah.folder / "debian"
    context.mkdir()
    root = context / "root"
    _run(["debootstrap", "--variant=minbase", SUITE, str(root), _mirror()], buildah.folder / "debootstrap.log")
    _run(["tar", "-C", str(root), "-cf", str(context / "root.tar"), "."])
    _from_text(buildah, image, context, "FROM scratch\nADD root.tar /\n", ignore="root\n")
    _run(["rm", "-rf", str(context)])


def with_torch(buildah: Buildah, image: str, base: str, torch: str) -> None:
    """Build a substitute for NVIDIA's image: a base with PyTorch, and with pip constraints that conflict with ours."""
    _from_text(buildah, image, buildah.folder / "kept", _KEPT.format(base=base, torch=torch))


def answers(url: str) -> bool:
    """Whether a URL can be read."""
    try:
        with urllib.request.urlopen(url, timeout=15):
            return True
    except (URLError, OSError):
        return False


def _from_text(buildah: Buildah, image: str, context: Path, dockerfile: str, ignore: str = "") -> None:
    context.mkdir(exist_ok=True)
    (context / "Dockerfile").write_text(dockerfile)
    (context / ".dockerignore").write_text(ignore)
    buildah.build(image, context / "Dockerfile", context, {}, buildah.folder / f"{context.name}.log")


def _mirror() -> str:
    """First of apt's sources that has the suite."""
    sources = [*_APT.glob("sources.list"), *_APT.glob("sources.list.d/*.list"), *_APT.glob("sources.list.d/*.sources")]
    found = [url for path in sources for url in re.findall(r"https?://[^\s\]]+", _uncommented(path))]
    for url in dict.fromkeys(found):
        if answers(f"{url.rstrip('/')}/dists/{SUITE}/Release"):
            return str(url)
    raise RuntimeError(f"none of apt's sources has {SUITE}: {', '.join(found) or 'no sources'}")


def _uncommented(path: Path) -> str:
    return "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))


def _can_overlay(folder: Path) -> bool:
    """Whether the kernel supports overlay mounts in the folder; without them, each layer copies all files."""
    names = ("lower", "upper", "work", "merged")
    lower, upper, work, merged = (folder / "overlay" / name for name in names)
    for place in (lower, upper, work, merged):
        place.mkdir(parents=True)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    mounted = subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, merged], capture_output=True)
    if mounted.returncode == 0:
        subprocess.run(["umount", merged], check=True)
    return mounted.returncode == 0


def _pip_options(folder: Path) -> list[str]:
    """Mount options for this machine's pip configuration: available during a build, but not part of the image."""
    listed = _run([sys.executable, "-m", "pip", "config", "list"])
    sections: dict[str, dict[str, str]] = {}
    # Environment variables are listed first and win.
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        section = "global" if section in (":env:", "global", "user", "site") else section
        sections.setdefault(section, {}).setdefault(key, ast.literal_eval(value))
    options: list[str] = []

    def mounted(word: str) -> str:
        place = Path(word.removeprefix("file://"))
        if not place.is_absolute() or not place.exists():
            return word
        target = f"/mnt/pip/{len(options) // 2}"
        if place == Path(word):
            options.extend(("--volume", f"{place}:{target}:ro"))
            return target
        # An index; its pages link to files next to it.
        options.extend(("--volume", f"{place.parent}:{target}:ro"))
        return f"file://{target}/{place.name}"

    text = ""
    for section, entries in sections.items():
        text += f"[{section}]\n"
        text += "".join(f"{key} = {' '.join(map(mounted, value.split()))}\n" for key, value in entries.items())
    configuration = folder / "pip.conf"
    configuration.write_text(text)
    return ["--volume", f"{configuration}:/etc/pip.conf:ro", *options]


def _run(command: list[str], log: Path | None = None) -> str:
    done = subprocess.run(
        command,
        env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if log else subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if log:
        log.write_text(done.stdout)
    if done.returncode:
        output = (done.stdout + (done.stderr or "")).splitlines()[-25:]
        raise RuntimeError("\n".join([f"exit code {done.returncode}: {shlex.join(command)}", *output]))
    return done.stdout
