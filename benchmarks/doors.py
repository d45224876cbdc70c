"""The table of what holds at the service's doors, to which fuzz_api.py, oversize.py and slow_clients.py add a row each.

Rows that were not run this time keep their last result, in docs/results/doors.{json,md}.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

MODEL = "mini-sana"
SCRIPTS = ("fuzz_api.py", "oversize.py", "slow_clients.py")


@dataclass(frozen=True)
class Row:
    """What a script was to find, and found, and all figures behind it."""

    wanted: str
    found: str
    met: bool
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Service:
    """A service process and where it listens."""

    process: "subprocess.Popen[bytes]"
    port: int
    log: Path

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def service(*flags: str) -> Iterator[Service]:
    """A ready service of a miniature on loopback; RuntimeError where it does not come up, or logs a traceback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = str(Path(sys.executable).with_name("solrl-rollout"))
    with tempfile.TemporaryDirectory(prefix="solrl-doors-") as folder:
        log = Path(folder, "log")
        with log.open("wb") as output:
            command = [program, "serve", "--model", MODEL, "--port", str(port), *flags]
            process = subprocess.Popen(command, stdout=output, stderr=output)
        running = Service(process, port, log)
        try:
            _wait_until_ready(running)
            yield running
            if "Traceback" in log.read_text():
                raise RuntimeError(f"the service logged a fault:\n{log.read_text()[-5000:]}")
        finally:
            process.terminate()
            process.wait(60)


def _wait_until_ready(running: Service) -> None:
    deadline = time.monotonic() + 180
    while running.process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{running.url}/health/ready").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the service did not come up:\n{running.log.read_text()[-5000:]}")


def keep(folder: Path, script: str, row: Row) -> int:
    """Write a script's row into the table; its exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "doors.json"
    found = json.loads(file.read_text()) if file.is_file() else {}
    found[script] = asdict(row) | {"cores": len(os.sched_getaffinity(0)), "date": time.strftime("%Y-%m-%d")}
    file.write_text(json.dumps(found, indent=1) + "\n")
    lines = [
        "# At the service's doors",
        "",
        "A real service of the miniature SANA on loopback, each row by the script in `benchmarks/` that it names.",
        "",
        "| by | wanted | found | met |",
        "|---|---|---|---|",
    ]
    for name in SCRIPTS:
        if name in found:
            one = found[name]
            lines.append(f"| `{name}` | {one['wanted']} | {one['found']} | {'yes' if one['met'] else 'no'} |")
    (folder / "doors.md").write_text("\n".join(lines) + "\n")
    print(f"\n{script}: {row.found}\n{'met' if row.met else 'NOT MET'}: {row.wanted}")
    return 0 if row.met else 1
