"""Exhausted memory: batches are halved without any effect on answers, or a request is refused and others are served."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import solrl_core.sampling.batches
import torch
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.families.sana import Sana
from solrl_core.rewards.clipscore import ClipScore
from solrl_core.sampling.batches import CHUNK_SIZE
from solrl_proto.problems import ProblemError
from solrl_rollout import cli
from solrl_rollout.engine.engine import Engine
from solrl_rollout.settings import RolloutSettings
from tests.services.fake_backend import REWARD, FakeBackend, chunk, engine_of, job, running_engine, scored
from tests.support.service_helpers import RunningService, running_service, scores
from tests.support.small_model import small_model

TO_MAKE, TO_SCORE = 12, 9
ONE_LANE = {"OMP_NUM_THREADS": "1"}  # see `whole_chunks`


def limited(work: Callable[..., Any], rows_at: int, most: int) -> Callable[..., Any]:
    """Limit argument number `rows_at` of `work` to `most` rows."""

    def checked(*arguments: Any, **more: Any) -> Any:
        rows = len(arguments[rows_at])
        if rows > most:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {rows} rows, and there is room for {most}")
        return work(*arguments, **more)

    return checked


def whole_chunks() -> tuple[Any, str, int]:
    """A patch that makes a chunk one batch, as on a GPU, in a process with one thread."""
    return solrl_core.sampling.batches, "MOST_ON_CPU", CHUNK_SIZE


def of_transformer(most: int) -> tuple[type, str, Any]:
    """A patch that limits the transformer to this many rows; with guidance, a candidate has two."""

    def velocity(self: Sana, transformer: torch.nn.Module, *rest: Any) -> torch.Tensor:
        return whole(self, limited(transformer, 0, most), *rest)  # type: ignore[arg-type]

    whole = Sana.velocity
    return Sana, "velocity", velocity


def of_decoder(most: int) -> tuple[type, str, Any]:
    """A patch that limits the autoencoder."""
    return PipelineBackbone, "decode", limited(PipelineBackbone.decode, 1, most)


def of_rewards(most: int) -> tuple[type, str, Any]:
    """A patch that limits CLIPScore."""
    return ClipScore, "_pixels", limited(ClipScore._pixels, 1, most)


def with_little_memory() -> None:
    """`solrl-rollout` on a device with room for ROOM_TO_MAKE and ROOM_TO_SCORE."""
    setattr(*whole_chunks())
    setattr(*of_transformer(int(os.environ["ROOM_TO_MAKE"])))
    setattr(*of_rewards(int(os.environ["ROOM_TO_SCORE"])))
    cli.main()


@pytest.fixture(scope="module")
def small() -> Iterator[RunningService]:
    """A service with two models on a device with little memory; each model has separate batch limits."""
    room = {"ROOM_TO_MAKE": str(TO_MAKE), "ROOM_TO_SCORE": str(TO_SCORE)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ONE_LANE | room).items():
            patch.setenv(name, value)
        models = [small_model(), f"other={small_model()}"]
        with running_service("--precision", "nvfp4", model=models, entry=with_little_memory) as running:
            yield running


def times(service: RunningService, model: str, part: str) -> float:
    """Number of times that memory ran out, from the metrics."""
    name = f'solrl_out_of_memory_total{{model="{model}",part="{part}"}} '
    lines = service.client.get("/metrics").text.splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@pytest.mark.slow
def test_the_warm_up_finds_the_batch_limits_and_reports_them(small: RunningService) -> None:
    # Scoring fails with 24 and with 12 candidates.
    assert times(small, "mini-sana", "rewards") == 2
    log = small.log.read_text()
    assert "memory ran out scoring 24 images at once; the limit is now 12" in log
    assert "there is room for 12" in log
    assert '"part": "nvfp4"' in log


def test_halved_batches_give_the_same_answer(small: RunningService, service: RunningService) -> None:
    asked: Any = {"count": 40, "images": "png", "precision": "bf16", "steps": 3}
    before = times(small, "other", "bf16")
    (expected,), (got,) = service.rollout(**asked)["groups"], small.rollout(model="other", **asked)["groups"]
    assert got["seeds"] == expected["seeds"]
    assert got["scores"] == pytest.approx(expected["scores"], abs=1e-4)
    assert len(got["images"]) == len(expected["images"]) == 40
    # The first chunk lowers the limit; later ones use it.
    assert times(small, "other", "bf16") == 1 >= before


def test_a_request_whose_halves_fail_is_made_in_quarters_while_others_are_served(
    small: RunningService, service: RunningService
) -> None:
    # Two rows per candidate: not even twelve fit.
    asked: Any = {"count": 24, "precision": "bf16", "guidance": 2.0}
    with ThreadPoolExecutor(2) as pool:
        quartered = pool.submit(small.rollout, **asked)
        beside = pool.submit(small.rollout, count=30)
    assert scores(beside.result()) == scores(small.rollout(count=30))
    (expected,) = scores(service.rollout(**asked))
    assert scores(quartered.result())[0] == pytest.approx(expected, abs=1e-4)
    assert small.client.get("/health/live").status_code == 200


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine whose batches are whole chunks."""
    monkeypatch.setattr("solrl_core.sampling.cpu_threads.thread_count", lambda: 1)
    monkeypatch.setattr(*whole_chunks())
    running = engine_of(RolloutSettings(precision="nvfp4"))
    running.start().result()
    yield running
    running.close()


def made(engine: Engine, precision: Any = "bf16", count: int = CHUNK_SIZE) -> list[float]:
    """Scores of a chunk."""
    rewards = scored(engine, chunk(job(precision=precision, rewards=("clipscore",)), count=count)).rewards
    found: list[float] = rewards["clipscore"].tolist()
    return found


@pytest.mark.parametrize("part", [of_decoder, of_rewards])
def test_any_part_that_runs_out_of_memory_is_halved(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, part: Callable[[int], tuple[type, str, Any]]
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


@pytest.mark.parametrize(("count", "batches"), [(24, [24, 12, 12]), (13, [13, 6, 6, 1]), (1, [1])])
def test_the_batches_of_any_backend_are_halved(count: int, batches: list[int]) -> None:
    backend = FakeBackend()
    with running_engine(backend) as engine:
        expected = scored(engine, chunk(job(), count=count))
        backend.room = 12
        backend.batches.clear()
        assert torch.equal(scored(engine, chunk(job(), count=count)).rewards[REWARD], expected.rewards[REWARD])
    assert backend.batches == batches
