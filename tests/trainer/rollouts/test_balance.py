"""Division of exploring and regenerating: it follows the times of both sides until neither waits for the other."""

from typing import Any

import pytest
from solrl_trainer.service.balance import Balance


class Overlap:
    """A service that explores one iteration ahead of a trainer, and the times of both; no test waits for its clock."""

    def __init__(self, prompts: int, *, exploring: float, regenerating: float, speed: float = 1, **shares: Any) -> None:
        self.now = self.free = 0.0
        self.balance = Balance(prompts, clock=lambda: self.now, **shares)
        self.prompts, self.explore, self.regenerate, self.speed = prompts, exploring, regenerating, speed
        self.explored_at = [0.0]

    def iterate(self, train: float) -> float:
        """An iteration; returns its seconds."""
        balance, prompts, began = self.balance, self.prompts, self.now
        regenerated, explored = balance.regenerate.served, balance.explore.served
        self.free = max(self.free, began) + regenerated * self.regenerate / self.speed
        self.free += explored * self.explore / self.speed
        self.explored_at.append(self.free)
        balance.explore.served_in(self.explore / self.speed)
        balance.regenerate.served_in(self.regenerate / self.speed)
        if here := prompts - explored:
            with balance.explore.timed(here):
                self.now += here * self.explore
        if here := prompts - regenerated:
            with balance.regenerate.timed():
                self.now += self.regenerate
            self.now += (here - 1) * self.regenerate
        self.now += prompts * train
        with balance.waiting():
            self.now = max(self.now, self.explored_at[-2])
        balance._requests = int(self.free > self.now)
        balance._answered = self.free
        balance.end_iteration()
        return self.now - began


@pytest.mark.parametrize(
    ("explore", "regenerate", "train", "served"),
    [(7.5, 7.0, 12.5, 41), (10.6, 7.0, 13.4, 34), (40.0, 7.0, 12.5, 0), (1.0, 7.0, 20.0, 47)],
)
def test_neither_side_waits_long(explore: float, regenerate: float, train: float, served: int) -> None:
    overlap = Overlap(48, exploring=explore, regenerating=regenerate)
    assert overlap.balance.regenerate.served == 24
    for _ in range(12):
        overlap.iterate(train)
    assert abs(overlap.balance.regenerate.served - served) <= 1


def test_the_first_iteration_decides_nothing_and_each_tells_its_waits() -> None:
    overlap = Overlap(8, exploring=1.0, regenerating=1.0)
    overlap.iterate(20.0)
    assert overlap.balance.regenerate.served == 4
    overlap.iterate(20.0)
    assert overlap.balance.regenerate.served == 7
    now = [0.0]
    balance = Balance(8, regenerate=1.0, clock=lambda: now[0])
    for train, waited in ((3.0, 1.0), (6.0, 0.0), (1.0, 1.0)):
        now[0] += train
        with balance.waiting():
            now[0] += waited
        assert balance.end_iteration() == waited / (train + waited)
    # A given share is explored.
    assert [Balance(8, explore=share, regenerate=None).explore.served for share in (1.0, 0.5, 0.01)] == [8, 4, 1]
    assert Balance(1, explore="auto").explore.served == 1


@pytest.mark.parametrize(("share", "served"), [(1.0, 8), (0.5, 4), (0.01, 1)])
def test_a_given_share_stays(share: float, served: int) -> None:
    overlap = Overlap(8, exploring=100.0, regenerating=1.0, regenerate=share)
    for _ in range(3):
        overlap.iterate(1.0)
    assert overlap.balance.regenerate.served == served


@pytest.mark.parametrize("regenerate", ["auto", None])
@pytest.mark.parametrize(("explore", "speed"), [(10.6, 1 / 3), (10.6, 0.37), (10.6, 1.0), (7.5, 0.42), (40.0, 2.0)])
def test_a_lagging_exploration_is_divided(explore: float, speed: float, regenerate: str | None) -> None:
    """Regenerating 7 s and training 12.5 s a prompt, with a service of so many times this device's speed."""
    shares: dict[str, Any] = {"explore": "auto", "regenerate": regenerate}
    overlap = Overlap(48, exploring=explore, regenerating=7.0, speed=speed, **shares)
    seconds = [overlap.iterate(12.5) for _ in range(40)][-8:]
    balance = overlap.balance
    together = 48 * (explore + 7.0 + 12.5) / (1 + speed)
    least = together if regenerate else max(together, 48 * 19.5)
    assert sum(seconds) / len(seconds) == pytest.approx(least, rel=0.04)
    assert balance.regenerate.served == 0 or balance.explore.served == 48
