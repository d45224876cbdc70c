"""The reward service over HTTP: its scores, its batches across callers, and what it refuses."""

import asyncio
import json
import logging
import re
import socket
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
import torch
from safetensors.torch import save
from solrl_core.families import Backbone
from solrl_core.rewards import RewardSet
from solrl_core.rewards.images import as_floats
from solrl_http.tokens import create_token
from solrl_proto.scores import MAX_CHECKED_PROMPTS, MAX_SCORED_IMAGES, SCORES_MEDIA_TYPE
from solrl_reward.app import create_app
from solrl_reward.reward_metrics import RewardMetrics
from solrl_reward.service import RewardService
from solrl_reward.settings import RewardSettings
from tests.services import served_rewards
from tests.services.reward_servers import ask, body, client_at, pictures, scores, until
from tests.support.service_helpers import problem

BRIGHT, GATED, GREEDY = (f"tests.services.served_rewards:{name}" for name in ("brightness", "gated", "greedy"))
AWAY, PATIENT, FUSSY = (f"tests.services.served_rewards:{name}" for name in ("away", "patient", "fussy"))
A_CIRCLE = {"class": "circle", "color": "red"}
REWARDS = ("clipscore", "verifier", BRIGHT, GATED, GREEDY, AWAY, PATIENT, FUSSY)
RENAMED = "imagereward"


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app(
        RewardSettings(
            rewards=(*REWARDS, f"{RENAMED}={BRIGHT}"),
            options_from="mini-sana",
            device="cpu",
            batch=8,
            max_body_bytes=2**20,
        )
    )


@pytest.fixture(scope="module")
def client(app: Any) -> Iterator[httpx.Client]:
    with client_at(app) as found:
        yield found


@pytest.fixture(autouse=True)
def _closed_gate() -> Iterator[None]:
    served_rewards.reset()
    yield
    served_rewards.opened.set()


