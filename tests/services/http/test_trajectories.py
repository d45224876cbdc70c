"""Stochastic candidates are the trajectories of their seeds, and images in answers count while nobody reads them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from solrl_core.families import Backbone, load_backbone
from solrl_core.rewards import RewardSet
from solrl_core.sampling.generator import Generator
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import STREAM_MEDIA_TYPE, StochasticSteps
from tests.support.service_helpers import MODEL, RunningService, problem, rollout_request, running_service

KINDS: dict[str, dict[str, Any]] = {
    "window": {"kind": "flow", "eta": 0.8, "first": 1, "count": 2},
    "all": {"kind": "dance", "eta": 0.3},
    "cps": {"kind": "cps", "eta": 0.8},
}


@pytest.fixture(scope="module")
def small() -> Iterator[RunningService]:
    """A service with 1 MiB for bodies and images."""
    limits = ("--max-inflight-bytes", "--max-adapter-bytes", "--max-body-bytes")
    with running_service(*(part for limit in limits for part in (limit, str(2**20)))) as running:
        yield running
        assert "Traceback" not in running.log.read_text()


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    """Its model, whose trajectories are further from those of the ODE than the smaller miniature's."""
    return load_backbone(MODEL)


def generated(backbone: Backbone, count: int, **settings: Any) -> torch.Tensor:
    """Images of the candidates of `answer_of`, made in this process."""
    return Generator(backbone, "bf16").generate("a red circle", expand_seeds(7, "p0", count), **settings).images


@pytest.mark.parametrize("kind", KINDS)
def test_stochastic_candidates_are_the_trajectories_of_their_seeds(
    small: RunningService, backbone: Backbone, kind: str
) -> None:
    sde = StochasticSteps.model_validate(KINDS[kind])
    answer = small.rollout(count=26, steps=4, precision="bf16", sde=KINDS[kind])
    (group,) = answer["groups"]
    assert StochasticSteps.model_validate(answer["plan"]["sde"]) == sde
    made = generated(backbone, 26, steps=4, solver=sde)
    rewards = RewardSet.load(["clipscore"], backbone)
    ours = rewards.score(["clipscore"], made, ["a red circle"] * 26, [{}] * 26)["clipscore"]
    np.testing.assert_allclose(group["scores"], ours.tolist(), atol=1e-3)
    assert not torch.allclose(made[:4], generated(backbone, 4, steps=4), atol=0.01)


def test_images_count_until_their_answer_is_read(small: RunningService) -> None:
    never = problem(small.client.post("/v1/rollouts", json=rollout_request(count=200, steps=1, images="png")))
    assert (never["status"], never["kind"], never["where"]) == (422, "too-many-candidates", "body.images")
    most = int(never["expected"].split()[2])
    unread = small.send(rollout_request(count=most, steps=1, images="png"), accept=STREAM_MEDIA_TYPE)
    with unread.socket:
        assert unread.socket.recv(12) == b"HTTP/1.1 200"
        response = small.client.post("/v1/rollouts", json=rollout_request(count=most, steps=1, images="png"))
        found = problem(response)
        assert (found["status"], found["kind"], response.headers["retry-after"]) == (503, "too-many-bytes", "5")
        # A request without images is accepted.
        plain = small.send(rollout_request(count=1, steps=1), accept=STREAM_MEDIA_TYPE)
        with plain.socket:
            assert plain.socket.recv(12) == b"HTTP/1.1 200"
    while small.client.post("/v1/rollouts", json=rollout_request(count=most, images="png")).status_code == 503:
        pass
