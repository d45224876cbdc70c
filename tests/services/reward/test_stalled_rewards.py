"""A reward that does not return: its requests fail, others are scored, and the service says so and ends when told."""

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from solrl_reward.app import create_app
from solrl_reward.settings import RewardSettings
from tests.services import served_rewards
from tests.services.reward_servers import RewardProcess, ask, body, client_at, pictures, scores, until
from tests.support.service_helpers import problem

BRIGHT, STUCK = "tests.services.served_rewards:brightness", "tests.services.served_rewards:stuck"


@pytest.fixture(params=[(BRIGHT, STUCK)])
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A client of a service with these rewards."""
    served_rewards.reset()
    app = create_app(RewardSettings(rewards=request.param, device="cpu", score_timeout=2))
    with client_at(app) as found:
        yield found
        served_rewards.opened.set()


def test_a_stalled_reward_fails_its_requests_and_no_others(client: httpx.Client) -> None:
    assert client.get("/health/live").status_code == 200
    for said in ("did not return within 2 s", "has not returned"):
        refused = ask(client, body(pictures(2), BRIGHT, STUCK))
        found = problem(refused)
        assert (found["status"], found["kind"]) == (503, "reward-stalled")
        assert f"reward '{STUCK}' {said}" in found["detail"]
        assert refused.headers["retry-after"] == "5"
        assert len(scores(client, body(pictures(3), BRIGHT)).scores[BRIGHT]) == 3
    assert served_rewards.batches == [2], "its second request is refused at once"
    assert problem(client.get("/health/live"))["kind"] == "reward-stalled"
    assert client.get("/health/ready").json() == {"status": "ready"}
    assert f'solrl_score_errors_total{{reward="{STUCK}"}} 1.0' in client.get("/metrics").text


def test_a_reward_that_returns_late_is_computed_again(client: httpx.Client) -> None:
    assert ask(client, body(pictures(2), STUCK)).status_code == 503
    served_rewards.opened.set()
    until(lambda: client.get("/health/live").status_code == 200)
    assert len(scores(client, body(pictures(2), STUCK)).scores[STUCK]) == 2


@pytest.mark.parametrize("client", [(STUCK,)], indirect=True)
def test_a_service_is_not_ready_without_a_reward_that_returns(client: httpx.Client) -> None:
    assert ask(client, body(pictures(1), STUCK)).status_code == 503
    assert problem(client.get("/health/ready"))["kind"] == "reward-stalled"


@pytest.mark.slow
def test_the_program_ends_when_told_although_a_reward_does_not_return(tmp_path: Path) -> None:
    with closing(RewardProcess(tmp_path, BRIGHT, STUCK, "--score-timeout", "0.5")) as server:
        server.start()
        with httpx.Client(base_url=server.address, timeout=600) as there:
            assert ask(there, body(pictures(1), STUCK)).status_code == 503
            assert there.get("/health/live").status_code == 503
        assert server.program is not None
        server.program.send_signal(signal.SIGTERM)
        assert server.program.wait(600) == 0
        assert "does not return" in server.program.log.read_text()