@contextmanager
def calling(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that call the service. The gate opens at the end, so that a test that fails does not wait for it."""
    with ThreadPoolExecutor(count) as callers:
        try:
            yield callers
        finally:
            served_rewards.opened.set()


@contextmanager
def busy(client: httpx.Client, count: int = 1, **headers: str) -> Iterator[ThreadPoolExecutor]:
    """Threads that call the service while it scores an image of `gated`, until the gate is open."""
    with calling(count + 1) as callers:
        first = callers.submit(scores, client, wanted(1), **headers)
        assert served_rewards.reached.wait(600)
        yield callers
        assert first.result(600).scores[GATED] == (1,)


@contextmanager
def sending(client: httpx.Client, content: bytes) -> Iterator[None]:
    """A connection of its own that has sent a request for scores; it is closed at the end."""
    head = f"POST /v1/scores HTTP/1.1\r\nHost: localhost\r\nContent-Type: {SCORES_MEDIA_TYPE}\r\nContent-Length: "
    with socket.create_connection((client.base_url.host, client.base_url.port or 80), timeout=600) as connection:
        connection.sendall(f"{head}{len(content)}\r\n\r\n".encode() + content)
        yield


def wanted(*numbers: float) -> bytes:
    """A request for scores of `gated`, which gives these numbers."""
    return body(pictures(len(numbers), side=4), GATED, metadata=[{"want": number} for number in numbers])


def test_the_list_has_digests_and_sizes_also_of_a_renamed_reward(client: httpx.Client, backbone: Backbone) -> None:
    """Such as a built-in reward that it computes by other means."""
    listed = {one["name"]: one for one in client.get("/v1/rewards").json()["rewards"]}
    assert tuple(listed) == (*REWARDS, RENAMED)
    assert listed["clipscore"]["digest"] == RewardSet.load(["clipscore"], backbone).digests()["reward:clipscore"]
    assert listed[RENAMED] == listed[BRIGHT] | {"name": RENAMED}
    answer = scores(client, body(pictures(3), BRIGHT, RENAMED))
    assert answer.scores[RENAMED] == answer.scores[BRIGHT]
    assert answer.digests[RENAMED] == answer.digests[BRIGHT]


def test_a_batch_is_limited_and_of_one_size(app: Any, client: httpx.Client) -> None:
    small = body(pictures(1, side=2), GATED, metadata=[{"want": 7}])
    with busy(client, 4) as callers:
        # In order, one after the other.
        later = []
        for i, content in enumerate((wanted(*range(5)), small, wanted(*range(4)), wanted(*range(3)))):
            later.append(callers.submit(scores, client, content))
            until(lambda i=i: waiting(app) == (5, 6, 10, 13)[i])
        served_rewards.opened.set()
        found = [list(one.result(600).scores[GATED]) for one in later]
    assert found == [[0, 1, 2, 3, 4], [7], [0, 1, 2, 3], [0, 1, 2]]
    # Five and three are the eight of the limit; four would not have fitted, and the small one never does.
    assert served_rewards.batches == [1, 8, 1, 4]


def test_no_request_fails_another_in_a_batch(app: Any, client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "solrl_core.rewards.reward")  # pytest keeps records, and so their images
    with busy(client, 2) as callers:
        wrong = callers.submit(ask, client, body(pictures(1, side=4), GATED, metadata=[{"wont": 1}]))
        until(lambda: waiting(app) == 1)
        right = callers.submit(scores, client, wanted(3))
        until(lambda: waiting(app) == 2)
        served_rewards.opened.set()
        assert right.result(600).scores[GATED] == (3,)
        refused = problem(wrong.result(600))
    assert (refused["status"], refused["kind"]) == (500, "reward-failed")
    assert "want" in refused["detail"]
    assert served_rewards.kept[-1] == 0, "the last batch is alone in memory"


def test_a_caller_that_leaves_is_taken_from_the_queue_or_its_scores_are_dropped(app: Any, client: httpx.Client) -> None:
    with calling(1) as callers:
        with sending(client, wanted(1)):
            assert served_rewards.reached.wait(600)
            with sending(client, wanted(2, 3)):
                until(lambda: waiting(app) == 2)
            until(lambda: waiting(app) == 0)
        until(lambda: metric(app, "solrl_http_requests_in_progress") == 0)
        served_rewards.opened.set()
        assert callers.submit(scores, client, wanted(4)).result(600).scores[GATED] == (4,)
    assert served_rewards.batches == [1, 1]


def test_a_batch_waits_for_other_services_until_all_its_callers_have_left(app: Any, client: httpx.Client) -> None:
    with busy(client):
        with sending(client, body(pictures(1), PATIENT)):
            until(lambda: waiting(app) == 1)
            with sending(client, body(pictures(2), PATIENT)):
                until(lambda: waiting(app) == 3)
                served_rewards.reached.clear()
                served_rewards.opened.set()
                assert served_rewards.reached.wait(600)
            until(lambda: metric(app, "solrl_http_requests_in_progress") == 1)
            assert served_rewards.ended == []
        assert len(scores(client, body(pictures(2), BRIGHT)).scores[BRIGHT]) == 2
    assert served_rewards.batches == [1, 3]
    assert served_rewards.ended == ["patient"]
    assert 'reward="patient"' not in client.get("/metrics").text


def test_tenants_have_shares_of_the_queue_and_take_turns(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    ann, bob = ({"Authorization": f"Bearer {create_token(file, who, ('score',), None)[0]}"} for who in ("ann", "bob"))
    app = create_app(RewardSettings(rewards=(GATED,), device="cpu", queue_limit=2 * MAX_SCORED_IMAGES, token_file=file))
    with client_at(app) as both, busy(both, 5, **ann) as callers:
        sent, total = [], 0
        for size, who in ((25, ann), (26, ann), (MAX_SCORED_IMAGES - 51, ann), (27, bob), (28, bob)):
            sent.append(callers.submit(ask, both, wanted(*range(size)), **who))
            total += size
            until(lambda total=total: waiting(app) == total)
        refused = problem(ask(both, b"never read", **ann))
        assert (refused["status"], refused["kind"]) == (429, "queue-full")
        assert refused["detail"].startswith(f"tenant 'ann' has {MAX_SCORED_IMAGES} images waiting")
        served_rewards.opened.set()
        assert [one.result(600).status_code for one in sent] == [200] * 5
    assert served_rewards.batches == [1, 27, 25, 26, 28, MAX_SCORED_IMAGES - 51]


def test_a_batch_that_does_not_fit_is_halved(client: httpx.Client) -> None:
    images = pictures(5, side=4)
    found = scores(client, body(images, GREEDY)).scores[GREEDY]
    assert torch.equal(torch.tensor(found), as_floats(images).mean((1, 2, 3)))
    assert max(size for size in served_rewards.batches if size <= served_rewards.ROOM) == served_rewards.ROOM
    assert served_rewards.batches[0] == 5
    assert set(served_rewards.kept) == {0}, "a batch that did not fit is freed before its halves"


def test_many_pixels_are_scored_in_parts(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as rewards make of the images: of 4 × 32 pixels, which are scaled to 224 × 1792."""
    monkeypatch.setattr("solrl_reward.batcher._MOST_PIXELS", 3 * 224 * 1792)
    images = pictures(5, side=32)[:, :, :4]
    served_rewards.opened.set()
    numbers = list(range(5))
    found = scores(client, body(images, GATED, metadata=[{"want": number} for number in numbers]))
    assert list(found.scores[GATED]) == numbers
    assert served_rewards.batches == [3, 2]


def test_a_reward_cannot_end_the_service() -> None:
    """test_rewards_alike.py has rewards that end in other ways."""
    failing = ("tests.services.faulty_rewards:interrupt", "tests.services.faulty_rewards:evil")
    there = create_app(RewardSettings(rewards=(BRIGHT, *failing), device="cpu"))
    with client_at(there) as client:
        for name in failing * 2:
            found = problem(ask(client, body(pictures(1), name)))
            assert (found["status"], found["kind"]) == (500, "reward-failed")
            assert "(faulty_rewards.py:" in found["detail"]
            assert found["detail"].isprintable()
        assert len(scores(client, body(pictures(2), BRIGHT)).scores[BRIGHT]) == 2
        assert not there.state.service.dead


def test_images_that_wait_are_in_memory_once() -> None:
    big = create_app(RewardSettings(rewards=(GATED,), device="cpu"))
    image = pictures(1, side=2048)
    content = body(image, GATED, metadata=[{"want": 2}])
    with client_at(big) as there, busy(there) as callers:
        tracemalloc.start()
        try:
            second = callers.submit(scores, there, content)
            until(lambda: waiting(big) == 1)
            there.get("/health/live")  # by then, the thread that decoded has left its call
            taken, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            served_rewards.opened.set()
        assert image.numel() <= taken < 1.5 * image.numel()
        assert second.result(600).scores[GATED] == (2,)


def request_with(**changes: Any) -> bytes:
    """A body of one image whose request or images are changed."""
    asked = {"rewards": [BRIGHT], "prompts": [{"text": "a"}]} | {k: v for k, v in changes.items() if k != "images"}
    return bytes(save({"images": changes.get("images", pictures(1))}, metadata={"request": json.dumps(asked)}))


def ones(height: int, width: int) -> torch.Tensor:
    """An image of one colour and this size."""
    return torch.ones(1, 3, height, width, dtype=torch.uint8)


def test_requests_whose_reward_has_no_server_wait_for_it_together(app: Any, client: httpx.Client) -> None:
    with busy(client, 2) as callers:
        others = [callers.submit(ask, client, body(pictures(2), AWAY)) for _ in range(2)]
        until(lambda: waiting(app) == 4)
        served_rewards.opened.set()
        for other in others:
            refused = other.result(600)
            assert (problem(refused)["status"], problem(refused)["kind"]) == (503, "reward-failed")
            assert refused.headers["retry-after"] == "5"
            assert "gave no answer" in problem(refused)["detail"]
    assert served_rewards.batches == [1, 4], "asked once for both"
    assert 'solrl_score_errors_total{reward="away"} 2.0' in client.get("/metrics").text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "a header of 0 bytes in a file of 0"),
        (b"\xff" * 64, "expected a safetensors file"),
        (bytes(request_with())[:-1], "expected a complete safetensors file"),
        (bytes(save({"images": pictures(1)})), "is not JSON: "),
        (bytes(save({"pictures": pictures(1)}, metadata={"request": "{"})), "is not JSON: "),
        (request_with(images=pictures(1).float()), "torch.float32"),
        (request_with(images=pictures(1)[0]), r"expected uint8 \[N, 3, H, W\]"),
        (request_with(images=pictures(0)), r"shape \[0, 3, 32, 32\]"),
        (request_with(images=pictures(2)), "2 images and 1 prompts"),
        (request_with(images=ones(1, 9)), "images of 1 × 9 pixels; expected sides of at most 8192"),
        (request_with(images=ones(90, 10)), "the longer at most 8 times the shorter"),
        (request_with(prompts=[{"text": "a", "metadata": {"x": [[]] * 200_000}}]), "once it is parsed"),
        *((request_with(rewards=[]), "1 or more items"), (request_with(rewards=[BRIGHT, BRIGHT]), "named twice")),
        *((request_with(strange=1), "strange"), (request_with(prompts=[{"text": "a"}] * 257), "at most 256")),
        (request_with(prompts=[{"text": "a", "metadata": {"x": "y" * 20000}}]), "at most 16384"),
        (request_with(rewards=["hpsv2"]), "does not compute 'hpsv2'"),
    ],
)
def test_an_invalid_body_is_refused(client: httpx.Client, content: bytes, said: str) -> None:
    found = problem(ask(client, content))
    kind = "reward-not-loaded" if "hpsv2" in said else "invalid-request"
    assert (found["status"], found["kind"]) == (422, kind)
    assert re.search(said, found["detail"]), found


