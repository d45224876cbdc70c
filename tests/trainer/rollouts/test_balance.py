"""Division of exploring and regenerating: it follows the times of both sides until neither waits for the other."""

import pytest
from solrl_trainer.service.balance import Balance


class Clock:
    """Stands in for the clock, so that no test waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Overlap:
    """A service that explores one iteration ahead of a trainer, and the times of both."""

    def __init__(self, balance: Balance, clock: Clock, *, explore: float, regenerate: float, speed: float = 1) -> None:
        self.balance, self.clock = balance, clock
        self.explore, self.regenerate, self.speed = explore, regenerate, speed
        self.free = 0.0
        self.explored_at = [0.0]

    def iterate(self, train: float, prompts: int) -> float:
        """An iteration; returns its seconds."""
        balance, clock, began = self.balance, self.clock, self.clock.now
        regenerated, explored = balance.regenerate.served, balance.explore.served
        self.free = max(self.free, began) + regenerated * self.regenerate / self.speed
        self.free += explored * self.explore / self.speed
        self.explored_at.append(self.free)
        balance.explore.served_in(self.explore / self.speed)
        balance.regenerate.served_in(self.regenerate / self.speed)
        if here := prompts - explored:
            with balance.explore.timed(here):
                clock.now += here * self.explore
        if here := prompts - regenerated:
            with balance.regenerate.timed():
                clock.now += self.regenerate
            clock.now += (here - 1) * self.regenerate
        clock.now += prompts * train
        with balance.waiting():
            clock.now = max(clock.now, self.explored_at[-2])
        balance._requests = int(self.free > clock.now)
        balance._answered = self.free
        balance.end_iteration()
        return clock.now - began


@pytest.mark.parametrize(
    ("explore", "regenerate", "train", "served"),
    [(7.5, 7.0, 12.5, 41), (10.6, 7.0, 13.4, 34), (40.0, 7.0, 12.5, 0), (1.0, 7.0, 20.0, 47)],
)
def test_neither_side_waits_long(clock: Clock, explore: float, regenerate: float, train: float, served: int) -> None:
    balance = Balance(48, clock=clock)
    assert balance.regenerate.served == 24
    overlap = Overlap(balance, clock, explore=explore, regenerate=regenerate)
    for _ in range(12):
        overlap.iterate(train, 48)
    assert abs(balance.regenerate.served - served) <= 1


def test_the_first_iteration_decides_nothing_and_each_tells_its_waits(clock: Clock) -> None:
    balance = Balance(8, clock=clock)
    Overlap(balance, clock, explore=100.0, regenerate=1.0).iterate(1.0, 8)
    assert balance.regenerate.served == 4
    balance = Balance(8, regenerate=1.0, clock=clock)
    for train, waited in ((3.0, 1.0), (6.0, 0.0), (1.0, 1.0)):
        clock.now += train
        with balance.waiting():
            clock.now += waited
        assert balance.end_iteration() == waited / (train + waited)
    # A given share is explored.
    assert [Balance(8, explore=share, regenerate=None).explore.served for share in (1.0, 0.5, 0.01)] == [8, 4, 1]
    assert Balance(1, explore="auto").explore.served == 1


@pytest.mark.parametrize(("share", "served"), [(1.0, 8), (0.5, 4), (0.01, 1)])
def test_a_given_share_stays(clock: Clock, share: float, served: int) -> None:
    balance = Balance(8, regenerate=share, clock=clock)
    overlap = Overlap(balance, clock, explore=100.0, regenerate=1.0)
    for _ in range(3):
        overlap.iterate(1.0, 8)
    assert balance.regenerate.served == served


@pytest.mark.parametrize("regenerate", ["auto", None])
@pytest.mark.parametrize(("explore", "speed"), [(10.6, 1 / 3), (10.6, 0.37), (10.6, 1.0), (7.5, 0.42), (40.0, 2.0)])
def test_a_lagging_exploration_is_divided(clock: Clock, explore: float, speed: float, regenerate: str | None) -> None:
    """Regenerating 7 s and training 12.5 s a prompt, with a service of so many times this device's speed."""
    balance = Balance(48, explore="auto", regenerate="auto" if regenerate else None, clock=clock)
    overlap = Overlap(balance, clock, explore=explore, regenerate=7.0, speed=speed)
    seconds = [overlap.iterate(12.5, 48) for _ in range(40)][-8:]
    together = 48 * (explore + 7.0 + 12.5) / (1 + speed)
    least = together if regenerate else max(together, 48 * 19.5)
    assert sum(seconds) / len(seconds) == pytest.approx(least, rel=0.04)
    assert balance.regenerate.served == 0 or balance.explore.served == 48
