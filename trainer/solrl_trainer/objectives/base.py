"""What an objective is: which samples it trains together, which velocities it needs, and its loss."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch

from solrl_trainer.config import ObjectiveSettings

Fixed = Literal["old", "reference"]
"""A policy besides the current one: the behaviour policy, or the base model."""
SettingsT = TypeVar("SettingsT", bound=ObjectiveSettings)


@dataclass(frozen=True)
class Batch:
    """Samples on the forward process, at x_t = (1 − t)·x0 + t·noise.

    A unit's samples are neighbours; they share their time and their noise.

    Attributes:
        x0: clean latents, float32 [B, ...].
        noise: what is mixed in, [B, ...]; the true velocity is noise − x0.
        t: [B] in (0, 1], of the sampler's own schedule.
        advantages: [B].
        v: velocity of the current policy at x_t, [B, ...]; the only one with a gradient.
        fixed: velocities there of the policies that the objective asks for, each [B, ...].
    """

    x0: torch.Tensor
    noise: torch.Tensor
    t: torch.Tensor
    advantages: torch.Tensor
    v: torch.Tensor
    fixed: dict[Fixed, torch.Tensor]

    @property
    def v_old(self) -> torch.Tensor:
        """Velocity of the behaviour policy [B, ...]; ValueError unless the objective asks for "old"."""
        return self._asked("old")

    @property
    def v_ref(self) -> torch.Tensor:
        """Velocity of the base model [B, ...]; ValueError unless the objective asks for "reference"."""
        return self._asked("reference")

    def _asked(self, name: Fixed) -> torch.Tensor:
        if name not in self.fixed:
            raise ValueError(f"the objective did not ask for the {name!r} policy's velocity; name it in `fixed`")
        return self.fixed[name]


@dataclass(frozen=True)
class Loss:
    """A scalar with gradient, a mean over the batch's units, and figures to log beside it, means likewise."""

    value: torch.Tensor
    figures: dict[str, float]


class Objective(ABC, Generic[SettingsT]):
    """One objective under its settings.

    Attributes:
        Settings: the class of its settings; its fields are the run's `objective.…`.
        fixed: the policies whose velocities it needs, each a forward pass of every batch.
        settings: what the run sets.
    """

    Settings: ClassVar[type[Any]] = ObjectiveSettings
    fixed: ClassVar[tuple[Fixed, ...]] = ()

    def __init__(self, settings: SettingsT) -> None:
        self.settings = settings

    def units(self, advantages: torch.Tensor, kept: int) -> torch.Tensor:
        """Which samples are trained together, at one time and under one noise; by default each alone.

        Args:
            advantages: [N], prompt after prompt.
            kept: samples of a prompt.

        Returns:
            [U, size] indices of samples. Each row is trained once at every trained timestep.
        """
        return torch.arange(len(advantages))[:, None]

    @abstractmethod
    def loss(self, batch: Batch) -> Loss:
        """The loss of a batch of whole units."""
