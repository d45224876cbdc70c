"""The decision of a calibration, on times and scores made up so that the right one is known."""

import numpy as np
import pytest
import torch
from solrl_proto.rollouts import Plan
from solrl_trainer.calibration.deciding import MeasuredPlan, assess, cheapest, verdict
from solrl_trainer.calibration.measuring import Observed
from solrl_trainer.records.evaluations import mean_interval, mean_intervals_together

PROMPTS, N, KEEP = 12, 48, 12
REFERENCE = Plan(steps=6, precision="nvfp4")
TRUE = torch.randn(PROMPTS, N, generator=torch.Generator().manual_seed(0))
DRIFT = np.linspace(1, 3, PROMPTS)
"""A machine that becomes three times as slow from the first to the last prompt."""


def observed(steps: int, seconds: float, noise: float, jitter: float = 0.01) -> Observed:
    """A plan of so many steps whose scores are the true ones with noise."""
    random = torch.Generator().manual_seed(steps)
    scores = TRUE + noise * torch.randn(TRUE.shape, generator=random)
    times = seconds * DRIFT * (1 + jitter * np.random.default_rng(steps).standard_normal(PROMPTS))
    return Observed(Plan(steps=steps, precision="nvfp4"), scores, times)


def measured(*plans: Observed) -> dict[int, MeasuredPlan]:
    """The assessed plans by their steps; the last is the reference."""
    return {one.plan.steps: one for one in assess(plans, TRUE, KEEP, plans[-1].plan)}


def test_ratios_of_times_and_losses_are_paired_over_prompts() -> None:
    found = measured(observed(2, 1.0, 1.0), observed(6, 3.0, 0.1))
    assert found[2].cost.value == pytest.approx(1 / 3, rel=0.02)
    assert found[2].cost.high - found[2].cost.low < 0.02
    assert found[2].seconds == pytest.approx(2, rel=0.05)
    assert found[6].cost == (1, 1, 1)
    found = measured(observed(4, 2.0, 0.3), observed(6, 3.0, 0.3))
    # Scores of the same quality: the separations agree, and the interval of their difference has 0.
    assert found[4].loss.low < 0 < found[4].loss.high
    worse = measured(observed(2, 1.0, 3.0), observed(6, 3.0, 0.1))
    assert worse[2].loss.low > 0.2
    assert worse[2].loss.value == pytest.approx(worse[6].separation.value - worse[2].separation.value)
    assert worse[6].loss == (0, 0, 0)


def test_intervals_of_many_plans_hold_at_once_and_of_equal_ones_are_no_wider() -> None:
    trials, plans, prompts = 20, 30, 48
    missed_together = missed_alone = 0
    for trial in range(trials):
        values = np.random.default_rng(trial).standard_normal((plans, prompts))
        together = mean_intervals_together(values)
        assert [mean for mean, _, _ in together] == pytest.approx(values.mean(1).tolist())
        missed_together += any(not low <= 0 <= high for _, low, high in together)
        missed_alone += any(not low <= 0 <= high for _, low, high in map(mean_interval, values[:10]))
    # Together, all hold in 95 % of the trials; alone, ten intervals of 95 % all hold in 60 %.
    assert missed_together <= 3
    assert missed_alone >= 5
    # Equal plans need no wider ones.
    one = np.random.default_rng(0).standard_normal((1, 48))
    equal = mean_intervals_together(np.concatenate([one, one, np.zeros_like(one)]))
    assert equal[0] == pytest.approx(equal[1])
    assert equal[0] == pytest.approx(mean_interval(one[0]), abs=0.03)
    assert equal[2] == (0, 0, 0)


def test_the_cheapest_plan_that_is_surely_good_enough_is_chosen() -> None:
    found = measured(observed(2, 1.0, 3.0), observed(3, 1.5, 0.5), observed(4, 2.0, 0.1), observed(6, 3.0, 0.1))
    plans, three = list(found.values()), found[3].separation
    assert cheapest(plans, three.low - 0.001) is found[3]
    # Between the end of its interval and its mean, three steps are undecided.
    between = (three.low + three.value) / 2
    assert cheapest(plans, between) is found[4]
    assert not found[3].meets(between)
    assert not found[3].misses(between)
    assert found[3].misses(three.high + 0.001)
    assert cheapest(plans, 1) is None


def test_a_verdict_without_a_chosen_plan_says_what_would_help() -> None:
    found = measured(observed(3, 1.5, 0.5), observed(6, 3.0, 0.1))
    plans, best = list(found.values()), found[6].separation
    (line,) = verdict(plans, None, REFERENCE, (best.value + best.high) / 2)
    assert line.startswith("not sure to be good enough: nvfp4 6 steps with a separation of ")
    (line,) = verdict(plans, None, REFERENCE, 1)
    assert line.startswith("every plan surely selects worse than required; the best, nvfp4 6 steps, ")
