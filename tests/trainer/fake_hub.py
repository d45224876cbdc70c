"""A hub on loopback: the routes by which huggingface_hub creates a repository and commits small files."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeHub:
    """A running hub that accepts one token.

    Attributes:
        url: its address.
        created: names of created repositories.
        files: path in the repository → committed content in base64.
    """

    def __init__(self, token: str) -> None:
        self.created: list[str] = []
        self.files: dict[str, str] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_POST(self) -> None:  # the name that http.server calls
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.headers.get("Authorization") != f"Bearer {token}":
                    return self._answer(401, {"error": "Invalid username or password."})
                return self._answer(200, hub._answer(self.path, body))

            def _answer(self, status: int, content: dict[str, Any]) -> None:
                text = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.created.append(name)
            return {"url": f"{self.url}/{name}", "name": name}
        if path == "/api/validate-yaml":
            assert json.loads(body)["content"].startswith("---\n")
            return {"errors": [], "warnings": []}
        if path.endswith("/preupload/main"):
            files = [{"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]]
            return {"files": [one | {"shouldIgnore": False, "oid": None} for one in files]}
        assert path.endswith("/commit/main"), path
        for line in map(json.loads, body.decode().splitlines()):
            if line["key"] == "file":
                self.files[line["value"]["path"]] = line["value"]["content"]
        return {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.url}/{self.created[0]}/commit/{'0' * 40}"}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
