"""Curves are thinned to as many points as a chart shows."""

import pytest
from solrl_rollout.status.curves import MOST_POINTS, OverviewCurves, detail, thinned
from solrl_rollout.store import MemoryRunStore
from tests.services.iteration_helpers import report
from tests.services.store_helpers import TENANT, fill


@pytest.mark.parametrize("count", [0, 1, 2, MOST_POINTS, MOST_POINTS + 1, MOST_POINTS + 2, 1000, 9999])
def test_a_thinned_curve_keeps_its_ends_and_its_order(count: int) -> None:
    points = thinned(range(count))
    assert len(points) == min(count, MOST_POINTS)
    assert list(points) == sorted(set(points))
    assert not count or (points[0], points[-1]) == (0, count - 1)


def test_the_number_of_series_is_bounded_if_names_change_at_every_point() -> None:
    changing = [
        report(i, rewards={f"r{i}": {"mean": 0, "best": 0, "worst": 0}}, seconds={f"s{i}": 1}) for i in range(99)
    ]
    assert len(detail(changing).series) == 6 + 32 + 32


def test_a_detailed_curve_has_every_reward_and_phase() -> None:
    later = report(1, rewards={"hpsv2": {"mean": 0.123456789, "best": 1, "worst": 0}}, seconds={"train": 1})
    curve = detail([report(0), later])
    assert curve.iterations == (0, 1)
    assert curve.series["reward:clipscore"] == (0.5, None)
    assert curve.series["reward:hpsv2"] == (None, 0.12346)
    assert curve.series["seconds:explore"] == (2.0, None)
    assert curve.series["loss"] == (0.9, 0.9)
    assert "spearman" not in curve.series


def test_a_measured_rank_fidelity_is_drawn_until_the_next() -> None:
    whole = [report(i, spearman=0.9 if i == 10 else 0.8 if i == 1500 else None) for i in range(2000)]
    curve = detail(whole)
    assert len(curve.iterations) == MOST_POINTS
    expected = (None if i < 10 else 0.9 if i < 1500 else 0.8 for i in curve.iterations)
    assert curve.series["spearman"] == tuple(expected)


@pytest.mark.anyio
async def test_a_full_cache_forgets_only_its_oldest_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solrl_rollout.status.curves._CACHED_CURVES", 2)
    store = MemoryRunStore()
    for run in "abc":
        await fill(store, 1, run)
    curves = OverviewCurves(store)
    first, second = [await curves.overview(TENANT, run, 0) for run in "ab"]
    assert await curves.overview(TENANT, "a", 1) is not first, "it reported again"
    await curves.overview(TENANT, "c", 0)
    assert await curves.overview(TENANT, "b", 0) is second
    assert len(curves._cached) == 2
