"""Exhausted memory: batches are halved without any effect on answers, or a request is refused and others are served."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.families.sana import Sana
from solrl_core.rewards.clipscore import ClipScore
from solrl_core.sampling.batches import CHUNK_SIZE
from solrl_proto.problems import ProblemError
from solrl_rollout.engine.engine import Engine
from solrl_rollout.settings import RolloutSettings
from tests.services.fake_backend import REWARD, FakeBackend, chunk, engine_of, job, running_engine, scored

Patch = tuple[type, str, Any]


def limited(work: Callable[..., Any], rows_at: int, most: int) -> Callable[..., Any]:
    """Limit argument number `rows_at` of `work` to `most` rows."""

    def checked(*arguments: Any, **more: Any) -> Any:
        if len(arguments[rows_at]) > most:
            raise torch.OutOfMemoryError(f"CUDA out of memory: there is room for {most}")
        return work(*arguments, **more)

    return checked


def of_transformer(most: int) -> Patch:
    whole = Sana.velocity

    def velocity(self: Sana, transformer: torch.nn.Module, *rest: Any) -> torch.Tensor:
        return whole(self, limited(transformer, 0, most), *rest)  # type: ignore[arg-type]

    return Sana, "velocity", velocity


def of_decoder(most: int) -> Patch:
    return PipelineBackbone, "decode", limited(PipelineBackbone.decode, 1, most)


def of_rewards(most: int) -> Patch:
    return ClipScore, "_pixels", limited(ClipScore._pixels, 1, most)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine whose batches are whole chunks, as on a GPU."""
    monkeypatch.setattr("solrl_core.sampling.cpu_threads.thread_count", lambda: 1)
    monkeypatch.setattr("solrl_core.sampling.batches.MOST_ON_CPU", CHUNK_SIZE)
    running = engine_of(RolloutSettings(precision="nvfp4"))
    running.start().result()
    yield running
    running.close()


def made(engine: Engine, precision: Any = "bf16", count: int = CHUNK_SIZE) -> list[float]:
    """Scores of a chunk."""
    rewards = scored(engine, chunk(job(precision=precision, rewards=("clipscore",)), count=count)).rewards
    found: list[float] = rewards["clipscore"].tolist()
    return found


@pytest.mark.parametrize("part", [of_transformer, of_decoder, of_rewards])
def test_any_part_that_runs_out_of_memory_is_halved(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, part: Callable[[int], Patch]
) -> None:
    expected = made(engine)
    monkeypatch.setattr(*part(12))
    assert made(engine) == pytest.approx(expected, abs=1e-4)


def test_a_single_candidate_that_does_not_fit_is_507_and_other_requests_are_served(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(*of_transformer(0))
        with pytest.raises(ProblemError) as refused:
            made(engine, count=1)
    problem = refused.value.problem
    assert (problem.status, problem.kind, problem.got) == (507, "out-of-memory", "bf16")
    assert "solrl-rollout memory --model mini-sana --precision bf16" in str(problem.action)
    assert len(made(engine, "nvfp4")) == CHUNK_SIZE
    assert not engine.scheduler.dead


@pytest.mark.parametrize(
    ("error", "expected", "said"),
    [
        (torch.OutOfMemoryError("no room for weights"), "out-of-memory", "do not fit"),
        (ValueError("expected multiples of 16: got (8, 32)"), "precision-unsupported", "got (8, 32)"),
    ],
)
def test_a_request_for_a_precision_that_cannot_be_built_gets_the_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: str, said: str
) -> None:
    def breaks(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("solrl_engine.local_backend.Generator", breaks)
        with pytest.raises(ProblemError) as refused:
            made(engine)
    assert refused.value.problem.kind == expected
    assert said in refused.value.problem.detail
    assert len(made(engine)) == CHUNK_SIZE


def test_a_service_closes_a_backend_that_cannot_fit_one_candidate_and_does_not_start() -> None:
    backend = FakeBackend()
    backend.room = 0
    said = "mini-sana does not fit on auto: .*cannot fit generating 1 candidate.*solrl-rollout memory"
    with pytest.raises(RuntimeError, match=said), running_engine(backend):
        pass
    assert backend.closed


@pytest.mark.parametrize(
    ("count", "room", "batches"),
    [(24, 12, [24, 12, 12]), (24, 6, [24, 12, 6, 6, 6, 6]), (13, 12, [13, 6, 6, 1]), (1, 12, [1])],
)
def test_the_batches_of_any_backend_are_halved_and_counted(count: int, room: int, batches: list[int]) -> None:
    backend = FakeBackend()
    with running_engine(backend) as engine:
        expected = scored(engine, chunk(job(), count=count))
        backend.room = room
        backend.batches.clear()
        assert torch.equal(scored(engine, chunk(job(), count=count)).rewards[REWARD], expected.rewards[REWARD])
        metrics = engine._metrics.exposition().decode()
    assert backend.batches == batches
    times = sum(batch > room for batch in batches)
    assert (f'solrl_out_of_memory_total{{model="mini-sana",part="bf16"}} {times}.0' in metrics) == (times > 0)


def test_the_warm_up_finds_the_limit_of_later_batches() -> None:
    backend = FakeBackend()
    backend.room = 12
    with running_engine(backend) as engine:
        backend.batches.clear()
        scored(engine, chunk(job(), count=24))
    assert backend.batches == [12, 12]
