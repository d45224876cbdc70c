"""Scoring of generated images with the loaded rewards."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from solrl_core.errors import RewardError, RewardUnavailableError
from solrl_core.model_options import ModelOptions
from solrl_core.rewards import RewardSet
from solrl_core.rewards.base import PlainDefaults, Reward
from solrl_core.rewards.images import as_bytes, as_floats
from solrl_proto.rollouts import RewardTime
from solrl_remote.remote_reward import connect_reward

from solrl_rollout.engine.batch_limit import BatchLimit
from solrl_rollout.engine.problems import images_nonfinite, reward_failed, reward_unavailable
from solrl_rollout.engine.run_rewards import RunRewards
from solrl_rollout.engine.work import Chunk, GeneratedChunk, Job, ScoredChunk, sum_times
from solrl_rollout.settings import Settings
from solrl_rollout.status.metrics import Metrics

Scores = dict[str, torch.Tensor]
Times = dict[str, RewardTime]

PART = "rewards"
"""Name of scoring in batch limits and metrics, where other parts are precisions."""


class Scorer:
    """Scores one model's images. It depends on images and prompts only, not on the backend.

    Attributes:
        rewards: the loaded rewards.
        limit: largest number of images that are scored at once.
        dtype: number format of the weights of rewards whose options give none; None for each reward's own.
    """

    def __init__(self, rewards: RewardSet, device: torch.device, limit: BatchLimit, dtype: str | None = None) -> None:
        self.rewards = rewards
        self.dtype = dtype
        self.limit = limit
        self._run_rewards = RunRewards()
        self._device = device
        # A separate stream: on the generating stream, scoring would wait for the next chunk. Its priority is high,
        # because a chunk's memory is free once it is scored.
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1) if on_gpu else None  # type: ignore[no-untyped-call]

    @classmethod
    def load(
        cls,
        model: str,
        settings: Settings,
        model_options: Mapping[str, Mapping[str, Any]],
        loaded: dict[str, Reward],
        metrics: Metrics,
    ) -> "Scorer":
        """Load the rewards of the settings.

        Args:
            model: the model's name in requests.
            settings: settings with the rewards, their options and the device.
            model_options: reward → options for built-in rewards from the model's files.
            loaded: rewards that other models have loaded; those with equal options are shared.
            metrics: counter of exhausted memory.

        Raises:
            ValueError, OSError: a reward cannot be loaded.
            RewardUnavailableError: a reward's server does not answer.
            torch.OutOfMemoryError: a reward does not fit.
        """
        device = torch.device(settings.torch_device)
        defaults = PlainDefaults(device, ModelOptions(rewards=model_options))
        rewards = RewardSet.load(
            settings.reward_names,
            defaults,
            settings.options_of_rewards,
            loaded=loaded,
            connect=connect_reward,
            dtype=settings.dtype_of_rewards,
        )
        return cls(rewards, device, BatchLimit(model, PART, metrics), settings.dtype_of_rewards)

    def check(self) -> None:
        """Raise if the device no longer works."""
        torch.ones(1, device=self._device).sum().item()

    def asks_servers(self, job: Job) -> bool:
        """Whether reward servers compute some of a job's rewards."""
        return bool(self._served(job))

    def score(self, generated: GeneratedChunk) -> ScoredChunk:
        """Score a chunk here and at reward servers; raises as `score_here` and `ask_servers` do."""
        return self.ask_servers(generated.chunk, self.score_here(generated))

    def score_here(self, generated: GeneratedChunk) -> ScoredChunk:
        """Wait until a chunk's images are computed, and compute the rewards that no server computes.

        Safe while another chunk is generated. Images for servers are kept, too; nothing of the chunk stays on the
        device.

        Raises:
            ProblemError: 422 `adapter-nonfinite`, 500 `generation-failed` or `reward-failed`, 503 or 507
                `out-of-memory`.
        """
        chunk, job = generated.chunk, generated.chunk.job
        served = self._served(job)
        here = [name for name in job.rewards if name not in served]
        generated.finished.wait()
        began = time.monotonic()

        @torch.inference_mode()
        def score(rows: slice) -> tuple[Scores, Times, torch.Tensor | None]:
            images = _as_floats(generated.images[rows])
            if not torch.isfinite(images).all():
                raise images_nonfinite(chunk.prompt.id, job.adapter.digest if job.adapter else None)
            with _reporting_faults(chunk):
                scores, times = _scores(self.rewards, here, images, chunk)
            return scores, times, as_bytes(images) if served or _answers_images(chunk) else None

        with torch.cuda.stream(self._stream):
            parts = self.limit.run(job, chunk.candidates, score)
            trajectory = generated.trajectory and generated.trajectory.to(torch.device("cpu"))
        images = [part for _, _, part in parts if part is not None]
        return ScoredChunk(
            rewards={name: torch.cat([scores[name] for scores, _, _ in parts]) for name in here},
            images=torch.cat(images) if images else None,
            trajectory=trajectory,
            unread_tokens=generated.unread_tokens,
            started_at=generated.started_at,
            switched=generated.switched,
            switch=generated.merged.since(generated.began),
            generate=generated.finished.since(generated.merged),
            reward=time.monotonic() - began,
            times=sum_times(times for _, times, _ in parts),
        )

    def ask_servers(self, chunk: Chunk, scored: ScoredChunk) -> ScoredChunk:
        """A chunk with the rewards of `score_here` and those that servers compute of its images. Uses no device.

        Raises:
            ProblemError: 500 `reward-failed`, or 503 if a server gives no usable answer.
        """
        served = self._served(chunk.job)
        if not served:
            return scored
        assert isinstance(scored.images, torch.Tensor)
        began, images = time.monotonic(), scored.images.permute(0, 3, 1, 2)
        with _reporting_faults(chunk), self._run_rewards.connected(chunk.job.run_rewards) as brought:
            scores, times = _scores(self.rewards.joined(brought), served, images, chunk)
        rewards = scored.rewards | scores
        asked = time.monotonic() - began
        return replace(
            scored,
            rewards={name: rewards[name] for name in chunk.job.rewards},
            images=scored.images if _answers_images(chunk) else None,
            reward=scored.reward + asked,
            asked=asked,
            times=sum_times([scored.times, times]),
        )

    def _served(self, job: Job) -> list[str]:
        here = self.rewards.computed_here
        return [name for name in job.rewards if name in job.run_rewards or name not in here]


def _scores(rewards: RewardSet, names: Sequence[str], images: torch.Tensor, chunk: Chunk) -> tuple[Scores, Times]:
    prompts, metadata = [chunk.prompt.text] * len(images), [chunk.prompt.metadata] * len(images)
    times: Times = {}

    def note(name: str, seconds: float) -> None:
        times[name] = RewardTime(seconds=seconds, server=rewards.server(name))

    return rewards.score(names, images, prompts, metadata, note), times


@contextmanager
def _reporting_faults(chunk: Chunk) -> Iterator[None]:
    """Raise a reward's error within the block as the problem of its chunk."""
    try:
        yield
    except RewardUnavailableError as error:
        raise reward_unavailable(str(error), chunk.prompt.id) from error
    except RewardError as error:
        raise reward_failed(str(error), chunk.prompt.id) from error


def _answers_images(chunk: Chunk) -> bool:
    """Whether the answer has the chunk's images."""
    return chunk.job.images and chunk.ends


def _as_floats(images: torch.Tensor) -> torch.Tensor:
    """Images as float32 [N, 3, H, W] in [0, 1], also from uint8 [N, H, W, 3]."""
    return as_floats(images.permute(0, 3, 1, 2)) if images.dtype == torch.uint8 else images
