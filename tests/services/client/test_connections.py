"""Requests to this machine, and their tokens, never go to a proxy, however its exceptions are spelled."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from solrl_client import connections
from solrl_client.connections import http_client, proxy_for
from solrl_client.rollouts import RolloutClient
from solrl_core.errors import RewardUnavailableError
from solrl_remote.remote_reward import RemoteReward
from tests.services.reward_servers import serving

GNOME = "localhost,127.0.0.0/8,::1"
SPELLINGS = (GNOME, "", "[::1]", "*.internal, 10.0.0.0/8")
HERE = ("127.0.0.1", "127.8.8.8", "127.1", "LOCALHOST.", "a.localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0")


class Seen:
    """A server that answers every request with 404, and notes the hosts and tokens that it was sent."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str | None]] = []

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            heads = {name.decode(): value.decode() for name, value in scope["headers"]}
            self.requests.append((heads["host"], heads.get("authorization")))
            await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """The proxy of the environment for every scheme."""
    seen = Seen()
    with serving(seen) as address:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, address)
        yield seen


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_request_to_this_machine_and_its_token_do_not_leave_by_a_proxy(
    proxy: Seen, spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", spelling)
    for token in ("SOLRL_TOKEN", "SOLRL_REWARD_TOKEN"):
        monkeypatch.setenv(token, "secret")
    there = Seen()
    with serving(there) as address:
        with RolloutClient(address) as client:
            assert client._http.get("/v1/models").status_code == 404
        with pytest.raises(RewardUnavailableError):
            RemoteReward("mine", address)
        host = address.removeprefix("http://")
    assert there.requests == [(host, "Bearer secret")] * 2
    assert proxy.requests == []
    for name in HERE:
        assert proxy_for(f"http://{name}:8100") is proxy_for(f"https://{name}") is None
    with http_client("http://service.example:8100") as client:
        client.get("/")
    assert proxy.requests == [("service.example:8100", None)]


def test_no_proxy_lists_hosts_addresses_and_networks(proxy: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    for exceptions, direct, through in (
        *(("10.2.3.4", "10.2.3.4", "10.2.3.5"), ("10.0.0.0/8", "10.2.3.4:8100", "11.2.3.4")),
        *(("fe80::1", "[fe80::1]:8100", "[fe80::2]"), ("gpu.lab:8100", "GPU.lab:8100", "gpu.lab:8200")),
        ("[fd00::1],[fd00:1::]:8100", "[fd00::1]", "[fd00:1::]:8200"),
        ("fd00::8100", "[fd00::8100]:8100", "[fd00::]:8100"),
        *(("10.1,*.corp", "gpu.corp", "192.168.10.1"), ("a.corp.  B.corp", "c.b.corp", "b.corp.lab")),
        ("localhost,*", "10.2.3.4", None),
    ):
        monkeypatch.setenv("no_proxy", exceptions)
        assert proxy_for(f"http://{direct}") is None
        assert through is None or proxy_for(f"http://{through}") is not None


@pytest.mark.parametrize("kind", ["socks5", "ftp"])
def test_an_unusable_proxy_is_an_error_without_its_password(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("all_proxy", f"{kind}://me:secret@127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "socksio", None)
    with pytest.raises(ValueError, match=f"kind '{kind}'; expected http://HOST:PORT.* no_proxy") as refused:
        RolloutClient("http://service.example")
    assert "secret" not in str(refused.value)
    RolloutClient("http://127.0.0.1:1").close()


def test_all_clients_are_made_in_one_place() -> None:
    root = Path(connections.__file__).parents[2]
    made = re.compile(r"httpx\.(Async)?(Client|HTTPTransport)\(|httpx\.(get|post|put|delete|head|request|stream)\(")
    files = [path for folder in ("clients", "core", "services", "trainer") for path in (root / folder).rglob("*.py")]
    assert [path.name for path in files if made.search(path.read_text(encoding="utf-8"))] == ["connections.py"]
