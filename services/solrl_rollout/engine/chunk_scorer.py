"""Scoring of a worker's chunks: first the rewards on its device, then the rewards at reward servers."""

import time
from dataclasses import replace

import torch
from solrl_core.rewards import RewardSet
from solrl_core.rewards.images import as_bytes
from solrl_engine.scorer import Scorer, float_images, sum_times, times_of

from solrl_rollout.engine.external_rewards import ExternalRewards
from solrl_rollout.engine.work import Chunk, GeneratedChunk, Job, ScoredChunk


class ChunkScorer(Scorer):
    """Scores one model's chunks. It depends on images and prompts only, not on the backend."""

    def __init__(self, rewards: RewardSet) -> None:
        super().__init__(rewards)
        self._run_rewards = ExternalRewards()

    def asks_servers(self, job: Job) -> bool:
        """Whether reward servers compute some of a job's rewards."""
        return bool(self._served(job))

    def score_here(self, generated: GeneratedChunk) -> ScoredChunk:
        """Wait until a chunk's images are computed, and compute the rewards that no server computes.

        Safe while another chunk is generated. Images for servers are kept, too; nothing of the chunk stays on the
        device. Raises what `Scorer.score` raises: RewardError, RewardUnavailableError, torch.OutOfMemoryError.
        """
        chunk, output = generated.chunk, generated.output
        served = self._served(chunk.job)
        here = [name for name in chunk.job.rewards if name not in served]
        generated.finished.wait()
        began = time.monotonic()
        rewards, times = self.score(here, output.images, [chunk.prompt] * chunk.candidates)
        images = None
        if served or chunk.job.images:
            images = torch.cat([as_bytes(float_images(part)) for part in torch.split(output.images, self.batch.size)])
        return ScoredChunk(
            rewards=rewards,
            images=images,
            started_at=generated.started_at,
            switched=generated.switched,
            switch=generated.merged.since(generated.began),
            generate=generated.finished.since(generated.merged),
            reward=time.monotonic() - began,
            times=times,
        )

    async def ask_servers(self, chunk: Chunk, scored: ScoredChunk) -> ScoredChunk:
        """Add the rewards that servers compute to a chunk that `score_here` has scored. Runs on the background loop,
        and uses no device.

        Raises:
            RewardError: a reward failed, or its server gives no usable answer.
        """
        served = self._served(chunk.job)
        if not served:
            return scored
        assert isinstance(scored.images, torch.Tensor)
        began, images = time.monotonic(), scored.images.movedim(-1, -3)
        texts, metadata = [chunk.prompt.text] * chunk.candidates, [chunk.prompt.metadata] * chunk.candidates
        seconds: dict[str, float] = {}
        async with self._run_rewards.connected(chunk.job.external_rewards, clips=images.ndim == 5) as brought:
            asking = self.rewards.joined(brought)
            rewards = scored.rewards | await asking.ask(served, images, texts, metadata, seconds.__setitem__)
        server_seconds = time.monotonic() - began
        return replace(
            scored,
            rewards={name: rewards[name] for name in chunk.job.rewards},
            images=scored.images if chunk.job.images else None,
            reward=scored.reward + server_seconds,
            server_seconds=server_seconds,
            times=sum_times([scored.times, times_of(asking, seconds)]),
        )

    def _served(self, job: Job) -> list[str]:
        here = self.rewards.computed_here
        return [name for name in job.rewards if name in job.external_rewards or name not in here]
