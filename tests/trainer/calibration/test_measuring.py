"""The plans that a calibration measures, and their measurement in turns."""

import torch
from solrl_core.families import load_backbone
from solrl_core.rewards import RewardSet
from solrl_core.sampling.fitting import SCHEDULES, identity_solver
from solrl_core.sampling.generator import Generator
from solrl_engine.sampler import Sampler
from solrl_engine.scorer import Scorer
from solrl_engine.side_stream import SideStream
from solrl_proto.rollouts import Plan, PromptItem, RewardSpec
from solrl_trainer.calibration.measuring import PlanBenchmark
from solrl_trainer.calibration.plans import PlanSet, plans
from solrl_trainer.ranks.communicator import Communicator
from solrl_trainer.rollouts.candidates import GroupSampler
from solrl_trainer.rollouts.sample_scorer import SampleScorer
from solrl_trainer.settings.presets import resolve

SEEDS = list(range(8))
PROMPTS = [PromptItem(id=text[2:], text=text) for text in ("a red circle", "a blue square", "a green star")]
PLANS = [
    Plan(steps=1, precision="bf16"),
    Plan(steps=2, precision="bf16", solver="dpm2"),
    Plan(steps=2, precision="bf16"),
]


def test_every_plan_has_its_turn_on_each_prompt() -> None:
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
    # After the warm-up, the order turns round with each prompt.
    assert asked == [*PLANS, *PLANS, *reversed(PLANS), *PLANS]
    assert [one.plan for one in found] == PLANS
    assert all(one.seconds.shape == (3,) and (one.seconds > 0).all() for one in found)
    truth = bench.scores(PLANS[2])
    assert torch.equal(truth, found[2].scores)
    assert sum(finished) == bench.steps(PLANS, PLANS[2])
    for one in found:
        alone = torch.stack([maker(one.plan).scores([prompt] * len(SEEDS), SEEDS) for prompt in PROMPTS])
        assert torch.equal(one.scores, alone)


PRESET = "mini-sana/sol_rl/clipscore"
SOLVER = identity_solver(SCHEDULES[0])


def test_every_precision_is_tried_with_all_step_counts() -> None:
    config = resolve(PRESET, overrides=["solver=dpm2"]).config
    measured = plans(config, ("nvfp4", "bf16"), [SOLVER], PlanSet())
    each = [(2, None), (3, None), (4, None), (6, None), (8, None), (4, SOLVER)]
    assert [(plan.steps, plan.fitted) for plan in measured] == each * 2
    assert all(plan.solver == "dpm2" for plan in measured)