def test_bodies_have_a_type_and_a_limit(client: httpx.Client) -> None:
    assert problem(ask(client, body(pictures(1), BRIGHT), **{"Content-Type": "text/plain"}))["status"] == 415
    found = problem(ask(client, b"x" * (2**20 + 1)))
    assert (found["status"], found["kind"]) == (413, "body-too-large")
    assert problem(client.get("/v1/rewards?all=1"))["kind"] == "unknown-parameter"
    assert problem(client.get("/v1/score"))["status"] == 404


def test_prompts_are_checked_without_images(client: httpx.Client) -> None:
    def verdict(name: str, *texts: str) -> Any:
        return client.post("/v1/prompts", json={"reward": name, "prompts": [{"text": text} for text in texts]})

    assert verdict(FUSSY, "a red circle", "red").json() == {"fault": None}
    found = verdict(FUSSY, "a red circle", "a blue cross", "a cross").json()
    assert found == {"fault": "of prompt 'a blue cross', it has no 'red'"}
    assert verdict(BRIGHT, "anything").json() == {"fault": None}
    refused = problem(verdict("tests.services.served_rewards:fusy", "red"))
    assert (refused["status"], refused["kind"], refused["where"]) == (422, "reward-not-loaded", "body.reward")
    assert "did you mean 'tests.services.served_rewards:fussy'" in refused["detail"]
    wrong = body(pictures(2), "verifier", FUSSY, metadata=[{"include": [A_CIRCLE | {"count": n}]} for n in (1, 10**7)])
    said = problem(ask(client, wrong))
    where = "body.request.prompts.1.metadata.include.0.count"
    assert (said["status"], said["kind"], said["where"], said["got"]) == (422, "invalid-request", where, 10**7)
    assert "'verifier'" in said["detail"]
    assert problem(verdict(FUSSY, *["red"] * (MAX_CHECKED_PROMPTS + 1)))["status"] == 422


