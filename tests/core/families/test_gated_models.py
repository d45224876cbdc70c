"""A gated model whose weights are in the hub's cache, as those that a service downloaded, needs no token."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from solrl_minis import catalog

pytestmark = pytest.mark.slow
CACHED, NEWER = "a" * 40, "c" * 40
FOLDER = catalog.WEIGHTS / "mini-sana"
FILES = [str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file()]
LOAD = "from solrl_core.families.load import load_backbone; load_backbone('some/model')"


class Hub(ThreadingHTTPServer):
    """A hub whose one model is gated: it tells files and newest commit to everybody, and gives files to nobody."""

    newest = CACHED


class _Request(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Hub)
        siblings = [{"rfilename": name} for name in FILES]
        body = json.dumps({"id": "some/model", "sha": self.server.newest, "gated": "auto", "siblings": siblings})
        allowed = self.path.startswith("/api/models/some/model") and "/tree/" not in self.path
        self.send_response(200 if allowed else 401)
        if not allowed:
            body = ""
            self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body.encode())

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(("127.0.0.1", 0), _Request) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(("newest", "code"), [(CACHED, 0), (NEWER, 1)])
def test_a_cached_copy_is_loaded_without_a_token_while_it_is_the_newest(
    hub: Hub, newest: str, code: int, tmp_path: Path
) -> None:
    hub.newest = newest
    repository = tmp_path / "hub/models--some--model"
    shutil.copytree(FOLDER, repository / "snapshots" / CACHED)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(CACHED)
    place = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HUB_OFFLINE": "0"}
    environment = os.environ | place | {"HF_TOKEN_PATH": str(tmp_path / "none"), "HF_TOKEN": ""}
    done = subprocess.run([sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert ("access was not granted: accept the terms" in done.stderr) == bool(code)
