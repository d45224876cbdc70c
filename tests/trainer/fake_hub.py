"""A hub: the routes by which huggingface_hub creates a repository and commits small files."""

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse


class FakeHub(FastAPI):
    """A hub that accepts one token.

    Attributes:
        created: names of created repositories.
        files: path in the repository → committed content in base64.
    """

    def __init__(self, token: str) -> None:
        super().__init__()
        self.token = token
        self.created: list[str] = []
        self.files: dict[str, str] = {}
        self.add_api_route("/{path:path}", self._post, methods=["POST"])

    async def _post(self, path: str, request: Request) -> JSONResponse:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return JSONResponse({"error": "Invalid username or password."}, 401)
        return JSONResponse(self._answer(path, await request.body(), str(request.base_url)))

    def _answer(self, path: str, body: bytes, url: str) -> dict[str, Any]:
        if path == "api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.created.append(name)
            return {"url": f"{url}{name}", "name": name}
        if path == "api/validate-yaml":
            assert json.loads(body)["content"].startswith("---\n")
            return {"errors": [], "warnings": []}
        if path.endswith("/preupload/main"):
            files = [{"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]]
            return {"files": [one | {"shouldIgnore": False, "oid": None} for one in files]}
        assert path.endswith("/commit/main"), path
        for line in map(json.loads, body.decode().splitlines()):
            if line["key"] == "file":
                self.files[line["value"]["path"]] = line["value"]["content"]
        return {"success": True, "commitOid": "0" * 40, "commitUrl": f"{url}{self.created[0]}/commit/{'0' * 40}"}
