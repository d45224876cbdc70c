"""The interface of a training algorithm.

This module and the shipped algorithms' modules import torch only for types, so that settings can be read, checked
and printed without it.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar

from pydantic import Field
from solrl_proto.selection import merge_ties

from solrl_trainer.algorithms.section import Section
from solrl_trainer.algorithms.training_data import BatchT, TrainingData

if TYPE_CHECKING:
    import torch

AT_LEVEL = "@"
"""Between a figure's name and its noise level. The figure `@LEVEL`, the share of points at the level, divides it."""

FixedPolicy = Literal["old", "reference"]
"""A policy that an update does not change: the behaviour policy, or the base model."""


class AlgorithmSettings(Section):
    """Settings `algorithm.…` of every algorithm; each algorithm adds more."""

    name: str = "diffusionnft"
    """Registered name, or package.module:attribute."""
    global_std: bool = True
    """Divide advantages by the standard deviation of all rewards of the iteration; false: of each prompt's rewards."""
    aggregation: Literal["sum", "gdpo"] = "sum"
    """How several rewards make advantages. sum: by the weighted sum. gdpo: each is first normalised within its prompt,
    so that scales do not count."""
    timestep_fraction: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Share of the sampler's timesteps that each sample is trained at."""


SettingsT = TypeVar("SettingsT", bound=AlgorithmSettings)


@dataclass(frozen=True)
class Velocities:
    """Velocities at the points of a micro-batch, each [B, ...].

    Attributes:
        current: velocity of the trained policy, the only one with a gradient.
        fixed: velocities of the policies in `Algorithm.fixed`.
    """

    current: torch.Tensor
    fixed: Mapping[FixedPolicy, torch.Tensor]

    @property
    def old(self) -> torch.Tensor:
        """Velocity of the behaviour policy; ValueError unless `fixed` contains "old"."""
        return self._fixed("old")

    @property
    def reference(self) -> torch.Tensor:
        """Velocity of the base model; ValueError unless `fixed` contains "reference"."""
        return self._fixed("reference")

    def _fixed(self, name: FixedPolicy) -> torch.Tensor:
        if name not in self.fixed:
            raise ValueError(f"the algorithm did not request the {name!r} policy's velocity; add it to `fixed`")
        return self.fixed[name]


@dataclass(frozen=True)
class Loss:
    """A scalar with gradient and figures to log, all of them means over a micro-batch's units.

    Keep a figure on a GPU as a tensor: reading it would wait for the GPU at every micro-batch.
    """

    value: torch.Tensor
    figures: Mapping[str, float | torch.Tensor]


class Algorithm(ABC, Generic[SettingsT, BatchT]):
    """A training algorithm with its settings. It has no state between calls.

    Attributes:
        Settings: class of its settings; the fields are the run's `algorithm.…`.
        fixed: policies whose velocities the loss needs; each costs a forward pass per micro-batch, but the behaviour
            policy none while the current policy equals it.
        compares: whether the loss needs better and worse samples of a prompt; otherwise it trains on all alike.
        settings: the run's values.
    """

    Settings: ClassVar[type[Any]] = AlgorithmSettings
    fixed: tuple[FixedPolicy, ...] = ()
    compares: ClassVar[bool] = True

    def __init__(self, settings: SettingsT) -> None:
        self.settings = settings

    @property
    @abstractmethod
    def trains_on(self) -> TrainingData[BatchT]:
        """Kind of training data, which determines generation of samples and contents of micro-batches."""

    def at(self, iteration: int) -> Self:
        """The algorithm with the settings of an iteration, from 0; by default itself."""
        return self

    def advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        """Advantages [groups, kept] of an iteration's samples, from their rewards [groups, kept]."""
        return group_advantages(rewards, global_std=self.settings.global_std)

    def units(self, advantages: torch.Tensor, kept: int) -> torch.Tensor:
        """Units: samples that are trained together, with one timestep and noise; by default single samples.

        Args:
            advantages: [N], prompt after prompt.
            kept: samples per prompt.

        Returns:
            Indices of samples [U, size]. Each row is trained once at every trained timestep.
        """
        import torch

        return torch.arange(len(advantages))[:, None]

    @abstractmethod
    def loss(self, batch: BatchT, velocity: Velocities) -> Loss:
        """Loss of a micro-batch of whole units."""


class AlgorithmError(ValueError):
    """A method of an algorithm returned something that cannot be used; the text names its file and line."""

    def __init__(
        self, algorithm: Algorithm[Any, Any], method: Callable[..., Any], returned: str, expected: str
    ) -> None:
        function = inspect.unwrap(method)
        place = f"{Path(inspect.getfile(function)).name}:{function.__code__.co_firstlineno}"
        name = algorithm.settings.name
        super().__init__(f"algorithm {name!r}: {method.__name__} returned {returned}; expected {expected} ({place})")


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + ("" if shape is None else f" of shape {tuple(shape)}")


