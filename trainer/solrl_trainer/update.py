"""One iteration's optimisation: kept samples in, updated LoRA weights out."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from solrl_core.families import Backbone, Conditioning
from solrl_core.lanes import side_by_side, split
from solrl_proto.noise import expand_seeds
from torch.nn.attention import SDPBackend, sdpa_kernel

from solrl_trainer.config import RunConfig
from solrl_trainer.objectives.base import Batch, Objective
from solrl_trainer.objectives.registry import find_objective
from solrl_trainer.policy import Policy, require_finite

_DIFFERENTIABLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Not cuDNN's attention: of FLUX it returned gradients that are not a number (torch 2.11, H200).

The choice is the process's: while the trainer updates, no other of its threads runs a model.
"""


@dataclass(frozen=True)
class Samples:
    """The regenerated samples an iteration trains on, prompt after prompt.

    Attributes:
        latents: clean latents x0, float32 [N, ...].
        conditioning: encoded prompts, one row for each sample.
        advantages: [N].
    """

    latents: torch.Tensor
    conditioning: Conditioning
    advantages: torch.Tensor


def train_on(
    samples: Samples,
    policy: Policy,
    backbone: Backbone,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    iteration: int,
) -> dict[str, float]:
    """Take the iteration's optimiser steps.

    Every unit of the objective (a sample, or several that belong together) is trained at a shuffled share of the
    sampler's own timesteps; the (unit, timestep) pairs are shuffled and split evenly over the updates. All randomness
    comes from the run's seed and the iteration.

    Returns:
        Mean loss, mean and largest gradient norm before clipping, and the objective's own figures as
        `objective/<name>`, means over all pairs.

    Raises:
        FloatingPointError: a loss or gradient that is not finite; the weights are as after the last good step.
        ValueError: the objective cannot be loaded, or has nothing to train on.
    """
    generator = torch.Generator().manual_seed(expand_seeds(config.seed, f"update/{iteration}", 1)[0])
    objective = find_objective(config.objective.name)(config.objective)
    units = objective.units(samples.advantages, config.explore.keep)
    if units.ndim != 2 or not units.numel():
        raise ValueError(
            f"objective {config.objective.name!r} gave units of shape {tuple(units.shape)}; expected [U, size]"
        )
    step = _Step(samples, units, objective, policy, backbone, config, generator)
    index, times = _pairs(len(units), backbone.sigmas(config.regenerate.steps), config, generator)
    batch = max(1, config.optimizer.batch // units.shape[1])
    losses, norms, figures = [], [], []
    for update, (chunk, at) in enumerate(
        zip(index.chunk(config.optimizer.updates), times.chunk(config.optimizer.updates), strict=True)
    ):
        where = f"iteration {iteration}, update {update}"
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for start in range(0, len(chunk), batch):
            part = slice(start, start + batch)
            with sdpa_kernel(_DIFFERENTIABLE):
                loss, shares = step.accumulate(chunk[part], at[part], len(chunk))
            total += loss
            require_finite(total, "the loss", where)
            figures.append({name: value * len(chunk) / len(index) for name, value in shares.items()})
        norm = policy.gradient_norm(config.optimizer.max_grad_norm)
        require_finite(norm, "the gradient norm", where)
        optimizer.step()
        losses.append(total)
        norms.append(norm)
    logged = {"loss": sum(losses) / len(losses), "grad_norm": sum(norms) / len(norms), "grad_norm_max": max(norms)}
    return logged | {f"objective/{name}": value for name, value in _summed(figures).items()}


def _pairs(
    count: int, sigmas: list[float], config: RunConfig, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of units and their timesteps, in training order."""
    schedule = torch.tensor(sigmas[:-1])
    trained = max(1, math.ceil(config.objective.timestep_fraction * len(schedule)))
    order = torch.rand(count, len(schedule), generator=generator).argsort(1)[:, :trained]
    index = torch.arange(count)[:, None].expand(-1, trained).flatten()
    shuffle = torch.randperm(len(index), generator=generator)
    return index[shuffle], schedule[order.flatten()][shuffle]


@dataclass(frozen=True)
class _Step:
    """What the batches of an iteration have in common."""

    samples: Samples
    units: torch.Tensor
    objective: Objective[Any]
    policy: Policy
    backbone: Backbone
    config: RunConfig
    generator: torch.Generator

    def accumulate(self, index: torch.Tensor, times: torch.Tensor, count: int) -> tuple[float, dict[str, float]]:
        """Add the gradient of these units' share (of `count`) to the parameters'.

        Returns:
            Their share of the loss and of the objective's figures.
        """
        device, policy, size = self.backbone.device, self.policy, self.units.shape[1]
        rows = self.units[index].flatten()
        x0 = self.samples.latents[rows].to(device)
        # One noise and one time a unit.
        noise = torch.randn(len(index), *x0.shape[1:], generator=self.generator).repeat_interleave(size, 0).to(device)
        t = times.repeat_interleave(size).to(device)
        advantages = self.samples.advantages[rows].to(device)
        at = t.view(-1, *[1] * (x0.ndim - 1))
        x_t = (1 - at) * x0 + at * noise
        conditioning = {name: value[rows.to(value.device)] for name, value in self.samples.conditioning.items()}
        whole = split(len(index), max(1, self.config.optimizer.batch // size), device)
        parts = [slice(part.start * size, part.stop * size) for part in whole]

        def velocity(part: slice) -> torch.Tensor:
            own = {name: value[part] for name, value in conditioning.items()}
            return self.backbone.velocity(policy.transformer, x_t[part], t[part], own, self.config.guidance)

        fixed_velocity = torch.no_grad()(velocity)
        within = {"old": policy.old, "reference": policy.reference}
        fixed = {}
        for name in self.objective.fixed:
            with within[name]():
                fixed[name] = side_by_side(fixed_velocity, parts, device)

        def gradients(i: int) -> tuple[float, dict[str, float], tuple[torch.Tensor, ...]]:
            part = parts[i]
            others = {name: velocities[i] for name, velocities in fixed.items()}
            batch = Batch(x0[part], noise[part], t[part], advantages[part], velocity(part), others)
            loss = self.objective.loss(batch)
            share = len(x0[part]) / size / count
            value = loss.value * share
            figures = {name: figure * share for name, figure in loss.figures.items()}
            return float(value.detach()), figures, torch.autograd.grad(value, policy.parameters)

        done = side_by_side(gradients, range(len(parts)), device)
        for _, _, gradient in done:
            for parameter, value in zip(policy.parameters, gradient, strict=True):
                parameter.grad = value if parameter.grad is None else parameter.grad + value
        return sum(loss for loss, _, _ in done), _summed(figures for _, figures, _ in done)


def _summed(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of each figure."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total
