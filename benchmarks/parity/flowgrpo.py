"""FlowGRPO's steps with log-probabilities, advantages, loss and its gradient, against yifan123/flow_grpo."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Optional, Union

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from solrl_core.sampling.sde import SDES, StochasticSolver
from solrl_trainer.algorithms.algorithm import Velocities
from solrl_trainer.algorithms.flowgrpo import FlowGrpo, FlowGrpoSettings
from solrl_trainer.algorithms.grpo import kl_divergence
from solrl_trainer.algorithms.training_data import TrajectoryBatch

from parity.published import Published, Values, normals, values_of

REPOSITORY = "https://github.com/yifan123/flow_grpo"
_STEP = ("flow_grpo/diffusers_patch/sd3_sde_with_logprob.py",)
_LOSS = ("scripts/train_sd3.py",)
_TRACKER = ("flow_grpo/stat_tracking.py",)
_STEPS = (0, 1, 3, 4)
"""Steps of a schedule of six, of one sample each; the first begins at σ = 1."""
CASES: dict[str, dict[str, Any]] = {
    "paper": {"kl_weight": 0.04},
    "wide": {"kl_weight": 1.0, "clip_range": 0.1, "eta": 0.9},
    "clipped advantages": {"kl_weight": 0.1, "clip_range": 0.2, "adv_clip": 0.5, "global_std": False},
}
"""Settings of each comparison."""


def ours(case: Mapping[str, Any]) -> Values:
    given, settings = fixed_inputs(), FlowGrpoSettings(recompute=False, **case)
    algorithm = FlowGrpo(settings)
    v, batch = given["v"].requires_grad_(), fixed_steps(given, SDES[settings.sde](settings.eta))
    mean, _ = batch.gaussian_under(given["v_old"])
    loss = algorithm.loss(batch, Velocities(v, {"reference": given["v_ref"]}))
    kl = algorithm.released_kl(batch, kl_divergence(batch, v, given["v_ref"])).mean()
    others = {"mean": mean, "log probability": batch.log_prob, "advantages": algorithm.advantages(given["rewards"])}
    return values_of(loss.value, v, others | {"ratio": loss.figures["ratio"], "kl": kl})


def theirs(published: Published, case: Mapping[str, Any], loss: Sequence[str] = _LOSS) -> Values:
    """Values of the public code, whose training script is `loss`."""
    names = {"torch": torch, "math": math, "Optional": Optional, "Union": Union}
    names |= {"FlowMatchEulerDiscreteScheduler": FlowMatchEulerDiscreteScheduler}
    sde_step = published.definitions(_STEP, ["sde_step_with_logprob"], names)["sde_step_with_logprob"]
    tracker = published.definitions(_TRACKER, ["PerPromptStatTracker"], {"np": np})["PerPromptStatTracker"]
    given, settings = fixed_inputs(), FlowGrpoSettings(**case)
    step, v = _bound(sde_step, given, settings.eta), given["v"].requires_grad_()
    _, old, mean, _ = step(given["v_old"])
    _, log_prob, new_mean, deviation = step(v)
    train = SimpleNamespace(adv_clip_max=settings.adv_clip, clip_range=settings.clip_range, beta=settings.kl_weight)
    names = {
        "torch": torch,
        "config": SimpleNamespace(train=train),
        "j": 0,
        "sample": {"advantages": given["advantages"][:, None], "log_probs": old[:, None]},
        "log_prob": log_prob,
        "prev_sample_mean": new_mean,
        "prev_sample_mean_ref": step(given["v_ref"])[2],
        "std_dev_t": deviation,
    }
    names = published.run_statements(loss, "advantages", "policy_loss", names)
    names = published.run_statements(loss, "kl_loss", "loss", names)
    advantages = tracker(settings.global_std).update(["a", "a", "b", "b"], given["rewards"].flatten().numpy())
    others = {"mean": mean, "log probability": old, "advantages": torch.as_tensor(advantages)}
    return values_of(names["loss"], v, others | {"ratio": names["ratio"].mean(), "kl": names["kl_loss"]})


def _bound(step: Any, given: dict[str, torch.Tensor], eta: float) -> Callable[[torch.Tensor], Any]:
    """The public step under a velocity, to the fixed next latents."""
    scheduler = schedule()
    times = scheduler.timesteps[list(_STEPS)]
    return lambda v: step(scheduler, v, times, given["x"], noise_level=eta, prev_sample=given["x_next"])


def schedule() -> Any:
    """SD3.5's noise levels for six steps."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(6)
    return scheduler


def fixed_steps(given: dict[str, torch.Tensor], solver: StochasticSolver) -> TrajectoryBatch:
    """The steps of `fixed_inputs`, with their log-probabilities under v_old."""
    levels = schedule().sigmas.double()
    sigma, sigma_next = levels[list(_STEPS)], levels[[step + 1 for step in _STEPS]]
    old = solver.log_prob(given["x"], sigma, sigma_next, given["v_old"], given["x_next"])
    x, x_next, advantages = given["x"], given["x_next"], given["advantages"]
    return TrajectoryBatch(x, sigma.float(), advantages, x_next, sigma, sigma_next, old, solver)


def fixed_inputs() -> dict[str, torch.Tensor]:
    """Steps and velocities of four samples, float32 [4, 2, 3, 3], rewards of two prompts, and advantages."""
    x, v_old, noise, change, another = normals(5, 4, 2, 3, 3).float()
    x_next = x - 0.15 * v_old + 0.3 * noise
    v, v_ref = v_old + change, v_old + another
    # The advantages of the loss do not sum to 0: otherwise it is small, and its rounding relatively large.
    others = {"rewards": torch.tensor([[0.2, 0.9], [0.5, 0.4]]), "advantages": torch.tensor([1.3, -0.4, 0.8, 2.0])}
    return {"x": x, "x_next": x_next, "v_old": v_old, "v": v, "v_ref": v_ref, **others}
