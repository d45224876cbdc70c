"""A reward that does not return: its requests fail, others are scored, and the service says so and ends when told."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import served_rewards
from fault_trials.child import command
from fault_trials.processes import Program
from reward_servers import ask, body, pictures, scores, serving, until
from service_helpers import problem
from solrl_reward.app import create_app
from solrl_reward.cli import main
from solrl_reward.settings import RewardSettings
from support.ports import free_port

BRIGHT, STUCK = "served_rewards:brightness", "served_rewards:stuck"


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    served_rewards.reset()
    app = create_app(RewardSettings(rewards=(BRIGHT, STUCK), device="cpu", score_timeout=2))
    with serving(app) as address, httpx.Client(base_url=address, timeout=600) as found:
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
    assert client.get("/health/ready").json() == {"status": "ready", "rewards": [BRIGHT]}
    assert f'solrl_score_errors_total{{reward="{STUCK}"}} 1.0' in client.get("/metrics").text


def test_a_reward_that_returns_late_is_computed_again(client: httpx.Client) -> None:
    assert ask(client, body(pictures(2), STUCK)).status_code == 503
    served_rewards.opened.set()
    until(lambda: client.get("/health/live").status_code == 200)
    assert len(scores(client, body(pictures(2), STUCK)).scores[STUCK]) == 2


def test_a_service_is_not_ready_without_a_reward_that_returns() -> None:
    served_rewards.reset()
    app = create_app(RewardSettings(rewards=(STUCK,), device="cpu", score_timeout=0.5))
    with serving(app) as address, httpx.Client(base_url=address, timeout=600) as alone:
        assert ask(alone, body(pictures(1), STUCK)).status_code == 503
        assert problem(alone.get("/health/ready"))["kind"] == "reward-stalled"
        served_rewards.opened.set()


@pytest.mark.slow
def test_the_program_ends_when_told_although_a_reward_does_not_return(tmp_path: Path) -> None:
    port = free_port()
    words = ["serve", "--rewards", BRIGHT, STUCK, "--device", "cpu", "--port", str(port), "--score-timeout", "0.5"]
    environment = os.environ | {"PYTHONPATH": str(Path(served_rewards.__file__).parent), "HOME": str(tmp_path)}
    process = Program(command, (main, ("solrl-reward", *words), os.getcwd(), environment), tmp_path / "log")
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as there:
            until(lambda: ready(there))
            assert ask(there, body(pictures(1), STUCK)).status_code == 503
            assert there.get("/health/live").status_code == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 0
    finally:
        process.kill()
        process.wait()
    assert "does not return" in (tmp_path / "log").read_text()


def ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health/ready").status_code == 200
    except httpx.TransportError:
        return False
