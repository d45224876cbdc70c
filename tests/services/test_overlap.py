"""A chunk that is scored while the next one is made, as on a GPU; here it is forced on a CPU."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from typing import Any

import pytest
import torch
from faulty_rewards import fatal, gate, gated, picky
from solrl_core.families.sana import Sana
from solrl_proto import Plan, PromptItem
from solrl_proto.problems import ProblemError
from solrl_rollout.engine.engine import Engine
from solrl_rollout.engine.executor import Executor, Started
from solrl_rollout.engine.work import Chunk, Job, Scored
from solrl_rollout.settings import Settings
from solrl_rollout.status.metrics import Telemetry

FATAL, GATED, PICKY = (f"{one.__module__}:{one.__name__}" for one in (fatal, gated, picky))


def started_engine(overlap: bool) -> Engine:
    engine = Engine(Settings(rewards=("clipscore", FATAL, GATED, PICKY)), Telemetry(), overlap=overlap)
    engine.start().result()
    return engine


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    engine = started_engine(overlap=True)
    yield engine
    gate.set()
    engine.close()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was begun (`+`), made (`*`) and scored (`-`) of which prompt, in order."""
    seen: list[str] = []
    start, finish = Executor.start, Executor.finish

    def watched_start(self: Executor, chunk: Chunk, *rest: Any) -> Started:
        seen.append(f"+{chunk.prompt.id}")
        made = start(self, chunk, *rest)
        seen.append(f"*{chunk.prompt.id}")
        return made

    def watched_finish(self: Executor, started: Started) -> Scored:
        scored = finish(self, started)
        seen.append(f"-{started.chunk.prompt.id}")
        return scored

    monkeypatch.setattr(Executor, "start", watched_start)
    monkeypatch.setattr(Executor, "finish", watched_finish)
    gate.clear()
    return seen


def chunk(name: str, reward: str = GATED, want: Any = 1, steps: int = 1) -> Chunk:
    job = Job("t", "r", "mini-sana", None, "bf16", Plan(steps=steps), (reward,), images=False)
    return Chunk(job, PromptItem(id=name, text="a red circle", metadata={"want": want}), range(4))


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_chunk_is_made_while_the_one_before_is_scored_and_no_more(shared: Engine, events: list[str]) -> None:
    chunks = [chunk(name) for name in "abc"]
    shared.submit(chunks)
    until(lambda: "*b" in events)
    time.sleep(0.2)
    assert events == ["+a", "*a", "+b", "*b"]
    gate.set()
    wait([one.done for one in chunks], 60)
    assert [event for event in events if event.startswith("-")] == ["-a", "-b", "-c"]
    assert events.index("+c") > events.index("-a")


def test_scores_are_those_of_one_after_the_other(shared: Engine) -> None:
    plain = started_engine(overlap=False)
    try:
        found = []
        for engine in (shared, plain):
            chunks = [chunk(name, "clipscore", steps=2) for name in "abc"]
            engine.submit(chunks)
            found.append(torch.cat([one.done.result(60).rewards["clipscore"] for one in chunks]))
    finally:
        plain.close()
    assert torch.equal(*found)


def test_a_fault_is_the_answer_of_its_own_chunk(shared: Engine) -> None:
    good, bad, after = chunk("a", PICKY, 3), chunk("b", PICKY, "many"), chunk("c", PICKY, 5)
    shared.submit([good, bad, after])
    with pytest.raises(ProblemError) as refused:
        bad.done.result(60)
    assert (refused.value.problem.kind, refused.value.problem.where) == ("reward-failed", "prompts.b")
    for one, value in ((good, 3), (after, 5)):
        assert one.done.result(60).rewards[PICKY].tolist() == [value] * 4


def test_what_is_cancelled_while_it_waits_to_be_scored_is_not(shared: Engine, events: list[str]) -> None:
    first, second, third = chunk("a"), chunk("b"), chunk("c")
    shared.submit([first, second, third])
    until(lambda: "*b" in events)
    shared.cancel(second.job)
    gate.set()
    with pytest.raises(ProblemError):
        second.done.result(60)
    for one in (first, third):
        assert len(one.done.result(60).rewards[GATED]) == 4
    assert "-b" not in events


def test_what_is_cancelled_while_it_is_made_stops_at_its_next_step(shared: Engine, events: list[str]) -> None:
    scoring, making = chunk("a"), chunk("b", steps=200)
    shared.submit([scoring, making])
    until(lambda: "+b" in events)
    shared.cancel(making.job)
    with pytest.raises(ProblemError):
        making.done.result(60)
    assert "*b" not in events
    gate.set()
    assert len(scoring.done.result(60).rewards[GATED]) == 4


def test_the_engine_answers_while_a_chunk_is_scored(shared: Engine, events: list[str]) -> None:
    held, next_one = chunk("a"), chunk("b")
    shared.submit([held, next_one])
    until(lambda: "+b" in events)
    time.sleep(0.2)  # the engine has made the second and waits for the first
    shared.call().result(60)
    assert not held.done.done()
    gate.set()
    next_one.done.result(60)


def test_what_ran_out_of_memory_beside_scoring_is_tried_whole_and_alone_from_then_on(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, rows = Sana.velocity, []

    def velocity(self: Sana, transformer: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        if "*a" in events and "-a" not in events:
            events.append("full")
            raise torch.OutOfMemoryError("no room beside a")
        rows.append(len(x))
        return whole(self, transformer, x, *rest)

    monkeypatch.setattr("solrl_core.lanes.lane_count", lambda: 1)
    engine = started_engine(overlap=True)
    events.clear()
    try:
        monkeypatch.setattr(Sana, "velocity", velocity)
        first, second, third, fourth = (chunk(name) for name in "abcd")
        engine.submit([first, second])
        until(lambda: "full" in events)
        time.sleep(0.2)
        assert events == ["+a", "*a", "+b", "full"]
        gate.set()
        assert len(second.done.result(60).rewards[GATED]) == 4
        assert events == ["+a", "*a", "+b", "full", "-a", "*b", "-b"]
        assert len(rows) == 2
        assert rows[0] == rows[1] >= 4  # a GPU fills its batches up
        gate.clear()
        monkeypatch.setattr(Sana, "velocity", whole)
        engine.submit([third, fourth])
        until(lambda: "+d" in events)
        time.sleep(0.2)
        assert events[-1] == "+d"
        gate.set()
        fourth.done.result(60)
        assert events[-4:] == ["+d", "-c", "*d", "-d"]
    finally:
        gate.set()
        engine.close()


@pytest.mark.parametrize("behind", [True, False], ids=["behind it", "idle"])
def test_a_death_in_scoring_is_the_engines(behind: bool) -> None:
    engine = started_engine(overlap=True)
    try:
        chunks = [chunk("a", FATAL), *([chunk("b", "clipscore", steps=20)] if behind else [])]
        engine.submit(chunks)
        for one in chunks:
            with pytest.raises(ProblemError) as refused:
                one.done.result(60)
            assert refused.value.problem.kind == "engine-dead"
        until(lambda: engine.dead)
        with pytest.raises(ProblemError):
            engine.submit([chunk("c")])
    finally:
        engine.close()


def test_closing_waits_for_what_is_scored(events: list[str]) -> None:
    engine = started_engine(overlap=True)
    held, left = chunk("a"), chunk("b")
    engine.submit([held])
    until(lambda: "*a" in events)
    engine.submit([left])
    until(lambda: "*b" in events)
    gate.set()
    engine.close()
    assert held.done.done()
    assert left.done.done()
