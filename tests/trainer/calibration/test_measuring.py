"""The measurement of plans in turns, on a miniature."""

import pytest
import torch
from solrl_core.families import load_backbone
from solrl_core.rewards import RewardSet
from solrl_core.sampling.generator import Generator
from solrl_engine.sampler import Sampler
from solrl_engine.scorer import Scorer
from solrl_engine.side_stream import SideStream
from solrl_proto.rollouts import Plan, PromptItem, Prune, RewardSpec
from solrl_trainer.calibration.measuring import Bench
from solrl_trainer.ranks.communicator import SingleProcess
from solrl_trainer.rollouts.candidates import GroupSampler
from solrl_trainer.rollouts.sample_scorer import SampleScorer

SEEDS = list(range(8))
PROMPTS = [PromptItem(id=text[2:], text=text) for text in ("a red circle", "a blue square", "a green star")]
PLANS = [
    Plan(steps=1, precision="bf16"),
    Plan(steps=2, precision="bf16", prune=Prune(after=1, keep=4)),
    Plan(steps=2, precision="bf16", prune=Prune(after=1, keep=6)),
    Plan(steps=2, precision="bf16"),
]


@pytest.fixture(scope="module")
def scorer() -> tuple[Generator, SampleScorer]:
    backbone = load_backbone("mini-sana")
    rewards, trained = RewardSet.load(["clipscore"], backbone), [RewardSpec(name="clipscore", weight=1)]
    return Generator(backbone, "bf16"), SampleScorer(
        Scorer(rewards), ["clipscore"], trained, SideStream(backbone.device)
    )


def test_every_plan_has_its_turn_on_each_prompt(scorer: tuple[Generator, SampleScorer]) -> None:
    generator, scores = scorer
    asked: list[Plan] = []

    def maker(plan: Plan) -> GroupSampler:
        asked.append(plan)
        return GroupSampler(Sampler(generator, lambda: plan), scores)

    finished: list[float] = []
    bench = Bench(maker, PROMPTS, {prompt.id: SEEDS for prompt in PROMPTS}, SingleProcess(), finished.append)
    found = bench.measure(PLANS)
    # The two plans that share a step are asked for once. After the warm-up, the order turns round with each prompt.
    turn = [PLANS[0], PLANS[1], PLANS[3]]
    assert asked == [*turn, *turn, *reversed(turn), *turn]
    assert [one.plan for one in found] == PLANS
    assert all(one.seconds.shape == (3,) and (one.seconds > 0).all() for one in found)
    truth = bench.scores(PLANS[3])
    assert torch.equal(truth, found[3].scores)
    assert sum(finished) == bench.steps(PLANS, PLANS[3])


def test_sharing_steps_changes_no_score(scorer: tuple[Generator, SampleScorer]) -> None:
    generator, scores = scorer

    def maker(plan: Plan) -> GroupSampler:
        return GroupSampler(Sampler(generator, lambda: plan), scores)

    bench = Bench(maker, PROMPTS, {prompt.id: SEEDS for prompt in PROMPTS}, SingleProcess(), lambda part: None)
    for one in bench.measure(PLANS):
        alone = torch.stack([maker(one.plan).scores([prompt] * len(SEEDS), SEEDS) for prompt in PROMPTS])
        assert torch.equal(one.scores.nan_to_num(-1e9), alone.nan_to_num(-1e9))
        assert int(alone.isnan().sum()) == 3 * (8 - one.plan.prune.keep if one.plan.prune else 0)
