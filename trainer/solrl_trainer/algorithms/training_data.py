"""Kinds of training data: what an algorithm's loss sees of the regenerated samples.

A kind decides how samples are regenerated, at which timesteps they can be trained, and what a micro-batch holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Generic, Self, TypeVar

if TYPE_CHECKING:
    import torch
    from solrl_core.families import Conditioning


@dataclass(frozen=True)
class TrainingSamples:
    """The regenerated samples of an iteration, prompt after prompt.

    Attributes:
        latents: clean latents x0, float32 [N, ...].
        advantages: [N].
        conditioning: encoded prompts, a row for each prompt.
        prompts: row of `conditioning` for each sample [N].
    """

    latents: torch.Tensor
    advantages: torch.Tensor
    conditioning: Conditioning
    prompts: torch.Tensor

    @property
    def kept(self) -> int:
        """Samples per prompt."""
        return len(self.latents) // len(next(iter(self.conditioning.values())))

    def conditioning_of(self, rows: torch.Tensor) -> Conditioning:
        """Conditioning of the samples with these indices, a row for each."""
        prompts = self.prompts[rows]
        return {name: value[prompts.to(value.device)] for name, value in self.conditioning.items()}


@dataclass(frozen=True)
class MicroBatch:
    """Points at which velocities are taken in one pass; the samples of a unit are neighbours.

    Attributes:
        x: latents at which velocities are taken, float32 [B, ...].
        t: their noise levels [B], in (0, 1].
        advantages: [B].
    """

    x: torch.Tensor
    t: torch.Tensor
    advantages: torch.Tensor

    def rows(self, which: slice) -> Self:
        """Some of the points."""
        return replace(self, **{field.name: getattr(self, field.name)[which] for field in fields(self)})


@dataclass(frozen=True)
class ForwardBatch(MicroBatch):
    """Points of the forward process, x = (1 − t)·x0 + t·noise; the samples of a unit share t and noise.

    Attributes:
        x0: clean latents of the samples, float32 [B, ...].
        noise: [B, ...]; the true velocity is noise − x0.
    """

    x0: torch.Tensor
    noise: torch.Tensor


BatchT = TypeVar("BatchT", bound=MicroBatch)


class TrainingData(ABC, Generic[BatchT]):
    """One kind of training data."""

    def steps(self, count: int) -> Sequence[int]:
        """Steps of the sampler, of `count`, at which samples can be trained; all by default."""
        return range(count)

    def draw(self, units: int, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor | None:
        """Noise for the units of a micro-batch, or None.

        Called for every micro-batch in order, so that the noise does not depend on where a micro-batch is trained.
        """
        return None

    @abstractmethod
    def batch(
        self,
        samples: TrainingSamples,
        rows: torch.Tensor,
        steps: torch.Tensor,
        sigmas: torch.Tensor,
        noise: torch.Tensor | None,
        device: torch.device,
    ) -> BatchT:
        """Build a micro-batch on `device`.

        Args:
            samples: all samples of the iteration.
            rows: indices of the samples [B], unit after unit.
            steps: the step at which each is trained [B].
            sigmas: the sampler's schedule, steps + 1 values.
            noise: from `draw`, a row for each unit.
            device: where to put it.
        """


class ForwardProcess(TrainingData[ForwardBatch]):
    """Clean latents mixed with fresh noise: x_t = (1 − t)·x0 + t·noise."""

    def draw(self, units: int, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
        """Fresh noise [units, *shape]."""
        import torch

        return torch.randn(units, *shape, generator=generator)

    def batch(
        self,
        samples: TrainingSamples,
        rows: torch.Tensor,
        steps: torch.Tensor,
        sigmas: torch.Tensor,
        noise: torch.Tensor | None,
        device: torch.device,
    ) -> ForwardBatch:
        """Mix each sample with its unit's noise."""
        assert noise is not None
        x0 = samples.latents[rows].to(device)
        noise = noise.repeat_interleave(len(rows) // len(noise), 0).to(device)
        t = sigmas[steps].to(device)
        at = t.view(-1, *[1] * (x0.ndim - 1))
        return ForwardBatch((1 - at) * x0 + at * noise, t, samples.advantages[rows].to(device), x0, noise)
