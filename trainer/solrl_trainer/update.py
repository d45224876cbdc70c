"""One iteration's optimisation: kept samples in, updated LoRA weights out."""

import math
from dataclasses import dataclass

import torch
from solrl_core.families import Backbone, Conditioning
from solrl_core.lanes import side_by_side, split
from solrl_proto.noise import expand_seeds

from solrl_trainer.config import RunConfig
from solrl_trainer.objectives.nft import nft_loss
from solrl_trainer.policy import Policy, require_finite


@dataclass(frozen=True)
class Samples:
    """The regenerated samples an iteration trains on.

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

    Every sample is trained at a shuffled share of the sampler's own timesteps; the (sample, timestep) pairs are
    shuffled and split evenly over the updates. All randomness comes from the run's seed and the iteration.

    Returns:
        Mean loss, and mean and largest gradient norm before clipping.

    Raises:
        FloatingPointError: a loss or gradient that is not finite; the weights are as after the last good step.
    """
    generator = torch.Generator().manual_seed(expand_seeds(config.seed, f"update/{iteration}", 1)[0])
    index, times = _pairs(len(samples.latents), backbone.sigmas(config.regenerate.steps), config, generator)
    losses, norms = [], []
    for step, (chunk, at) in enumerate(
        zip(index.chunk(config.optimizer.updates), times.chunk(config.optimizer.updates), strict=True)
    ):
        where = f"iteration {iteration}, update {step}"
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for start in range(0, len(chunk), config.optimizer.batch):
            batch = slice(start, start + config.optimizer.batch)
            total += _accumulate(samples, chunk[batch], at[batch], len(chunk), policy, backbone, config, generator)
            require_finite(total, "the loss", where)
        norm = policy.gradient_norm(config.optimizer.max_grad_norm)
        require_finite(norm, "the gradient norm", where)
        optimizer.step()
        losses.append(total)
        norms.append(norm)
    return {"loss": sum(losses) / len(losses), "grad_norm": sum(norms) / len(norms), "grad_norm_max": max(norms)}


def _pairs(
    count: int, sigmas: list[float], config: RunConfig, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample indices and their timesteps, in training order."""
    schedule = torch.tensor(sigmas[:-1])
    trained = max(1, math.ceil(config.objective.timestep_fraction * len(schedule)))
    order = torch.rand(count, len(schedule), generator=generator).argsort(1)[:, :trained]
    index = torch.arange(count)[:, None].expand(-1, trained).flatten()
    shuffle = torch.randperm(len(index), generator=generator)
    return index[shuffle], schedule[order.flatten()][shuffle]


def _accumulate(
    samples: Samples,
    rows: torch.Tensor,
    t: torch.Tensor,
    count: int,
    policy: Policy,
    backbone: Backbone,
    config: RunConfig,
    generator: torch.Generator,
) -> float:
    """Add the gradient of these rows' share (of `count`) to the parameters' and return their share of the loss."""
    device = backbone.device
    x0 = samples.latents[rows].to(device)
    noise = torch.randn(x0.shape, generator=generator).to(device)
    t = t.to(device)
    advantages = samples.advantages[rows].to(device)
    at = t.view(-1, *[1] * (x0.ndim - 1))
    x_t = (1 - at) * x0 + at * noise
    conditioning = {name: value[rows.to(value.device)] for name, value in samples.conditioning.items()}
    parts = split(len(rows), config.optimizer.batch, device)

    def velocity(part: slice) -> torch.Tensor:
        own = {name: value[part] for name, value in conditioning.items()}
        return backbone.velocity(policy.transformer, x_t[part], t[part], own, config.guidance)

    fixed_velocity = torch.no_grad()(velocity)
    with policy.reference():
        v_ref = side_by_side(fixed_velocity, parts, device)
    with policy.old():
        v_old = side_by_side(fixed_velocity, parts, device)

    def gradients(index: int) -> tuple[float, tuple[torch.Tensor, ...]]:
        part, objective = parts[index], config.objective
        loss = nft_loss(
            velocity(part),
            v_old[index],
            v_ref[index],
            x0[part],
            noise[part],
            t[part],
            advantages[part],
            beta=objective.beta,
            adv_clip=objective.adv_clip,
            kl_weight=objective.kl_weight,
        )
        loss = loss * (len(x0[part]) / count)
        return float(loss.detach()), torch.autograd.grad(loss, policy.parameters)

    done = side_by_side(gradients, range(len(parts)), device)
    for _, gradient in done:
        for parameter, value in zip(policy.parameters, gradient, strict=True):
            parameter.grad = value if parameter.grad is None else parameter.grad + value
    return sum(loss for loss, _ in done)
