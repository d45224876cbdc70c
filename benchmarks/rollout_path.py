"""Generation and scoring of candidates as in the rollout service, without its queue and HTTP; and timing by part."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from solrl_core.device_events import DeviceEvent, RunAheadLimit, record_event
from solrl_core.generator import CHUNK_SIZE, Generator
from solrl_core.rewards import RewardSet
from solrl_core.rewards.base import weighted_sum
from solrl_core.sampler import Trajectory
from solrl_proto.rollouts import FittedSolver, Plan, PromptItem
from solrl_proto.selection import best_worst
from solrl_rollout.engine.batch_limit import BatchLimit
from solrl_rollout.engine.scoring import PART, Scorer
from solrl_rollout.engine.scoring_threads import ScoringThreads
from solrl_rollout.engine.work import Chunk, GeneratedChunk, Job, ScoredChunk
from solrl_rollout.status.metrics import Metrics


class ServedWay:
    """Generates candidates in chunks, and scores each chunk while the next is generated, like the service.

    Scoring is the service's own. Generation is `LocalBackend`'s, without the digests that it computes when it loads.
    """

    def __init__(self, generator: Generator, rewards: RewardSet) -> None:
        self.generator = generator
        self.rewards = rewards
        self._device = generator.backbone.device
        self._run_ahead = RunAheadLimit(lambda: record_event(self._device))
        name = generator.backbone.name
        self._scorer = Scorer(rewards, self._device, BatchLimit(name, PART, Metrics()))
        self._job = Job("", None, name, None, generator.precision, Plan(steps=1), rewards.names, images=False)

    def settle(self) -> None:
        """Wait for the device."""
        record_event(self._device).wait()

    def score(
        self,
        text: str,
        seeds: Sequence[int],
        steps: int,
        *,
        solver: str | FittedSolver = "euler",
        begin: Trajectory | None = None,
        until: int | None = None,
        overlap: bool = True,
    ) -> tuple[torch.Tensor, Trajectory | None]:
        """Generate and score candidates of a prompt; scores [N], and trajectories on the CPU if they stop early."""
        scored: list[ScoredChunk] = []
        scoring = ScoringThreads(1, lambda: None)
        for first in range(0, len(seeds), CHUNK_SIZE):
            rows = slice(first, first + CHUNK_SIZE)
            began, started_at = record_event(self._device), time.monotonic()
            output = self.generator.generate(
                text,
                seeds[rows],
                steps=steps,
                solver=solver,
                start=begin and begin.rows(rows),
                until=until,
                between=self._run_ahead.step,
            )
            generated = GeneratedChunk(
                chunk=Chunk(self._job, PromptItem(id="benchmark", text=text), seeds[rows], until=until),
                images=output.images,
                trajectory=None if until is None else output.trajectory,
                started_at=started_at,
                switched=False,
                began=began,
                merged=began,
                finished=record_event(self._device),
                unread_tokens=0,
            )
            scoring.wait()
            if overlap:
                scoring.run(lambda generated=generated: scored.append(self._scorer.score(generated)))  # type: ignore[misc]
            else:
                scored.append(self._scorer.score(generated))
        scoring.wait()
        scoring.close()
        scores = torch.cat([weighted_sum(chunk.rewards, dict.fromkeys(chunk.rewards, 1.0)) for chunk in scored])
        halfway = [chunk.trajectory for chunk in scored if chunk.trajectory is not None]
        return scores, Trajectory.join(halfway) if halfway else None

    def pruned(self, text: str, seeds: Sequence[int], plan: Plan) -> torch.Tensor:
        """Scores [N] with pruning: only the most extreme candidates continue, as in the plan; NaN for the others."""
        assert plan.prune is not None
        by = plan.solver_spec
        predicted, halfway = self.score(text, seeds, plan.steps, solver=by, until=plan.prune.after)
        assert halfway is not None
        places = sorted(best_worst(predicted, plan.prune.keep))
        scores = torch.full((len(seeds),), torch.nan)
        survivors = [seeds[place] for place in places]
        scores[places], _ = self.score(text, survivors, plan.steps, solver=by, begin=halfway.rows(places))
        return scores


def shares(path: ServedWay, candidates: int, steps: int) -> dict[str, Any]:
    """Seconds of an exploration by part, without overlap; and its total with overlap, as in the service.

    The share outside the transformer is 1 − (transformer's seconds without overlap) / total.
    """
    device = path.generator.backbone.device
    marks: dict[str, list[tuple[DeviceEvent, DeviceEvent]]] = {}
    with (
        watched(device, marks, "transformer", path.generator.backbone, "velocity"),
        watched(device, marks, "encode", path.generator.backbone, "encode"),
        watched(device, marks, "decode", path.generator, "decode"),
        watched(device, marks, "reward", path.rewards, "score"),
    ):
        before = record_event(device)
        path.score("a blue square, apart", range(candidates), steps, overlap=False)
        after = record_event(device)
        after.wait()
    parts = {name: sum(end.since(start) for start, end in each) for name, each in marks.items()}
    alone = after.since(before)
    parts["other"] = alone - sum(parts.values())
    wholes = []
    for turn in range(2):
        began = time.perf_counter()
        path.score(f"a blue square, {turn}", range(candidates), steps)
        wholes.append(time.perf_counter() - began)
    whole = statistics.median(wholes)
    outside = {"served": 1 - parts["transformer"] / whole, "one_after_the_other": 1 - parts["transformer"] / alone}
    return {"served_s": whole, "served_times": wholes, "one_after_the_other_s": alone, "parts": parts} | {
        "outside": outside,
        "passes": len(marks["transformer"]),
    }


@contextmanager
def watched(
    device: torch.device, marks: dict[str, list[tuple[DeviceEvent, DeviceEvent]]], name: str, owner: Any, method: str
) -> Iterator[None]:
    """Record marks before and after every call of a method within the block."""
    call: Callable[..., Any] = getattr(owner, method)
    marks[name] = []

    def marked(*args: Any, **kwargs: Any) -> Any:
        before = record_event(device)
        made = call(*args, **kwargs)
        marks[name].append((before, record_event(device)))
        return made

    with patch.object(owner, method, marked):
        yield


def reward_precisions(path: ServedWay, count: int) -> dict[str, Any]:
    """Seconds of scoring a chunk in float32 and with TF32 products, and the difference between their scores.

    "off" holds the largest difference, and for comparison the standard deviation of the scores.
    """
    size = path.generator.backbone.width
    images = torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(0))
    images = images.to(path.generator.backbone.device)

    def score() -> tuple[float, torch.Tensor]:
        seconds = []
        for _ in range(4):
            began = time.perf_counter()
            values = path.rewards.score(path.rewards.names, images, ["a"] * count, [{}] * count)
            seconds.append(time.perf_counter() - began)
        return min(seconds[1:]), sum(values.values(), torch.zeros(count))

    before = torch.get_float32_matmul_precision()
    plain, scores = score()
    torch.set_float32_matmul_precision("high")
    try:
        faster, others = score()
    finally:
        torch.set_float32_matmul_precision(before)
    off = {"most": float((others - scores).abs().max()), "std": float(scores.std())}
    return {"candidates": count, "float32_s": plain, "tf32_s": faster, "off": off}
