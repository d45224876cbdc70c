"""GRPO-Guard's loss and its gradient, against verl-project/verl-omni."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Optional

import torch
from solrl_core.sampling.sde import FlowSde
from solrl_trainer.algorithms.flowgrpo import FlowGrpoSettings

from parity.flowgrpo import fixed_inputs, fixed_steps, ours_within
from parity.published import Published, Values, values_of

REPOSITORY = "https://github.com/verl-project/verl-omni"
_LOSS = ("verl_omni/trainer/diffusion/diffusion_algos.py",)
CASES: dict[str, dict[str, Any]] = {"narrow": {"clip_range": 2e-6}, "wide": {"clip_range": 0.1, "adv_clip": 0.5}}
"""Settings of each comparison."""


def ours(case: Mapping[str, Any]) -> Values:
    return ours_within(FlowGrpoSettings(trust_region="guard", kl_weight=0, **case), ("ratio", "clipped"))


def theirs(published: Published, case: Mapping[str, Any]) -> Values:
    """Values of the public code, for one step at a time: it takes steps of one length together."""
    names: dict[str, Any] = {"torch": torch, "Any": Any, "Optional": Optional, "DiffusionLossFn": object}
    names |= {"register_diffusion_loss": lambda name: lambda cls: cls}
    names |= dict.fromkeys(("DiffusionActorConfig", "TensorDict", "DiffusionLossResult"))
    compute = published.definitions(_LOSS, ["GRPOGuardLoss"], names)["GRPOGuardLoss"].compute_loss
    settings, given = FlowGrpoSettings(**case), fixed_inputs()
    v, batch = given["v"].requires_grad_(), fixed_steps(given, FlowSde(0.7))
    (mean, deviation), (old, _) = batch.gaussian_under(v), batch.gaussian_under(given["v_old"])
    log_prob, root = batch.log_prob_under(v), (batch.sigma - batch.sigma_next).sqrt().float()
    chosen = SimpleNamespace(clip_ratio=settings.clip_range, adv_clip_max=settings.adv_clip)
    losses, ratios, clipped = [], [], []
    for row in (slice(i, i + 1) for i in range(len(v))):
        loss, figures = compute(
            old_log_prob=batch.log_prob[row],
            log_prob=log_prob[row],
            advantages=batch.advantages[row],
            config=SimpleNamespace(diffusion_loss=chosen),
            old_prev_sample_mean=old[row],
            prev_sample_mean=mean[row],
            std_dev_t=deviation[row] / root[row],
            sqrt_dt=root[row],
        )
        losses.append(loss)
        ratios.append(figures["actor/ratio_mean"])
        clipped.append(figures["actor/pg_clipfrac"])
    others = {"ratio": torch.tensor(ratios).mean(), "clipped": torch.tensor(clipped).mean()}
    return values_of(torch.stack(losses).mean(), v, others)
