"""The plans that a calibration measures, and how they share steps."""

import pytest
from solrl_core.sampling.fitting import SCHEDULES, identity_solver
from solrl_proto.rollouts import Plan, Prune
from solrl_trainer.calibration.measuring import shared_beginnings, shared_steps
from solrl_trainer.calibration.plans import PlanSet, name, plans, reference_plan, solver_steps
from solrl_trainer.settings.presets import resolve

PRESET = "mini-sana/sol_rl/clipscore"
SOLVER = identity_solver(SCHEDULES[0])


def test_every_precision_is_tried_with_all_step_counts_with_and_without_pruning() -> None:
    config = resolve(PRESET, overrides=["solver=dpm2"]).config
    found = plans(config, ("nvfp4", "bf16"), [SOLVER], PlanSet())
    # 2, 3, 4, 6 and 8 steps and fitted ones; those of at least 4 also pruned to a third, half and two thirds.
    assert len(found) == 2 * (5 + 1 + 3 * (3 + 1))
    assert {plan.prune.keep for plan in found if plan.prune} == {32, 48, 64}
    assert all(plan.prune.after < plan.steps for plan in found if plan.prune)
    assert all(plan.solver == "dpm2" for plan in found)
    assert {plan.prune.after for plan in found if plan.fitted == SOLVER and plan.prune} == {3}


def test_no_plan_keeps_fewer_than_are_selected() -> None:
    few = resolve(PRESET, overrides=["explore.candidates=48"]).config
    assert {plan.prune.keep for plan in plans(few, ("bf16",), [SOLVER], PlanSet()) if plan.prune} == {
        24,
        32,
    }


def test_the_set_can_be_limited_but_has_the_reference() -> None:
    config = resolve(PRESET).config
    found = plans(config, ("nvfp4",), [], PlanSet(steps=(4,), keep=(40,)))
    assert [(plan.steps, plan.prune and plan.prune.keep) for plan in found] == [(4, None), (4, 40), (6, None), (6, 40)]
    assert reference_plan(config, ("nvfp4", "bf16")) == found[2]


def test_plans_decode_in_the_runs_precision_and_the_reference_in_the_autoencoders() -> None:
    config = resolve(PRESET, overrides=["explore.decoder_precision=fp8"]).config
    found = plans(config, ("nvfp4",), [], PlanSet(steps=(4,), keep=(40,)))
    assert [plan.decoder_precision for plan in found] == [None, "fp8", "fp8", "fp8", "fp8"]
    assert found[0] == reference_plan(config, ("nvfp4",))
    assert name(found[1]) == "nvfp4 4 steps, decoded in fp8"


@pytest.mark.parametrize("keep", [23, 96])
def test_a_number_to_keep_that_no_plan_can_have_is_refused(keep: int) -> None:
    with pytest.raises(ValueError, match=rf"got --keep {keep}; expected at least the 24 .* fewer than the 96"):
        plans(resolve(PRESET).config, ("bf16",), [], PlanSet(keep=(keep,)))


def test_pruned_candidates_take_no_more_steps() -> None:
    assert solver_steps(Plan(steps=6), 96) == 6 * 96
    assert solver_steps(Plan(steps=6, prune=Prune(after=2, keep=48)), 96) == 2 * 96 + 4 * 48


def test_plans_that_prune_at_the_same_time_share_their_beginning() -> None:
    six = [Plan(steps=6, prune=Prune(after=3, keep=keep)) for keep in (32, 48, 64)]
    four = Plan(steps=4, prune=Prune(after=2, keep=48))
    ways = shared_beginnings([Plan(steps=6), *six, Plan(steps=4), four])
    assert [[at for at, _ in way] for way in ways] == [[0], [1, 2, 3], [4], [5]]
    assert shared_steps(six, 96) == 3 * 96 + 3 * (32 + 48 + 64)
    assert shared_steps([Plan(steps=6)], 96) == 6 * 96
