"""DanceGRPO's log-probabilities, advantages, loss and its gradient, against XueZeyue/DanceGRPO."""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from solrl_core.sampling.sde import DanceSde
from solrl_trainer.algorithms.algorithm import Velocities
from solrl_trainer.algorithms.dancegrpo import DanceGrpo, DanceGrpoSettings
from solrl_trainer.algorithms.training_data import TrajectoryBatch

from parity.published import Published, Values, normals, values_of

REPOSITORY = "https://github.com/XueZeyue/DanceGRPO"
_SCRIPT = ("fastvideo/train_grpo_flux.py",)
_STEPS = (0, 1, 4, 9)
"""Steps of a schedule of twelve, of one sample each."""
CASES: dict[str, dict[str, Any]] = {
    "scripts": {},
    "wide": {"clip_range": 0.1, "eta": 0.7},
    "clipped advantages": {"clip_range": 0.2, "adv_clip": 0.5},
}
"""Settings of each comparison."""


def ours(case: Mapping[str, Any]) -> Values:
    given, settings = fixed_inputs(), DanceGrpoSettings(recompute=False, **case)
    algorithm, solver, levels = DanceGrpo(settings), DanceSde(settings.eta), given["sigmas"].double()
    sigma, sigma_next = levels[list(_STEPS)], levels[[step + 1 for step in _STEPS]]
    x, x_next, v = given["x"], given["x_next"], given["v"].requires_grad_()
    old = solver.log_prob(x, sigma, sigma_next, given["v_old"], x_next)
    batch = TrajectoryBatch(x, sigma.float(), given["advantages"], x_next, sigma, sigma_next, old, solver)
    loss = algorithm.loss(batch, Velocities(v, {}))
    others = {"log probability": old, "advantages": algorithm.advantages(given["rewards"])}
    return values_of(loss.value, v, others | {"ratio": loss.figures["ratio"]})


def theirs(published: Published, case: Mapping[str, Any]) -> Values:
    step = published.definitions(_SCRIPT, ["flux_step"], {"torch": torch, "math": math})["flux_step"]
    given, settings = fixed_inputs(), DanceGrpoSettings(**case)
    v = given["v"].requires_grad_()
    old, new = (_their_log_prob(step, velocity, given, settings.eta) for velocity in (given["v_old"], v))
    names: dict[str, Any] = {
        "torch": torch,
        "args": SimpleNamespace(num_generations=given["rewards"].shape[1], gradient_accumulation_steps=1),
        "samples": {"rewards": given["rewards"].flatten()},
        "sample": {"advantages": given["advantages"], "log_probs": old[:, None]},
        "new_log_probs": new,
        "clip_range": settings.clip_range,
        "adv_clip_max": settings.adv_clip,
        "train_timesteps": 1,
        "_": 0,
    }
    advantages = published.run_statements(_SCRIPT, "n", "samples['advantages']", names)["advantages"]
    names = published.run_statements(_SCRIPT, "advantages", "loss", names)
    others = {"log probability": old, "advantages": advantages, "ratio": names["ratio"].mean()}
    return values_of(names["loss"], v, others)


def _their_log_prob(step: Any, velocity: torch.Tensor, given: dict[str, torch.Tensor], eta: float) -> torch.Tensor:
    """Log-probabilities of the fixed next latents; the public step takes samples at one noise level."""
    rows = [slice(row, row + 1) for row in range(len(_STEPS))]
    found = [
        step(velocity[row], given["x"][row], eta, given["sigmas"], at, given["x_next"][row], grpo=True, sde_solver=True)
        for row, at in zip(rows, _STEPS, strict=True)
    ]
    return torch.cat([log_prob for _, _, log_prob in found])


def fixed_inputs() -> dict[str, torch.Tensor]:
    """Steps and velocities of four samples, float32 [4, 2, 3, 3], noise levels, rewards of a prompt, and advantages."""
    x, v_old, noise, change = normals(4, 4, 2, 3, 3).float()
    x_next = x - 0.08 * v_old + 0.1 * noise
    # The advantages of the loss do not sum to 0: otherwise it is small, and its rounding relatively large.
    others = {"rewards": torch.tensor([[0.2, 0.9, 0.55, 0.4]]), "advantages": torch.tensor([1.3, -0.4, 0.8, 2.0])}
    times = torch.linspace(1, 0, 13)
    sigmas = 3 * times / (1 + 2 * times)
    return {"x": x, "x_next": x_next, "v_old": v_old, "v": v_old + change, "sigmas": sigmas, **others}
