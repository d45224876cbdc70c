"""The client with a real service: broken streams, restarts, refusals."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from solrl_client.rollouts import RolloutClient
from solrl_client.tokens import bearer_token
from solrl_proto.adapters import adapter_digest
from solrl_proto.problems import Problem, ProblemError
from solrl_proto.rollouts import RolloutGroup, RolloutRequest
from tests.support.service_helpers import Layout, RunningService, adapter_file, rollout_request

PROMPTS = [f"{i} red circles" for i in range(6)]


class CuttingProxy:
    """Passes all data on. Each connection's answer is cut after the next number of `limits`; None cuts nothing."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.limits: list[int | None] = []
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            limit = self.limits.pop(0) if self.limits else None
            service = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=_pass_on, args=(client, service, None), daemon=True).start()
            threading.Thread(target=_pass_on, args=(service, client, limit), daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket, limit: int | None) -> None:
    passed = 0
    try:
        while (limit is None or passed < limit) and (data := source.recv(4096 if limit is None else limit - passed)):
            sink.sendall(data)
            passed += len(data)
    except OSError:
        pass
    finally:
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(service: RunningService) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(service.port)
    yield proxy
    proxy.close()


def request_of(**more: object) -> RolloutRequest:
    return RolloutRequest.model_validate(rollout_request(prompts=PROMPTS, count=8, steps=1) | more)


@pytest.mark.parametrize("explicit", [False, True], ids=["seed root", "seeds"])
def test_a_broken_stream_resumes_with_missing_groups(
    service: RunningService, proxy: CuttingProxy, explicit: bool
) -> None:
    request = request_of()
    if explicit:
        request = request_of(candidates={"seeds": [seeds for _, seeds in request.groups()]})
    with RolloutClient(service.url) as client:
        whole = client.rollouts(request)
    came: list[RolloutGroup] = []
    # In the middle of a line, in the head, and in the last line.
    proxy.limits = [2500, 20, 1200]
    with RolloutClient(proxy.url, pause=0.01) as client:
        answer = client.rollouts(request, on_group=came.append)
    assert answer.groups == whole.groups
    assert sorted(group.prompt_id for group in came) == [prompt.id for prompt in request.prompts]
    assert proxy.connections == 4


def test_an_endless_answer_fails_after_the_patience(proxy: CuttingProxy) -> None:
    """After pauses of 10, 20, 40 and 80 ms at most; the next would be over after 310 ms."""
    proxy.limits = [10] * 1000
    with RolloutClient(proxy.url, pause=0.01, patience=0.3) as client, pytest.raises(ProblemError) as raised:
        client.rollouts(request_of())
    assert raised.value.problem.kind == "service-unreachable"
    assert proxy.connections <= 5


def test_a_request_is_repeated_after_lost_versions_are_pushed_again(service: RunningService) -> None:
    seen: list[str] = []

    def restore(problem: Problem) -> bool:
        seen.append(problem.kind)
        return len(seen) < 2

    request = request_of(adapter={"run": "nobody", "version": 0})
    with RolloutClient(service.url) as client, pytest.raises(ProblemError) as raised:
        client.rollouts(request, restore=restore)
    assert seen == ["run-not-found"] * 2
    assert raised.value.problem.status == 404


def test_an_unknown_run_has_no_adapters_and_can_be_deleted(service: RunningService) -> None:
    with RolloutClient(service.url) as client:
        assert client.adapters("nobody") is None
        client.delete("nobody")


def test_a_version_that_another_process_pushes_is_waited_for(service: RunningService, layout: Layout) -> None:
    file = adapter_file(layout, 0)
    asked = threading.Event()

    def push() -> None:
        asked.wait(600)
        service.push("awaited", 3, file)

    pushing = threading.Thread(target=push)
    pushing.start()
    with RolloutClient(service.url, pause=0.01) as client:
        with pytest.raises(ProblemError) as raised:
            client.wait_for_version("awaited", 3, seconds=0)
        asked.set()
        stored = client.wait_for_version("awaited", 3, seconds=60)
        pushing.join()
        with pytest.raises(ProblemError, match="No such adapter version"):
            client.wait_for_version("awaited", 4, seconds=0)
    assert raised.value.problem.kind == "run-not-found"
    assert (stored.version, stored.digest) == (3, adapter_digest(file))


TOKENS = {
    b"s3cret\n": "",
    " s3cret\r\n".encode("utf-8-sig"): "",
    "s3cret".encode("utf-16"): "this is not UTF-8",
    b"\n": "is empty",
    **{f"s3cret{odd}more".encode(): "is not a token" for odd in ("\n", " ", "\x1b", "é", "\t")},
}
"""Contents of a file, and what an error says of them; empty for a token."""


@pytest.mark.parametrize("content", TOKENS, ids=range(len(TOKENS)))
def test_a_token_is_one_line_of_the_environment_or_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes
) -> None:
    for name in ("SOLRL_TOKEN", "SOLRL_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert bearer_token("SOLRL_TOKEN") is None
    monkeypatch.setenv("SOLRL_TOKEN", " from-environment\n")
    assert bearer_token("SOLRL_TOKEN") == "from-environment"
    (tmp_path / "token").write_bytes(content)
    monkeypatch.setenv("SOLRL_TOKEN_PATH", str(tmp_path / "token"))
    if not TOKENS[content]:
        assert bearer_token("SOLRL_TOKEN") == "s3cret"
        return
    with pytest.raises(ValueError, match=TOKENS[content]) as raised:
        bearer_token("SOLRL_TOKEN")
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "sent"),
    [(None, "Bearer from-environment"), ("own", "Bearer own"), ("", None)],
    ids=["none", "own", "empty"],
)
def test_a_client_sends_the_token_of_the_environment_unless_it_is_given_one(
    monkeypatch: pytest.MonkeyPatch, given: str | None, sent: str | None
) -> None:
    monkeypatch.delenv("SOLRL_TOKEN_PATH", raising=False)
    monkeypatch.setenv("SOLRL_TOKEN", "from-environment")
    with RolloutClient("http://localhost:1", token=given) as client:
        assert client._http.headers.get("Authorization") == sent
