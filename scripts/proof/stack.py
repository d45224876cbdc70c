"""Starts and stops the services of a profile from their images, as docker-compose.yml specifies."""

import ctypes
import json
import os
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from proof.compose import Service
from proof.images import Buildah

_NEW_NETWORK = 0x40000000


@dataclass
class Running:
    """A running service and its `buildah run` process."""

    service: Service
    options: list[str]
    container: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    @property
    def pid(self) -> int | None:
        """The service's own process, which would be PID 1 in an engine's container."""
        below = [self.process.pid]
        while below:
            pid = below.pop(0)
            try:
                if "buildah" not in Path(os.readlink(f"/proc/{pid}/exe")).name:
                    return pid
            except FileNotFoundError:
                continue
            below += _children(pid)
        return None


class Stack:
    """Services in a separate network namespace that has only a loopback interface."""

    def __init__(self, buildah: Buildah, images: dict[str, str], ready_within: float) -> None:
        self._buildah = buildah
        self._images = images
        self._ready_within = ready_within
        self._hosts = buildah.folder / "hosts"
        self.running: list[Running] = []

    def isolate(self, names: list[str]) -> None:
        """Enter a new network namespace, in which service names resolve to loopback."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "cannot create a network namespace")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        self._hosts.write_text(f"127.0.0.1 localhost {' '.join(names)}\n")

    def start(self, service: Service) -> Running:
        """Start a service after those it depends on.

        Raises:
            RuntimeError: the condition of a dependency is not met.
        """
        for other, condition in service.depends_on.items():
            before = next(one for one in self.running if one.service.name == other)
            if condition != "service_healthy" or self.probe(before) is not None:
                raise RuntimeError(f"{service.name}: {other} is not {condition}")
        image = self._images[service.name]
        container = self._buildah.call("from", "--pull-never", "--name", service.name, image).strip()
        config = json.loads(self._buildah.call("inspect", container))["OCIv1"]["config"]
        options = self._options(service)
        command = [*config.get("Entrypoint", []), *service.command]
        log = self._buildah.folder / f"{service.name}.log"
        print(f"  {service.name}: {shlex.join(command)}", flush=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._buildah.command("run", *options, container, *command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.running.append(Running(service, options, container, process, log))
        return self.running[-1]

    def _options(self, service: Service) -> list[str]:
        options = ["--isolation", "chroot", "--network", "host", "--no-hosts"]
        options += ["--volume", f"{self._hosts}:/etc/hosts:ro"]
        for target, source in service.secrets.items():
            options += ["--volume", f"{source.resolve()}:{target}:ro"]
        for target, volume in service.volumes.items():
            options += ["--volume", f"{self.folder_of(volume)}:{target}"]
        for name, value in service.environment.items():
            options += ["--env", f"{name}={value}"]
        if service.user:
            options += ["--user", service.user]
        for capability in service.cap_drop:
            options += ["--cap-drop", capability]
        return [*options, "--"]

    def probe(self, running: Running) -> str | None:
        """Run the health check once; None if it passes, otherwise its output."""
        health = running.service.health
        if health is None:
            return "no health check"
        try:
            done = subprocess.run(
                self._buildah.command("run", *running.options, running.container, *health.test),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=health.timeout,
                text=True,
            )
        except subprocess.TimeoutExpired:
            return f"timed out after {health.timeout:.0f} s"
        return None if done.returncode == 0 else done.stdout

    def inside(self, running: Running, command: list[str]) -> str:
        """Run a command in the service's container and return its output.

        Raises:
            RuntimeError: the command failed.
        """
        return self._buildah.call("run", *running.options, running.container, *command)

    def wait_healthy(self, running: Running) -> None:
        """Run the health check until it passes.

        Raises:
            RuntimeError: the service ended, or stayed unhealthy.
        """
        health = running.service.health
        assert health is not None
        deadline = time.monotonic() + self._ready_within
        problem: str | None = "never checked"
        while time.monotonic() < deadline:
            if running.process.poll() is not None:
                raise RuntimeError(f"{running.service.name} ended with {running.process.returncode}\n{running.tail}")
            problem = self.probe(running)
            if problem is None:
                return
            time.sleep(health.pause)
        raise RuntimeError(f"{running.service.name} is not healthy: {problem}\n{running.tail}")

    def require_unprivileged(self, running: Running) -> None:
        """Raise RuntimeError if the service's process runs as root."""
        pid = running.pid
        status = Path(f"/proc/{pid}/status").read_text() if pid else ""
        users = next((line.split()[1:] for line in status.splitlines() if line.startswith("Uid:")), ["0"])
        if "0" in users:
            raise RuntimeError(f"{running.service.name} runs as root, or has ended")

    def stop(self, running: Running) -> float:
        """Stop a service with SIGTERM, like `docker compose stop`; returns the seconds it took.

        Raises:
            RuntimeError: the service did not end within its grace period, or its exit code is not 0.
        """
        started = time.monotonic()
        pid = running.pid
        if pid is None or running.process.poll() is not None:
            raise RuntimeError(f"{running.service.name} had already ended\n{running.tail}")
        os.kill(pid, signal.SIGTERM)
        try:
            code = running.process.wait(running.service.grace)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{running.service.name} did not stop\n{running.tail}") from None
        self.running.remove(running)
        if code:
            raise RuntimeError(f"{running.service.name} ended with {code}\n{running.tail}")
        return time.monotonic() - started

    def folder_of(self, volume: str) -> Path:
        """Folder on this machine with the files of a named volume, which any user may write."""
        folder = self._buildah.folder / "volumes" / volume
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o1777)
        return folder


def left_over() -> list[str]:
    """Other processes that still run in this process's PID namespace."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                words = (folder / "cmdline").read_text().replace("\0", " ").strip()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state != "Z":
                found.append(f"{folder.name} {words}")
    return found


def _children(pid: int) -> list[int]:
    try:
        tasks = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(word) for words in tasks for word in words]
