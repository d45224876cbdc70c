"""The plans that a calibration measures, how they share steps, and their measurement in turns."""

import pytest
import torch
from solrl_core.families import load_backbone
from solrl_core.rewards import RewardSet
from solrl_core.sampling.fitting import SCHEDULES, identity_solver
from solrl_core.sampling.generator import Generator
from solrl_engine.sampler import Sampler
from solrl_engine.scorer import Scorer
from solrl_engine.side_stream import SideStream
from solrl_proto.rollouts import Plan, PromptItem, Prune, RewardSpec
from solrl_trainer.calibration.measuring import PlanBenchmark, shared_beginnings, shared_steps
from solrl_trainer.calibration.plans import PlanSet, plans, reference_plan, solver_steps
from solrl_trainer.ranks.communicator import Communicator
from solrl_trainer.rollouts.candidates import GroupSampler
from solrl_trainer.rollouts.sample_scorer import SampleScorer
from solrl_trainer.settings.presets import resolve

SEEDS = list(range(8))
PROMPTS = [PromptItem(id=text[2:], text=text) for text in ("a red circle", "a blue square", "a green star")]
PLANS = [
    Plan(steps=1, precision="bf16"),
    Plan(steps=2, precision="bf16", prune=Prune(after=1, keep=4)),
    Plan(steps=2, precision="bf16", prune=Prune(after=1, keep=6)),
    Plan(steps=2, precision="bf16"),
]


def test_every_plan_has_its_turn_on_each_prompt_and_sharing_steps_changes_no_score() -> None:
    backbone = load_backbone("mini-sana")
    rewards, trained = RewardSet.load(["clipscore"], backbone), [RewardSpec(name="clipscore", weight=1)]
    generator = Generator(backbone, "bf16")
    scores = SampleScorer(Scorer(rewards), ["clipscore"], trained, SideStream(backbone.device))
    asked: list[Plan] = []

    def maker(plan: Plan) -> GroupSampler:
        asked.append(plan)
        return GroupSampler(Sampler(generator, lambda: plan), scores)

    finished: list[float] = []
    bench = PlanBenchmark(maker, PROMPTS, {prompt.id: SEEDS for prompt in PROMPTS}, Communicator(), finished.append)
    found = bench.measure(PLANS)
    # The two plans that share a step are asked for once. After the warm-up, the order turns round with each prompt.
    turn = [PLANS[0], PLANS[1], PLANS[3]]
    assert asked == [*turn, *turn, *reversed(turn), *turn]
    assert [one.plan for one in found] == PLANS
    assert all(one.seconds.shape == (3,) and (one.seconds > 0).all() for one in found)
    truth = bench.scores(PLANS[3])
    assert torch.equal(truth, found[3].scores)
    assert sum(finished) == bench.steps(PLANS, PLANS[3])
    for one in found:
        alone = torch.stack([maker(one.plan).scores([prompt] * len(SEEDS), SEEDS) for prompt in PROMPTS])
        assert torch.equal(one.scores.nan_to_num(-1e9), alone.nan_to_num(-1e9))
        assert int(alone.isnan().sum()) == 3 * (8 - one.plan.prune.keep if one.plan.prune else 0)


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
    few = resolve(PRESET, overrides=["explore.candidates=48"]).config
    kept = {plan.prune.keep for plan in plans(few, ("bf16",), [SOLVER], PlanSet()) if plan.prune}
    assert kept == {24, 32}, "no plan keeps fewer than are selected"


def test_limited_sets_have_the_reference() -> None:
    config = resolve(PRESET).config
    found = plans(config, ("nvfp4",), [], PlanSet(steps=(4,), keep=(40,)))
    assert [(plan.steps, plan.prune and plan.prune.keep) for plan in found] == [(4, None), (4, 40), (6, None), (6, 40)]
    assert reference_plan(config, ("nvfp4", "bf16")) == found[2]


@pytest.mark.parametrize("keep", [23, 96])
def test_a_number_to_keep_that_no_plan_can_have_is_refused(keep: int) -> None:
    with pytest.raises(ValueError, match=rf"got --keep {keep}; expected at least the 24 .* fewer than the 96"):
        plans(resolve(PRESET).config, ("bf16",), [], PlanSet(keep=(keep,)))


def test_pruned_candidates_take_no_more_steps_and_plans_share_their_beginning() -> None:
    assert solver_steps(Plan(steps=6), 96) == 6 * 96
    assert solver_steps(Plan(steps=6, prune=Prune(after=2, keep=48)), 96) == 2 * 96 + 4 * 48
    six = [Plan(steps=6, prune=Prune(after=3, keep=keep)) for keep in (32, 48, 64)]
    four = Plan(steps=4, prune=Prune(after=2, keep=48))
    ways = shared_beginnings([Plan(steps=6), *six, Plan(steps=4), four])
    assert [[at for at, _ in way] for way in ways] == [[0], [1, 2, 3], [4], [5]]
    assert shared_steps(six, 96) == 3 * 96 + 3 * (32 + 48 + 64)
    assert shared_steps([Plan(steps=6)], 96) == 6 * 96
