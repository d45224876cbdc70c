"""Tokens of each kind for a real service, and raw requests that no client library would send."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
from solrl_http.tokens import Scope, create_token
from tests.support.service_helpers import MODEL, RunningService, adapter_headers, read_response, running_service

SCOPES: tuple[Scope, ...] = ("rollout", "push", "admin")


@dataclass(frozen=True)
class Guarded:
    """A service with tenants `a` and `b`, and tokens for them by name: `a`, `b`, `rollout`, …, `expired`."""

    service: RunningService
    file: Path
    tokens: dict[str, str]

    def headers(self, token: str) -> dict[str, str]:
        """The Authorization header of a token, by its name."""
        return {"Authorization": f"Bearer {self.tokens[token]}"}


@contextmanager
def guarded_service(folder: Path, *flags: str, model: str = MODEL) -> Iterator[Guarded]:
    """A service with a token file.

    `a` and `b` may do everything for their tenants; `rollout`, `push` and `admin` of `a` have one scope each.
    """
    file = folder / "tokens.json"
    tokens = {tenant: create_token(file, tenant, SCOPES, None)[0] for tenant in ("a", "b")}
    tokens |= {scope: create_token(file, "a", (scope,), timedelta(days=1))[0] for scope in SCOPES}
    tokens["expired"], token = create_token(file, "a", SCOPES, timedelta(days=1))
    content = json.loads(file.read_text())
    next(one for one in content["tokens"] if one["id"] == token.id)["expires"] = datetime.now(UTC).isoformat()
    file.write_text(json.dumps(content))
    with running_service("--token-file", str(file), *flags, model=model) as service:
        yield Guarded(service, file, tokens)


def raw(port: int, head: str, body: bytes = b"", *, has_body: bool = True) -> tuple[int, dict[str, str], bytes]:
    """The answer to a raw head (lines end with \\n here) and body; see `read_response`."""
    with socket.create_connection(("127.0.0.1", port), timeout=600) as sock:
        sock.sendall(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n" + body)
        return read_response(sock, has_body)


def push(
    guarded: Guarded, token: str, run: str, body: bytes, version: int = 0, parent: int | None = None
) -> httpx.Response:
    """PUT an adapter with the token of this name."""
    return guarded.service.client.put(
        f"/v1/runs/{run}/adapters/{version}",
        content=body,
        params={"model": MODEL} | ({} if parent is None else {"parent": str(parent)}),
        headers=guarded.headers(token) | adapter_headers(body),
    )
