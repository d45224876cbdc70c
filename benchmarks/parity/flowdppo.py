"""Flow-DPPO's loss and its gradient, against Tencent-Hunyuan/UniRL."""

from typing import Any

import torch
from solrl_core.sampling.sde import FlowSde
from solrl_trainer.algorithms.algorithm import Velocities
from solrl_trainer.algorithms.flowgrpo import FlowGrpo, FlowGrpoSettings

from parity.flowgrpo import fixed_inputs, fixed_steps
from parity.published import Published, values_of

REPOSITORY = "https://github.com/Tencent-Hunyuan/UniRL"
_LOSS = ("unirl/algorithms/flowdppo.py",)
CASES = {"returning": (1e-5, 1), "all beyond": (1e-5, -1), "some beyond": (0.4, -1), "none beyond": (1e3, -1)}
"""Threshold of each comparison, and the sign of its advantages: the fixed steps return at 1, and go further at -1."""


def ours() -> dict[str, torch.Tensor]:
    """Values of this project."""
    values: dict[str, torch.Tensor] = {}
    for case, (threshold, sign) in CASES.items():
        algorithm = FlowGrpo(FlowGrpoSettings(trust_region="dppo", kl_threshold=threshold, kl_weight=0))
        given = fixed_inputs()
        given["advantages"] *= sign
        v = given["v"].requires_grad_()
        loss = algorithm.loss(fixed_steps(given, FlowSde(0.7)), Velocities(v, {"old": given["v_old"]}))
        figures = {name: torch.as_tensor(loss.figures[name]) for name in ("ratio", "clipped", "old_divergence")}
        values |= values_of(case, loss.value, v, figures)
    return values


def theirs(published: Published) -> dict[str, torch.Tensor]:
    """Values of the public code."""
    names: dict[str, Any] = {"torch": torch, "Dict": dict, "Tuple": tuple}
    found = published.definitions(_LOSS, ["_gaussian_kl_div", "_flowdppo_kl_adv_loss"], names)
    values: dict[str, torch.Tensor] = {}
    for case, (threshold, sign) in CASES.items():
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
        values |= values_of(case, losses.mean(), v, others | {"old_divergence": figures["kl_new_old_mean"]})
    return values
