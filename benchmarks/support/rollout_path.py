"""Exploration of a group on this device, as workers of the service and trainers do it; and its time by part."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from solrl_core.rewards import RewardSet
from solrl_core.sampling.batches import CHUNK_SIZE
from solrl_core.sampling.device_events import DeviceEvent, record_event
from solrl_core.sampling.generator import Generator
from solrl_engine.batch_size import AdaptiveBatchSize
from solrl_engine.sampler import Sampler
from solrl_engine.scorer import Scorer
from solrl_engine.side_stream import SideStream
from solrl_proto.rollouts import Plan, PromptItem, RewardSpec
from solrl_trainer.rollouts.candidates import GroupSampler
from solrl_trainer.rollouts.sample_scorer import SampleScorer


class Explorer:
    """Generates candidates in batches, and scores each batch while the next is generated."""

    def __init__(self, generator: Generator, rewards: RewardSet, batch: int = CHUNK_SIZE) -> None:
        self.generator = generator
        self.rewards = rewards
        self.batch = batch

    def explore(self, text: str, seeds: Sequence[int], plan: Plan, *, overlap: bool = True) -> torch.Tensor:
        """Scores [N] of a prompt's candidates; NaN for pruned ones.

        `overlap` is whether each batch is scored while the next is generated.
        """
        side = SideStream(self.generator.backbone.device, overlaps=None if overlap else False)
        trained = [RewardSpec(name=name) for name in self.rewards.names]
        scorer = SampleScorer(Scorer(self.rewards), self.rewards.names, trained, side)
        sampler = Sampler(self.generator, lambda: plan, batch=AdaptiveBatchSize(self.batch))
        maker = GroupSampler(sampler, scorer)
        scores = maker.scores([PromptItem(id="benchmark", text=text)] * len(seeds), seeds)
        side.close()
        return scores


def shares(path: Explorer, candidates: int, plan: Plan, times: Sequence[float]) -> dict[str, Any]:
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
