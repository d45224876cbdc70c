"""Pruned plans: the most extreme candidates of a group get the same scores as without pruning; the others are null."""

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

COUNT, STEPS, AFTER, KEEP = 26, 4, 2, 10
TEXT = "a red circle and a blue square"


@cache
def fitted() -> dict[str, Any]:
    """A solver fitted to a few trajectories, as sent over the wire."""
    generator = Generator(load_backbone("mini-sana"), "bf16")
    examples = make_examples(generator, [TEXT] * 8, range(8), steps=6, solver="euler", guidance=1.0)
    return fit(generator, examples, SCHEDULES[0]).model_dump(mode="json")


def ask(service: RunningService, prune: dict[str, int] | None, solver: Any, **more: Any) -> RolloutAnswer:
    more |= {"prune": prune, "fitted" if isinstance(solver, dict) else "solver": solver}
    answer = service.rollout(prompts=[TEXT, "two green crosses"], count=COUNT, steps=STEPS, precision="bf16", **more)
    return RolloutAnswer.model_validate(answer)


@pytest.mark.parametrize(("name", "keep"), [("euler", KEEP), ("dpm2", KEEP), ("fitted", KEEP), ("euler", 1000)])
def test_survivors_have_the_same_scores_as_without_pruning(service: RunningService, name: str, keep: int) -> None:
    solver = fitted() if name == "fitted" else name
    whole = ask(service, None, solver)
    pruned = ask(service, {"after": AFTER, "keep": keep}, solver)
    assert pruned.plan.prune is not None
    for before, after in zip(whole.groups, pruned.groups, strict=True):
        assert before.pruned is None
        assert after.pruned is not None
        assert after.seeds == before.seeds
        assert after.pruned.count(False) == min(keep, COUNT)
        for was, now, reward, gone in zip(
            before.scores, after.scores, after.rewards["clipscore"], after.pruned, strict=True
        ):
            assert (now is None) == (reward is None) == gone
            assert now is None or now == pytest.approx(was, abs=1e-4)


def test_fitted_steps_equal_the_generator_s(service: RunningService) -> None:
    solver = fitted()
    group = ask(service, None, solver).groups[0]
    backbone = load_backbone("mini-sana")
    own = FittedSolver.model_validate(solver)
    made = Generator(backbone, "bf16").generate(TEXT, group.seeds, steps=STEPS, solver=own)
    scores = RewardSet.load(["clipscore"], backbone).score(["clipscore"], made.images, [TEXT] * COUNT, [{}] * COUNT)
    assert list(group.scores) == pytest.approx(scores["clipscore"].tolist(), abs=1e-4)
    assert list(group.scores) != pytest.approx(list(ask(service, None, "euler").groups[0].scores), abs=1e-2)


def test_a_solver_fitted_to_a_different_model_is_refused(service: RunningService) -> None:
    digests = service.client.get("/v1/models").json()["models"][0]["digests"]
    parts = {part: digest for part, digest in digests.items() if not part.startswith("reward:")}
    for model, status in ((model_digest(parts), 200), ("sha256:" + "0" * 64, 422)):
        bound = {"model": model, "solver": "euler", "guidance": 1.0}
        body = rollout_request([TEXT], COUNT, steps=STEPS, fitted={**fitted(), "fitted_for": bound})
        response = service.client.post("/v1/rollouts", json=body)
        assert response.status_code == status
    assert problem(response)["kind"] == "fitted-mismatch"
