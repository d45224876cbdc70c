"""Intervals over seeds and prompts, and the predicted match rate."""

import math

import numpy as np
import pytest
from paper.intervals import over_seeds, over_seeds_and_prompts, pooled_differences, ratio_of_means
from paper.theory import match_rate
from scipy.stats import t as student


def effects(generator: np.random.Generator, seeds: int, prompts: int, spread: tuple[float, float, float]) -> np.ndarray:
    """Values [seeds, prompts] of mean 1, with these deviations of seeds, of prompts and of both together."""
    of_seed, of_prompt, of_both = spread
    return (
        1
        + of_seed * generator.standard_normal((seeds, 1))
        + of_prompt * generator.standard_normal((1, prompts))
        + of_both * generator.standard_normal((seeds, prompts))
    )


@pytest.mark.parametrize("spread", [(0.3, 0.3, 0.3), (1.0, 0.1, 0.1), (0.0, 1.0, 0.2), (0.0, 0.0, 1.0)])
def test_the_interval_covers_the_mean_as_often_as_it_says(spread: tuple[float, float, float]) -> None:
    generator = np.random.default_rng(0)
    found = [over_seeds_and_prompts(effects(generator, 3, 128, spread)) for _ in range(1000)]
    covered = np.mean([one.low <= 1 <= one.high for one in found])
    assert 0.915 <= covered <= 0.985


def test_one_seed_gives_the_t_interval_over_prompts() -> None:
    values = effects(np.random.default_rng(2), 1, 30, (0, 1, 1))
    found = over_seeds_and_prompts(values)
    low, high = student.interval(0.95, 29, values.mean(), values.std(ddof=1) / math.sqrt(30))
    assert (found.low, found.high, found.seeds) == (pytest.approx(low), pytest.approx(high), 1)


def test_one_seed_alone_sets_no_limit() -> None:
    assert not over_seeds(np.array([1.0])).known
    found = over_seeds(np.array([1.0, 2.0, 3.0]))
    assert (found.mean, found.high) == (2, pytest.approx(2 + 4.302653 / math.sqrt(3)))


def test_fiellers_interval_covers_the_ratio() -> None:
    generator, covered = np.random.default_rng(3), []
    for _ in range(300):
        below = effects(generator, 3, 40, (0.1, 0.3, 0.3))
        above = 0.2 * below + 0.05 * effects(generator, 3, 40, (1, 1, 1)) - 0.05
        found = ratio_of_means(above, below)
        covered.append(found.low <= 0.2 <= found.high)
    assert 0.92 <= np.mean(covered) <= 0.995


def test_differences_of_equal_variance_have_one_width_and_few_false_alarms() -> None:
    generator, alarms, covered = np.random.default_rng(5), 0, []
    for _ in range(200):
        found = pooled_differences({str(n): effects(generator, 3, 40, (0.3, 0.3, 0.3)) - 1 for n in range(20)})
        alarms += any(one.clear for one in found.values())
        covered += [one.low <= 0 <= one.high for one in found.values()]
        assert np.ptp([one.high - one.low for one in found.values()]) < 1e-12
    assert 0.93 <= np.mean(covered) <= 0.97
    assert alarms <= 20  # of 200, in each of which one of 20 differences may seem clear


def test_holms_correction_multiplies_the_smallest_p_most() -> None:
    noise = effects(np.random.default_rng(6), 3, 40, (0.1, 0.1, 0.1))
    noise -= noise.mean()
    found = pooled_differences({"large": noise + 1, "small": noise - 0.05, "none": noise})
    single = {name: pooled_differences({name: noise + by})[name].p for name, by in (("large", 1), ("small", -0.05))}
    assert found["large"].clear
    assert not found["small"].clear
    assert found["none"].p == 1
    assert found["large"].p < single["large"] < single["small"] < found["small"].p
    assert pooled_differences({}) == {}


def test_the_match_rate_of_perfect_and_of_useless_proxies() -> None:
    assert match_rate(1.0, 96, 12) == 1
    assert match_rate(0.0, 96, 12) == pytest.approx(12 / 96, abs=0.005)
    assert match_rate(0.8, 24, 12) == pytest.approx(match_rate(0.8, 192, 96), abs=0.01)
