"""Fitted steps at the service: the same candidates as the generator's, for their own model alone."""

from functools import cache
from typing import Any

import pytest
from solrl_core.families import load_backbone
from solrl_core.fingerprint import model_digest
from solrl_core.rewards import RewardSet
from solrl_core.sampling.fitting import SCHEDULES, fit, make_examples
from solrl_core.sampling.generator import Generator
from solrl_proto.rollouts import FittedSolver, RolloutAnswer
from tests.support.service_helpers import RunningService, problem, rollout_request
from tests.support.small_model import small_model

COUNT, STEPS = 26, 4
TEXT = "a red circle and a blue square"


@cache
def fitted() -> dict[str, Any]:
    """A solver fitted to a few trajectories, as sent over the wire."""
    generator = Generator(load_backbone(small_model()), "bf16")
    examples = make_examples(generator, [TEXT] * 8, range(8), steps=6, solver="euler", guidance=1.0)
    return fit(generator, examples, SCHEDULES[0]).model_dump(mode="json")


def ask(service: RunningService, **plan: Any) -> RolloutAnswer:
    answer = service.rollout(prompts=[TEXT, "two green crosses"], count=COUNT, steps=STEPS, precision="bf16", **plan)
    return RolloutAnswer.model_validate(answer)


def test_fitted_steps_equal_the_generator_s(service: RunningService) -> None:
    solver = fitted()
    group = ask(service, fitted=solver).groups[0]
    backbone = load_backbone(small_model())
    own = FittedSolver.model_validate(solver)
    made = Generator(backbone, "bf16").generate(TEXT, group.seeds, steps=STEPS, solver=own)
    scores = RewardSet.load(["clipscore"], backbone).score(["clipscore"], made.images, [TEXT] * COUNT, [{}] * COUNT)
    assert list(group.scores) == pytest.approx(scores["clipscore"].tolist(), abs=1e-4)
    assert list(group.scores) != pytest.approx(list(ask(service, solver="euler").groups[0].scores), abs=5e-4)


def test_a_solver_fitted_to_a_different_model_is_refused(service: RunningService) -> None:
    digests = service.client.get("/v1/models").json()["models"][0]["digests"]
    parts = {part: digest for part, digest in digests.items() if not part.startswith("reward:")}
    for model, status in ((model_digest(parts), 200), ("sha256:" + "0" * 64, 422)):
        bound = {"model": model, "solver": "euler", "guidance": 1.0}
        body = rollout_request([TEXT], COUNT, steps=STEPS, fitted={**fitted(), "fitted_for": bound})
        response = service.client.post("/v1/rollouts", json=body)
        assert response.status_code == status
    assert problem(response)["kind"] == "fitted-mismatch"
