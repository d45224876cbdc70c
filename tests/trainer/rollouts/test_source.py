"""Requests for a run's candidates: the versions and steps asked for, and what is refused before it is sent."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from solrl_client.retries import Wait
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import PromptItem, RolloutAnswer, RolloutRequest
from solrl_trainer.ranks.communicator import Communicator
from solrl_trainer.service.run_requests import RunRequests
from solrl_trainer.service.service_source import ServiceSource, open_service_source
from solrl_trainer.settings.presets import resolve
from tests.support.ports import free_port
from tests.trainer.training_helpers import tiny_config

PROMPTS = [PromptItem(id="p", text="a red circle")]
ON_A_GPU = SimpleNamespace(backbone=SimpleNamespace(device=torch.device("cuda")), merge_behaviour=lambda *_: None)
DEVICE: Any = SimpleNamespace(own_prompts=lambda iteration: PROMPTS, models=ON_A_GPU)

MODEL: Any = SimpleNamespace(height=8, width=8, frames=1)


class Asked:
    """A client that notes requests and answers none."""

    def __init__(self) -> None:
        self.requests: list[RolloutRequest] = []

    def wait_for_version(self, run: str, version: int, seconds: float) -> None:
        """Every version is there."""

    def rollouts(self, request: RolloutRequest, **_: Any) -> RolloutAnswer:
        self.requests.append(request)
        raise ConnectionError


def explored(request: RolloutRequest) -> tuple[int, int]:
    """Version, and the first stochastic step."""
    return request.adapter.version, request.plan.sde.first


def test_a_lagging_exploration_takes_the_steps_of_its_own_iteration() -> None:
    moving = ("algorithm.window_order=progressive", "algorithm.window_within=1", "explore.lag=1")
    words = [*moving, "rollout_url=http://gpu-node:8100"]
    config = resolve("mini-sana/flowgrpo_fast_two_stage/clipscore", overrides=words).config
    client: Any = Asked()
    asking = RunRequests(config, client, model=MODEL)
    source = ServiceSource(config.model_copy(update={"iterations": 3}), asking, DEVICE)
    for version in range(3):
        source.push(version, b"")
        with pytest.raises(ConnectionError):
            list(source.explore(version, print))
    assert sorted(map(explored, client.requests)) == [(0, 0), (0, 1), (1, 2)]
    client.requests.clear()
    with pytest.raises(ConnectionError):
        source.images_of(PROMPTS, [[1, 2]], 1, 2)
    with pytest.raises(ConnectionError):
        source.groups_of(PROMPTS, 0, 7, 1)
    assert list(map(explored, client.requests)) == [(1, 2), (0, 1)]


@pytest.mark.parametrize(("patience", "least"), [(0.0, None), (5.0, 0.0), (600.0, 500.0)])
def test_a_loading_trainer_waits_for_its_service_as_long_as_patience_says(patience: float, least: float | None) -> None:
    config = tiny_config(f"rollout_url=http://127.0.0.1:{free_port()}", f"patience={patience}")
    left: list[float] = []

    def note(server: str, wait: Wait | None) -> None:
        assert wait is not None
        left.append(wait.left)
        raise ArithmeticError

    train: Any = None
    with (
        pytest.raises(ProblemError if least is None else ArithmeticError),
        open_service_source(config, train, Communicator(), note),
    ):
        pass
    if least is None:
        assert left == []
    else:
        assert least < left[0] <= patience


def test_a_request_that_a_service_would_refuse_is_a_problem_before_it_is_sent() -> None:
    client: Any = Asked()
    source = RunRequests(tiny_config(), client, model=MODEL)
    with pytest.raises(ProblemError) as raised:
        source.images_of(PROMPTS, [[5, 5 + 2**32]], 0, 0)
    problem = raised.value.problem
    assert (problem.kind, problem.status, problem.where) == ("invalid-request", 422, "candidates")
    assert "equal modulo 2**32" in str(problem.expected)
    assert "seeds" in str(problem.got)
    assert "pydantic" not in str(raised.value)
    with pytest.raises(ProblemError, match=r"at candidates\.seeds\.0\.0; got -1"):
        source.images_of(PROMPTS, [[-1]], 0, 0)
    assert not client.requests
