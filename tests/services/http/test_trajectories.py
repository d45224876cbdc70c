"""Stochastic and fitted candidates are their seeds' trajectories; images in answers count while nobody reads them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from solrl_core.families import Backbone, load_backbone
from solrl_core.fingerprint import model_digest
from solrl_core.rewards import RewardSet
from solrl_core.sampling.fitting import SCHEDULES, fit, make_examples
from solrl_core.sampling.generator import Generator
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import STREAM_MEDIA_TYPE, FittedSolver, StochasticSteps
from tests.support.service_helpers import MODEL, RunningService, problem, rollout_request, running_service

TEXT = "a red circle"
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
    """Images of the service's candidates, made in this process."""
    return Generator(backbone, "bf16").generate(TEXT, expand_seeds(7, "p0", count), **settings).images


@pytest.fixture(scope="module")
def fitted(backbone: Backbone) -> FittedSolver:
    """A solver fitted to a few trajectories."""
    generator = Generator(backbone, "bf16")
    examples = make_examples(generator, [TEXT] * 8, range(8), steps=6, solver="euler", guidance=1.0)
    return fit(generator, examples, SCHEDULES[0])


@pytest.mark.parametrize("kind", [*KINDS, "fitted"])
def test_candidates_are_the_trajectories_of_their_seeds(
    small: RunningService, backbone: Backbone, fitted: FittedSolver, kind: str
) -> None:
    name, solver = ("fitted", fitted) if kind == "fitted" else ("sde", StochasticSteps.model_validate(KINDS[kind]))
    dumped = solver.model_dump(mode="json")
    answer = small.rollout(count=26, steps=4, precision="bf16", **{name: dumped})
    (group,) = answer["groups"]
    assert answer["plan"][name] == dumped
    images = generated(backbone, 26, steps=4, solver=solver)
    rewards = RewardSet.load(["clipscore"], backbone)
    ours = rewards.score(["clipscore"], images, [TEXT] * 26, [{}] * 26)["clipscore"]
    np.testing.assert_allclose(group["scores"], ours.tolist(), atol=1e-3)
    assert not torch.allclose(images[:4], generated(backbone, 4, steps=4), atol=0.01)


def test_a_solver_fitted_to_a_different_model_is_refused(small: RunningService, fitted: FittedSolver) -> None:
    digests = small.client.get("/v1/models").json()["models"][0]["digests"]
    parts = {part: digest for part, digest in digests.items() if not part.startswith("reward:")}
    for model, status in ((model_digest(parts), 200), ("sha256:" + "0" * 64, 422)):
        bound = {"model": model, "solver": "euler", "guidance": 1.0}
        body = rollout_request(count=2, steps=4, fitted={**fitted.model_dump(mode="json"), "fitted_for": bound})
        response = small.client.post("/v1/rollouts", json=body)
        assert response.status_code == status
    assert problem(response)["kind"] == "fitted-mismatch"


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
