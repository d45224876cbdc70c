"""Generation and scoring of candidates as in the rollout service, without its queue and HTTP; and timing by part."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from solrl_core.device_events import DeviceEvent, RunAheadLimit, record_event
from solrl_core.generator import CHUNK_SIZE, Generator, GeneratorOutput
from solrl_core.rewards import RewardSet
from solrl_core.sampler import Trajectory
from solrl_core.selection import best_worst
from solrl_proto.rollouts import FittedSolver, Plan
from solrl_rollout.engine.scoring_thread import ScoringThread


class ServedWay:
    """Generates candidates in chunks, and scores each chunk while the next is generated, like the service."""

    def __init__(self, generator: Generator, rewards: RewardSet) -> None:
        self.generator = generator
        self.rewards = rewards
        self._device = generator.backbone.device
        self._run_ahead = RunAheadLimit(lambda: record_event(self._device))
        on_gpu = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device, priority=-1) if on_gpu else None  # type: ignore[no-untyped-call]

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
    ) -> tuple[torch.Tensor, Trajectory]:
        """Generate and score candidates of a prompt; scores [N] and trajectories, on the CPU if they stop early."""
        scored: list[tuple[torch.Tensor, Trajectory]] = []

        def finish(generated: GeneratorOutput, made: DeviceEvent) -> None:
            made.wait()
            images, stay = generated.images, until is not None
            with torch.cuda.stream(self._stream) if overlap else nullcontext():
                scores = self.rewards.score(self.rewards.names, images, [text] * len(images), [{}] * len(images))
                to = torch.device("cpu") if stay else self._device
                scored.append((sum(scores.values(), torch.zeros(len(images))), generated.trajectory.to(to)))

        scoring = ScoringThread(lambda: None)
        for start in range(0, len(seeds), CHUNK_SIZE):
            rows = slice(start, start + CHUNK_SIZE)
            generated = self.generator.generate(
                text,
                seeds[rows],
                steps=steps,
                solver=solver,
                start=begin and begin.rows(rows),
                until=until,
                between=self._run_ahead.step,
            )
            work = partial(finish, generated, record_event(self._device))
            if overlap:
                scoring.run(work)
            else:
                work()
        scoring.wait()
        scoring.close()
        return torch.cat([scores for scores, _ in scored]), Trajectory.join([stands for _, stands in scored])

    def pruned(self, text: str, seeds: Sequence[int], plan: Plan) -> torch.Tensor:
        """Scores [N] with pruning: only the most extreme candidates continue, as in the plan; NaN for the others."""
        assert plan.prune is not None
        by = plan.fitted or plan.solver
        halfway, stands = self.score(text, seeds, plan.steps, solver=by, until=plan.prune.after)
        places = sorted(best_worst(halfway, plan.prune.keep))
        scores = torch.full((len(seeds),), torch.nan)
        survivors = [seeds[place] for place in places]
        scores[places], _ = self.score(text, survivors, plan.steps, solver=by, begin=stands.rows(places))
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
