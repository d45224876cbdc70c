"""Division of regenerating: it follows the times of both sides until neither waits for the other."""

import pytest
from solrl_trainer.service import balance as module
from solrl_trainer.service.balance import Balance


class Clock:
    """Stands in for the clock, so that no test waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module, "time", found)
    return found


def iterate(balance: Balance, clock: Clock, *, explore: float, regenerate: float, train: float, prompts: int) -> float:
    """An iteration of both sides; returns the seconds in which one of them waits."""
    service = prompts * explore + balance.served * regenerate
    local = (prompts - balance.served) * regenerate
    with balance.asking():
        if local:
            with balance.regenerating():
                clock.now += regenerate
            clock.now += local - regenerate
        else:
            balance.served_in(regenerate)
        clock.now += prompts * train
        late = max(0.0, service - local - prompts * train)
        with balance.waiting():
            clock.now += late
    early = max(0.0, local + prompts * train - service)
    balance._answered -= early
    balance.end_iteration()
    return late + early


@pytest.mark.parametrize(
    ("explore", "regenerate", "train", "served"),
    [(7.5, 7.0, 12.5, 41), (10.6, 7.0, 13.4, 34), (40.0, 7.0, 12.5, 0), (1.0, 7.0, 20.0, 48)],
)
def test_neither_side_waits_after_a_few_iterations(
    clock: Clock, explore: float, regenerate: float, train: float, served: int
) -> None:
    balance = Balance(48, "auto")
    assert balance.served == 24
    for _ in range(5):
        waits = iterate(balance, clock, explore=explore, regenerate=regenerate, train=train, prompts=48)
    assert abs(balance.served - served) <= 1
    if 0 < balance.served < 48:
        assert waits <= 2 * regenerate


def test_the_first_iteration_compiles_and_decides_nothing(clock: Clock) -> None:
    balance = Balance(8, "auto")
    iterate(balance, clock, explore=100.0, regenerate=1.0, train=1.0, prompts=8)
    assert balance.served == 4


@pytest.mark.parametrize(("share", "served"), [(1.0, 8), (0.5, 4), (0.01, 1)])
def test_a_given_share_stays(clock: Clock, share: float, served: int) -> None:
    balance = Balance(8, share)
    for _ in range(3):
        iterate(balance, clock, explore=100.0, regenerate=1.0, train=1.0, prompts=8)
    assert balance.served == served


def test_an_iteration_tells_the_share_of_its_time_that_it_waited(clock: Clock) -> None:
    balance = Balance(8, 1.0)
    for train, waited in ((3.0, 1.0), (6.0, 0.0), (1.0, 1.0)):
        clock.now += train
        with balance.waiting():
            clock.now += waited
        assert balance.end_iteration() == waited / (train + waited)
