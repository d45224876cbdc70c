"""Flow-DPPO's loss and its gradient, against Tencent-Hunyuan/UniRL."""

from typing import Any

import torch
from solrl_core.sampling.sde import FlowSde
from solrl_trainer.algorithms.flowgrpo import FlowGrpoSettings

from parity.flowgrpo import fixed_inputs, fixed_steps, ours_within
from parity.published import Published, Values, values_of

REPOSITORY = "https://github.com/Tencent-Hunyuan/UniRL"
_LOSS = ("unirl/algorithms/flowdppo.py",)
CASES = {"returning": (1e-5, 1), "all beyond": (1e-5, -1), "some beyond": (0.4, -1), "none beyond": (1e3, -1)}
"""Threshold of each comparison, and the sign of its advantages: the fixed steps return at 1, and go further at -1."""


def ours(case: tuple[float, int]) -> Values:
    threshold, sign = case
    settings = FlowGrpoSettings(trust_region="dppo", kl_threshold=threshold, kl_weight=0)
    return ours_within(settings, ("ratio", "clipped", "old_divergence"), sign)


def theirs(published: Published, case: tuple[float, int]) -> Values:
    threshold, sign = case
    names: dict[str, Any] = {"torch": torch, "Dict": dict, "Tuple": tuple}
    found = published.definitions(_LOSS, ["_gaussian_kl_div", "_flowdppo_kl_adv_loss"], names)
    given = fixed_inputs()
    given["advantages"] *= sign
    v, batch = given["v"].requires_grad_(), fixed_steps(given, FlowSde(0.7))
    (mean, deviation), (old, _) = batch.gaussian_under(v), batch.gaussian_under(given["v_old"])
    losses, figures = found["_flowdppo_kl_adv_loss"](
        new_logp=batch.log_prob_under(v)[:, None],
        old_logp=batch.log_prob[:, None],
        new_means=mean[:, None],
        old_means=old[:, None],
        advantages=batch.advantages[:, None],
        sigma_t=deviation[:, None],
        kl_mask_threshold=threshold,
    )
    others = {"ratio": figures["ratio_mean"], "clipped": figures["masked_fraction"]}
    return values_of(losses.mean(), v, others | {"old_divergence": figures["kl_new_old_mean"]})