def test_health_metrics_and_documents(client: httpx.Client) -> None:
    scores(client, body(pictures(3), BRIGHT))
    assert client.get("/health/live").json() == {"status": "live"}
    assert client.get("/health/ready").json() == {"status": "ready"}
    shown = client.get("/metrics").text
    assert f'solrl_scored_images_total{{reward="{BRIGHT}",tenant="local"}}' in shown
    assert 'solrl_http_requests_total{method="POST",route="/v1/scores",status="200"}' in shown
    assert "solrl_score_queue_images 0.0" in shown
    assert "<title>solrl reward service</title>" in client.get("/docs").text
    contract = client.get("/openapi.json").json()
    for route in ("/v1/scores", "/v1/prompts"):
        assert contract["paths"][route]["post"]["security"] == [{"bearer": ["score"]}]
    assert len(client.get("/health/live").headers["x-request-id"]) == 16


def test_callers_need_a_token_with_the_scope(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    scorer, other = (create_token(file, "a", scopes, None)[0] for scopes in (("score",), ("rollout", "push")))
    app = create_app(RewardSettings(rewards=(BRIGHT,), device="cpu", token_file=file))
    content = body(pictures(1), BRIGHT)
    with client_at(app) as guarded:
        assert problem(ask(guarded, content))["status"] == 401
        assert problem(ask(guarded, content, Authorization=f"Bearer {other}"))["status"] == 403
        assert ask(guarded, content, Authorization=f"Bearer {scorer}").status_code == 200
        assert problem(guarded.get("/v1/rewards"))["status"] == 401
        assert problem(guarded.get("/metrics", headers={"Authorization": f"Bearer {scorer}"}))["status"] == 403
        assert guarded.get("/health/ready").status_code == 200


def test_a_stopping_service_finishes_its_work_and_refuses_more(app: Any, client: httpx.Client) -> None:
    service = app.state.service
    with calling(1) as callers:
        first = callers.submit(scores, client, wanted(1))
        assert served_rewards.reached.wait(600)
        service.draining = True
        try:
            refused = ask(client, wanted(2))
            assert problem(refused)["kind"] == "draining"
            assert "retry-after" in refused.headers
            assert problem(client.get("/health/ready"))["status"] == 503
            assert client.get("/health/live").status_code == 200
            served_rewards.opened.set()
            assert first.result(600).scores[GATED] == (1,)
        finally:
            service.draining = False


@pytest.mark.anyio
async def test_a_service_whose_scoring_ended_is_dead_and_logs_why(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        raise OSError("gone")

    batcher: Any = SimpleNamespace(waiting=0, run=run, close=AsyncMock())
    service = RewardService(RewardSettings(), RewardSet({}), batcher, RewardMetrics())
    while not service.dead:
        await asyncio.sleep(0)
    await service.close()
    batcher.close.assert_awaited()
    assert "gone" in caplog.text


def waiting(app: Any) -> int:
    """Images in the queue, as the metrics show them."""
    return metric(app, "solrl_score_queue_images")


def metric(app: Any, name: str) -> int:
    """The value of a metric without labels."""
    return int(float(re.findall(rf"^{name} (\S+)", app.state.metrics.exposition().decode(), re.MULTILINE)[0]))
