"""One iteration's optimisation: training samples in, updated LoRA weights out."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from solrl_core.families import Backbone
from solrl_core.sampling.cpu_threads import even_slices, map_in_threads
from solrl_proto.noise import expand_seeds
from torch.nn.attention import SDPBackend, sdpa_kernel

from solrl_trainer.algorithms.algorithm import Algorithm, FixedPolicy, Velocities, loss_of, units_of
from solrl_trainer.algorithms.training_data import TrainingData, TrainingSamples
from solrl_trainer.policy.gradient_buckets import GradientBuckets
from solrl_trainer.policy.policy import Policy, require_finite
from solrl_trainer.policy.progress import OnProgress, ProgressCounter
from solrl_trainer.ranks.communicator import Communicator, gather_values
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.training_sections import Optimizer

_DIFFERENTIABLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels for families whose blocks leave attention to torch. cuDNN's gradients are wrong for some memory layouts
(torch 2.11, H200); blocks with `solrl_core.kernels.attend` avoid these layouts.

The choice applies to the process: during an update, no other thread runs a model.
"""


@dataclass(frozen=True)
class UpdateFigures:
    """Figures of an iteration's optimiser steps.

    Attributes:
        loss: mean over the steps.
        grad_norm, grad_norm_max: mean and largest gradient norm, before clipping.
        figures: the algorithm's figures, means over all trained points.
    """

    loss: float
    grad_norm: float
    grad_norm_max: float
    figures: dict[str, float]