def units_of(algorithm: Algorithm[Any, Any], advantages: torch.Tensor, kept: int) -> torch.Tensor:
    """An algorithm's units [U, size], see `Algorithm.units`; an AlgorithmError if they are no indices, or none."""
    units = algorithm.units(advantages, kept)
    count, expected = len(advantages), "at least one row of sample indices, [U, size]"
    if getattr(units, "ndim", 0) != 2 or not units.numel():
        raise AlgorithmError(algorithm, algorithm.units, _kind(units), expected)
    if units.is_floating_point() or not 0 <= int(units.min()) <= int(units.max()) < count:
        values = f"{units.dtype} from {units.min():g} to {units.max():g}"
        raise AlgorithmError(algorithm, algorithm.units, values, f"{expected}, whole numbers from 0 to {count - 1}")
    return units


def loss_of(algorithm: Algorithm[Any, BatchT], batch: BatchT, velocity: Velocities) -> Loss:
    """An algorithm's loss of a micro-batch; an AlgorithmError if it, or a figure, is no scalar that can be used."""
    loss: Any = algorithm.loss(batch, velocity)
    if not isinstance(loss, Loss):
        raise AlgorithmError(algorithm, algorithm.loss, _kind(loss), "a `Loss`")
    if getattr(loss.value, "shape", None) != () or not loss.value.requires_grad:
        fault = _kind(loss.value) + (" without gradient" if not getattr(loss.value, "requires_grad", True) else "")
        expected = "a scalar tensor that depends on velocity.current, such as a mean over the batch"
        raise AlgorithmError(algorithm, algorithm.loss, f"a `Loss` whose value is {fault}", expected)
    for name, figure in loss.figures.items():
        if not isinstance(figure, int | float) and getattr(figure, "shape", None) != ():
            returned = f"a `Loss` whose figure {name!r} is {_kind(figure)}"
            raise AlgorithmError(algorithm, algorithm.loss, returned, "a number or a scalar tensor")
    return loss


def group_advantages(rewards: torch.Tensor, *, global_std: bool = True) -> torch.Tensor:
    """Rewards relative to their group's mean, in standard deviations.

    Args:
        rewards: [groups, kept] rewards of the regenerated samples.
        global_std: divide by the deviation over all rewards of the iteration, otherwise over each group's.

    Returns:
        [groups, kept], (r − group mean) / (std + 1e-4); 0 for a reward that equals the mean up to rounding.
    """
    std = rewards.std(unbiased=False) if global_std else rewards.std(1, keepdim=True, unbiased=False)
    return centred(rewards) / (std + 1e-4)


def advantages_of(algorithm: Algorithm[Any, Any], rewards: torch.Tensor) -> torch.Tensor:
    """An algorithm's advantages [groups, kept] of rewards [groups, kept], without what is only rounding.

    Rewards that are equal up to rounding are equal for the algorithm. A group of only such rewards has advantage 0.
    An AlgorithmError names advantages of another shape.
    """
    advantages = algorithm.advantages(merge_group_ties(rewards))
    if getattr(advantages, "shape", None) != rewards.shape:
        raise AlgorithmError(algorithm, algorithm.advantages, _kind(advantages), f"shape {tuple(rewards.shape)}")
    return advantages.masked_fill(without_spread(rewards)[:, None], 0)


def normalised(rewards: torch.Tensor) -> torch.Tensor:
    """A reward [groups, kept] less its group's mean, over its group's deviation; 0 in a group without spread.

    A group's values depend on no other group. Sources: Liu et al., arXiv 2601.05242; NVlabs/GDPO; and the processor of
    advantages in X-GenGroup/Flow-Factory.
    """
    return group_advantages(merge_group_ties(rewards), global_std=False)


def aggregated(
    settings: AlgorithmSettings, rewards: Mapping[str, torch.Tensor], weights: Mapping[str, float | torch.Tensor]
) -> torch.Tensor:
    """Values [groups, kept] for an algorithm's advantages: the weighted sum of the rewards, without their rounding.

    Args:
        settings: say how several rewards are combined.
        rewards: reward → its values [groups, kept]; NaN in a group of weight 0.
        weights: trained reward → its weight, or [groups, 1].
    """
    import torch

    of_one = normalised if settings.aggregation == "gdpo" else merge_group_ties
    return torch.stack([weight * of_one(rewards[name].nan_to_num()) for name, weight in weights.items()]).sum(0)


def merge_group_ties(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards [groups, kept] with ties merged: values of a group that differ only by rounding become equal.

    So no algorithm trains on rounding.
    """
    return rewards.new_tensor([merge_ties(group) for group in rewards.tolist()])


def without_spread(rewards: torch.Tensor) -> torch.Tensor:
    """Whether all rewards of a group are equal up to rounding, bool [groups]; rewards [groups, kept]."""
    level = merge_group_ties(rewards)
    return level.amax(1) == level.amin(1)


def centred(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards [groups, kept] less their group's mean; 0 for rewards that equal it up to rounding."""
    import torch

    mean = rewards.mean(1, keepdim=True)
    level = merge_group_ties(torch.cat([rewards, mean], 1))
    return (rewards - mean).masked_fill(level[:, :-1] == level[:, -1:], 0)
