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
from solrl_proto.rollouts import Plan, PromptItem
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

    def explore(self, text: str, seeds: Sequence[int], plan: Plan, *, overlap: bool = True) -> torch.Tensor:
        """Scores [N] of a prompt's candidates; NaN for pruned ones.

        `overlap` is whether each chunk is scored while the next is generated.
        """
        prune = plan.prune
        predicted, halfway = self._chunks(text, seeds, plan, until=prune and prune.after, overlap=overlap)
        if prune is None:
            return predicted
        places = sorted(best_worst(predicted, prune.keep))
        survivors = [seeds[place] for place in places]
        scores = torch.full((len(seeds),), torch.nan)
        assert halfway is not None
        scores[places], _ = self._chunks(text, survivors, plan, begin=halfway.rows(places), overlap=overlap)
        return scores

    def _chunks(
        self,
        text: str,
        seeds: Sequence[int],
        plan: Plan,
        *,
        begin: Trajectory | None = None,
        until: int | None = None,
        overlap: bool,
    ) -> tuple[torch.Tensor, Trajectory | None]:
        """Scores [N], and trajectories on the CPU if they stop early."""
        scored: list[ScoredChunk] = []
        scoring = ScoringThreads(1, lambda: None)
        for first in range(0, len(seeds), CHUNK_SIZE):
            rows = slice(first, first + CHUNK_SIZE)
            began, started_at = record_event(self._device), time.monotonic()
            output = self.generator.generate(
                text,
                seeds[rows],
                steps=plan.steps,
                solver=plan.solver_spec,
                start=begin and begin.rows(rows),
                until=until,
                between=self._run_ahead.step,
                decoding=plan.decoding_after(until),
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


def shares(path: ServedWay, candidates: int, plan: Plan, times: Sequence[float]) -> dict[str, Any]:
    """Seconds of an exploration by part, without overlap.

    The share outside the transformer is 1 − (transformer's seconds without overlap) / total, of which `times` are
    measurements with overlap, as in the service.
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
        path.explore("a blue square, apart", range(candidates), plan, overlap=False)
        after = record_event(device)
        after.wait()
    parts = {name: sum(end.since(start) for start, end in each) for name, each in marks.items()}
    alone = after.since(before)
    parts["other"] = alone - sum(parts.values())
    whole = statistics.median(times)
    outside = {"served": 1 - parts["transformer"] / whole, "one_after_the_other": 1 - parts["transformer"] / alone}
    return {"served_s": whole, "served_times": list(times), "one_after_the_other_s": alone, "parts": parts} | {
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
