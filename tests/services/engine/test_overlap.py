"""A chunk is scored while the next one is generated, as on a GPU; here it is forced on a CPU."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from solrl_engine.backend import GenerationRequest
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import Plan, PromptItem
from solrl_rollout.engine.engine import Engine
from solrl_rollout.engine.errors import EngineDeadError
from solrl_rollout.engine.work import Chunk, Job
from tests.services.fake_backend import REWARD, Events, FakeBackend, Observed, fault_of, pinged, running_engine
from tests.services.served_rewards import opened as gate

FATAL, PICKY = (f"tests.services.faulty_rewards:{name}" for name in ("fatal", "picky"))
GATED = "tests.services.served_rewards:gated"


@pytest.fixture
def events() -> Events:
    gate.clear()
    return Events()


@pytest.fixture
def backend(events: Events) -> Observed:
    return Observed(events)


def started(backend: FakeBackend, overlap: bool = True) -> AbstractContextManager[Engine]:
    return running_engine(backend.without(overlaps=overlap), gate, rewards=(REWARD, FATAL, GATED, PICKY))


@pytest.fixture
def engine(backend: Observed) -> Iterator[Engine]:
    with started(backend) as running:
        backend.events.seen.clear()
        yield running


def chunk(name: str, events: Events | None = None, reward: str = GATED, want: Any = 1, steps: int = 1) -> Chunk:
    job = Job("t", "r", "mini-sana", None, "bf16", Plan(steps=steps), (reward,), images=False)
    made = Chunk(job, PromptItem(id=name, text=name, metadata={"want": want}), range(4))
    if events is not None:
        made.result.add_done_callback(lambda done: None if done.exception() else events.add(f"-{name}"))
    return made


def test_only_one_chunk_is_generated_while_the_previous_one_is_scored(engine: Engine, events: Events) -> None:
    chunks = [chunk(name, events) for name in "abc"]
    engine.scheduler.submit(chunks)
    events.wait_for("*b")
    pinged(engine)  # the engine is idle: it waits until the first chunk is scored
    assert events.seen == ["+a", "*a", "+b", "*b"]
    gate.set()
    events.wait_for("-c")
    assert [event for event in events.seen if event.startswith("-")] == ["-a", "-b", "-c"]
    assert events.seen.index("+c") > events.seen.index("-a")


def test_a_fault_affects_only_its_chunk(engine: Engine) -> None:
    good, bad, after = (chunk(name, reward=PICKY, want=want) for name, want in (("a", 3), ("b", "many"), ("c", 5)))
    engine.scheduler.submit([good, bad, after])
    problem = fault_of(bad).problem
    assert (problem.kind, problem.where) == ("reward-failed", "prompts.b")
    for one, value in ((good, 3), (after, 5)):
        assert one.result.result(600).rewards[PICKY].tolist() == [value] * 4


def test_a_chunk_cancelled_before_it_is_scored_is_not_scored(engine: Engine, events: Events) -> None:
    first, second, third = (chunk(name, events) for name in "abc")
    engine.scheduler.submit([first, second, third])
    events.wait_for("*b")
    pinged(engine)  # is answered while the first is scored
    assert not first.result.done()
    engine.cancel(second.job)
    gate.set()
    fault_of(second)
    for one in (first, third):
        assert len(one.result.result(600).rewards[GATED]) == 4
    assert "-b" not in events.seen


def test_a_batch_that_runs_out_of_memory_during_scoring_is_retried_whole_and_overlap_ends(
    engine: Engine, backend: Observed, events: Events
) -> None:
    def run_out(request: GenerationRequest) -> None:
        if "*a" in events.seen and "-a" not in events.seen:
            events.add("out of memory")
            raise torch.OutOfMemoryError("no room beside a")

    backend.fault = run_out
    backend.batches.clear()
    first, second, third, fourth = (chunk(name, events) for name in "abcd")
    engine.scheduler.submit([first, second])
    events.wait_for("out of memory")
    pinged(engine)
    assert events.seen == ["+a", "*a", "+b", "out of memory"]
    gate.set()
    assert len(second.result.result(600).rewards[GATED]) == 4
    events.wait_for("-b")
    assert events.seen == ["+a", "*a", "+b", "out of memory", "-a", "+b", "*b", "-b"]
    assert backend.batches == [4, 4]
    gate.clear()
    engine.scheduler.submit([third, fourth])
    events.wait_for("*c")
    pinged(engine)
    assert events.seen[-1] == "*c"  # the fourth chunk has to wait
    gate.set()
    events.wait_for("-d")
    assert events.seen[-4:] == ["-c", "+d", "*d", "-d"]


@pytest.mark.parametrize("behind", [True, False], ids=["behind it", "idle"])
def test_the_engine_ends_if_scoring_kills_its_thread(engine: Engine, backend: Observed, behind: bool) -> None:
    chunks = [chunk("a", reward=FATAL), *([chunk("b", reward=REWARD, steps=20)] if behind else [])]
    engine.scheduler.submit(chunks)
    for one in chunks:
        with pytest.raises(EngineDeadError):
            one.result.result(600)
    engine.close()
    assert engine.scheduler.dead
    with pytest.raises(ProblemError):
        engine.scheduler.submit([chunk("c")])


def test_closing_waits_for_scoring(engine: Engine, events: Events) -> None:
    held, left = chunk("a"), chunk("b")
    engine.scheduler.submit([held])
    events.wait_for("*a")
    engine.scheduler.submit([left])
    events.wait_for("*b")
    gate.set()
    engine.close()
    assert held.result.done()
    assert left.result.done()