@dataclass(frozen=True)
class Updater:
    """Takes the optimiser steps of an iteration, on the units and by the loss of `algorithm`.

    Every unit (one or several samples) is trained at a random part of the sampler's timesteps; the (unit, step) pairs
    are shuffled and split evenly over the optimiser steps, and each part into micro-batches. All randomness comes from
    the run's seed and the iteration. Every rank draws the same pairs and noise, and computes the micro-batches of its
    buckets; see `GradientBuckets`.
    """

    backbone: Backbone
    policy: Policy
    optimizer: torch.optim.Optimizer
    algorithm: Algorithm[Any, Any]
    config: RunConfig
    world: Communicator = field(default_factory=Communicator)

    @property
    def settings(self) -> Optimizer:
        """Learning rates, optimiser steps, micro-batch size and gradient clipping."""
        return self.config.optimizer

    @cached_property
    def _data(self) -> TrainingData[Any]:
        return self.algorithm.trains_on

    def update(
        self, samples: TrainingSamples, iteration: int, progress: OnProgress = lambda done, total: None
    ) -> UpdateFigures:
        """Take the iteration's optimiser steps; `progress` counts (sample, timestep) pairs.

        A FloatingPointError names a loss or gradient that is not finite; the weights of the last valid step remain. A
        ValueError says that the algorithm has nothing to train on.
        """
        updater = replace(self, algorithm=self.algorithm.at(iteration))
        generator = torch.Generator().manual_seed(expand_seeds(self.config.seed, f"update/{iteration}", 1)[0])
        schedule = self.backbone.sigmas(self.config.regenerate.steps)
        units = units_of(self.algorithm, samples.advantages, samples.kept)
        sigmas = torch.tensor(self._data.sigmas(samples, schedule), dtype=torch.float64)
        losses, norms, figures = [], [], []
        pairs = trained_steps(len(sigmas) - 1, self.algorithm.settings.timestep_fraction) * len(units)
        work = ProgressCounter(pairs, progress)
        for number, (chosen, at, portion) in enumerate(self._parts(len(units), len(sigmas) - 1, generator)):
            where = f"iteration {iteration}, update {number}"
            self.optimizer.zero_grad(set_to_none=True)
            loss, shares = updater._accumulate(samples, units[chosen], at, sigmas, generator, work)
            norms.append(self._step(loss, iteration, where))
            losses.append(loss)
            figures += [{name: value * portion for name, value in part.items()} for part in shares]
        return UpdateFigures(sum(losses) / len(losses), sum(norms) / len(norms), max(norms), _summed(figures))

    def _step(self, loss: float, iteration: int, where: str) -> float:
        """Take an optimiser step of an iteration; returns the norm of its gradient."""
        require_finite(loss, "the loss", where)
        norm = self.policy.gradient_norm(self.settings.max_grad_norm)
        require_finite(norm, "the gradient norm", where)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate(iteration)
        self.optimizer.step()
        return norm

    def _parts(
        self, units: int, steps: int, generator: torch.Generator
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        """Units and steps of the pairs of each optimiser step, and its share of all pairs of the iteration."""
        updates = self.settings.updates
        index, at = training_pairs(units, steps, self.algorithm.settings.timestep_fraction, generator)
        if len(index) < updates:
            raise ValueError(
                f"got {updates} optimizer.updates for the {len(index)} (sample, timestep) pairs of an iteration; "
                "expected at least one pair for each: set fewer updates, or more prompts"
            )
        for chosen, chosen_at in zip(index.tensor_split(updates), at.tensor_split(updates), strict=True):
            yield chosen, chosen_at, len(chosen) / len(index)

    def _accumulate(
        self,
        samples: TrainingSamples,
        units: torch.Tensor,
        steps: torch.Tensor,
        sigmas: torch.Tensor,
        generator: torch.Generator,
        work: ProgressCounter,
    ) -> tuple[float, list[dict[str, float]]]:
        """Set the parameters' gradient to that of these units; return the loss, and figures of each micro-batch."""
        gradients = GradientBuckets(self.policy.parameters, self.world, self.backbone.device)
        batch, shape, computed = max(1, self.settings.batch // units.shape[1]), samples.latents.shape[1:], []
        parts = torch.split(torch.arange(len(units)), batch)
        passes = [name for name in self.algorithm.fixed if name != "old" or not self.policy.is_behaviour()]
        for number, part in enumerate(parts):
            noise = self._data.draw(len(part), shape, generator)
            compute = partial(self._micro_batch, samples, units[part], steps[part], sigmas, noise, len(units), passes)
            if number == 0:
                idle_pass = partial(compute, lambda part, gradient: None)
            if gradients.owns(number):
                computed.append((number, compute(partial(gradients.add, number))))
            work.finish(len(part))
        for _ in range(gradients.largest_share(len(parts)) - len(computed) if self.world.in_step else 0):
            idle_pass()  # its result counts for nothing: the collectives of all ranks must match
        every = _gathered(computed, self.world)
        for parameter, gradient in zip(self.policy.parameters, gradients.total(), strict=True):
            parameter.grad = gradient
        return sum(loss for loss, _ in every), [figures for _, figures in every]

    @sdpa_kernel(_DIFFERENTIABLE)
    def _micro_batch(
        self,
        samples: TrainingSamples,
        units: torch.Tensor,
        steps: torch.Tensor,
        sigmas: torch.Tensor,
        noise: torch.Tensor | None,
        count: int,
        passes: Sequence[FixedPolicy],
        add: Callable[[int, Sequence[torch.Tensor]], None],
    ) -> "list[_Part]":
        """Pass the gradient of these units, weighted by their share of `count`, to `add`, part by part.

        `passes` names the fixed policies that differ from the current one. The others share its pass.

        Returns:
            Each part's share of the loss and of the algorithm's figures; on a GPU, possibly not computed yet.
        """
        device, policy, size = self.backbone.device, self.policy, units.shape[1]
        rows = units.flatten()
        at = steps.repeat_interleave(size)
        batch = self._data.batch(samples, rows, at, sigmas, noise, device)
        conditioning = samples.conditioning_of(rows)
        # On a CPU in threads, of whole units.
        unit_slices = even_slices(len(units), max(1, self.settings.batch // size), device)
        parts = [slice(part.start * size, part.stop * size) for part in unit_slices]

        def velocity(part: slice) -> torch.Tensor:
            rows = {name: value[part] for name, value in conditioning.items()}
            return self.backbone.velocity(policy.transformer, batch.x[part], batch.t[part], rows, self.config.guidance)

        within = {"old": policy.old, "reference": policy.reference}
        fixed: dict[FixedPolicy, list[torch.Tensor]] = {}
        for name in passes:
            with within[name]():
                fixed[name] = map_in_threads(torch.no_grad()(velocity), parts, device)

        def gradients(i: int) -> tuple[torch.Tensor, dict[str, float | torch.Tensor], tuple[torch.Tensor, ...]]:
            current = velocity(parts[i])
            separate = {name: by_part[i] for name, by_part in fixed.items()}
            shared = {name: current.detach().clone() for name in self.algorithm.fixed if name not in separate}
            velocities = Velocities(current, separate | shared)
            loss = loss_of(self.algorithm, batch.rows(parts[i]), velocities)
            share = (parts[i].stop - parts[i].start) / size / count
            value = loss.value * share
            figures = {name: figure * share for name, figure in loss.figures.items()}
            return value.detach(), figures, self._gradient(value)

        results = map_in_threads(gradients, range(len(parts)), device)
        for number, (_, _, gradient) in enumerate(results):
            add(number, gradient)
        return [(loss, figures) for loss, figures, _ in results]

    def _gradient(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The gradient of each parameter; zeros in idle layers of the family, ValueError if another one has none."""
        parameters, idle = self.policy.parameters, self.backbone.unused_lora_layers
        gradients = torch.autograd.grad(value, parameters, allow_unused=True)
        layers = [name for name in self.policy.layers for _ in ("a", "b")]
        lost = {name for name, gradient in zip(layers, gradients, strict=True) if gradient is None}
        if faults := sorted(name for name in lost if idle is None or not re.fullmatch(idle, name)):
            raise ValueError(
                f"the velocity does not depend on {len(faults)} adapted layers, so they would never be trained: "
                f"{', '.join(faults[:4])}{', …' if faults[4:] else ''}; expected lora_targets of the family "
                f"{self.backbone.family!r} without them, or unused_lora_layers with them"
            )
        return tuple(
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(parameters, gradients, strict=True)
        )


_Part = tuple[torch.Tensor, dict[str, float | torch.Tensor]]
"""Share of the loss and of the algorithm's figures that a part of a micro-batch has."""


def _gathered(
    computed: Sequence[tuple[int, Sequence[_Part]]], world: Communicator
) -> list[tuple[float, dict[str, float]]]:
    """Loss and figures of the micro-batches of all ranks, in the order of their numbers.

    Read only after the last: earlier, each number would wait for the GPU, and then the GPU for more work.
    """
    local = [
        (number, sum(float(loss) for loss, _ in parts), _summed(figures for _, figures in parts))
        for number, parts in computed
    ]
    every = [micro_batch for part in gather_values(local, world) for micro_batch in part]
    return [(loss, figures) for _, loss, figures in sorted(every, key=lambda micro_batch: micro_batch[0])]


def training_pairs(
    units: int, steps: int, fraction: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit and step of each pair [units · share], in training order: each unit has a random part of the steps.

    The part is the `fraction` of the steps; see `trained_steps`.
    """
    trained = trained_steps(steps, fraction)
    order = torch.rand(units, steps, generator=generator).argsort(1)[:, :trained]
    index = torch.arange(units)[:, None].expand(-1, trained).flatten()
    shuffle = torch.randperm(len(index), generator=generator)
    return index[shuffle], order.flatten()[shuffle]


def trained_steps(steps: int, fraction: float) -> int:
    """Number of a unit's trained sampler steps: rounded down, as Sol-RL's code does, but at least 1."""
    return max(1, int(fraction * steps))


def _summed(parts: Iterable[Mapping[str, float | torch.Tensor]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + float(value)
    return total
