"""FlowGRPO's steps, advantages, loss and figures, against its code: `python benchmarks/parity/flowgrpo.py CLONE`.

The authors' step with log-probabilities, and the part of their training step from the advantages to the loss, are read
from the clone and run on fixed tensors.
"""

import argparse
import ast
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional, Protocol, Union

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from solrl_core.sde import FlowSde
from solrl_trainer.algorithms.base import FixedPolicy, Velocities
from solrl_trainer.algorithms.flowgrpo import FlowGrpo, FlowGrpoSettings, kl_divergence, released_kl
from solrl_trainer.algorithms.training_data import TrajectoryBatch

REPOSITORY = "https://github.com/yifan123/flow_grpo"
_STEP = "flow_grpo/diffusers_patch/sd3_sde_with_logprob.py"
_SCRIPT = "scripts/train_sd3.py"
_TRACKER = "flow_grpo/stat_tracking.py"
_STEPS = (0, 1, 3, 4)
"""Steps of a schedule of six, of one sample each; the first begins at σ = 1."""
CASES: dict[str, dict[str, Any]] = {
    "paper": {"kl_weight": 0.04},
    "wide": {"kl_weight": 1.0, "clip_range": 0.1, "eta": 0.9},
    "clipped advantages": {"kl_weight": 0.0, "clip_range": 0.2, "adv_clip": 0.5, "global_std": False},
}
"""Settings of each comparison."""


class Clone(Protocol):
    """A clone of the authors' repository; `folder` is its root."""

    @property
    def folder(self) -> Path: ...


def ours() -> dict[str, torch.Tensor]:
    """Values of this project."""
    values: dict[str, torch.Tensor] = {}
    for case, chosen in CASES.items():
        given, settings = fixed_inputs(), FlowGrpoSettings(recompute=False, **chosen)
        algorithm, solver = FlowGrpo(settings), FlowSde(settings.eta)
        levels = schedule().sigmas.double()
        sigma, sigma_next = levels[list(_STEPS)], levels[[step + 1 for step in _STEPS]]
        x, x_next, v = given["x"], given["x_next"], given["v"].requires_grad_()
        mean, deviation = solver.gaussian(x, sigma, sigma_next, given["v_old"])
        log_prob = solver.log_prob(x, sigma, sigma_next, given["v_old"], x_next)
        advantages = algorithm.advantages(given["rewards"])
        batch = TrajectoryBatch(x, sigma.float(), given["advantages"], x_next, sigma, sigma_next, log_prob, solver)
        fixed: dict[FixedPolicy, torch.Tensor] = {"reference": given["v_ref"]}
        loss = algorithm.loss(batch, Velocities(v, fixed))
        figures = {name: torch.as_tensor(loss.figures[name]) for name in ("clipped", "old_kl")}
        figures["kl"] = released_kl(batch, kl_divergence(batch, v, given["v_ref"])).mean()
        steps = {"mean": mean, "deviation": deviation, "log probability": log_prob, "advantages": advantages}
        values |= _values(case, loss.value, v, steps | figures)
    return values


def theirs(published: Clone) -> dict[str, torch.Tensor]:
    """Values of the authors' code."""
    trees = {name: ast.parse((published.folder / name).read_text(encoding="utf-8")) for name in (_STEP, _SCRIPT)}
    tracker = ast.parse((published.folder / _TRACKER).read_text(encoding="utf-8"))
    values: dict[str, torch.Tensor] = {}
    for case, chosen in CASES.items():
        given, settings, scheduler = fixed_inputs(), FlowGrpoSettings(**chosen), schedule()
        names: dict[str, Any] = {"torch": torch, "math": math, "np": np, "Optional": Optional, "Union": Union}
        names["FlowMatchEulerDiscreteScheduler"] = FlowMatchEulerDiscreteScheduler
        _run([*_defined(trees[_STEP], "sde_step_with_logprob"), *_defined(tracker, "PerPromptStatTracker")], names)
        v, times = given["v"].requires_grad_(), scheduler.timesteps[list(_STEPS)]

        def step(
            velocity: torch.Tensor,
            names: dict[str, Any] = names,
            scheduler: Any = scheduler,
            given: dict[str, torch.Tensor] = given,
            times: torch.Tensor = times,
            level: float = settings.eta,
        ) -> tuple[torch.Tensor, ...]:
            found: tuple[torch.Tensor, ...] = names["sde_step_with_logprob"](
                scheduler, velocity, times, given["x"], noise_level=level, prev_sample=given["x_next"]
            )
            return found

        _, old, mean, deviation = step(given["v_old"])
        rewards = given["rewards"].flatten().numpy()
        advantages = names["PerPromptStatTracker"](settings.global_std).update(["a", "a", "b", "b"], rewards)
        names |= {"info": defaultdict(list), "j": 0, "config": SimpleNamespace(train=_their_settings(settings))}
        names["sample"] = {"advantages": given["advantages"][:, None], "log_probs": old[:, None]}
        _, names["log_prob"], names["prev_sample_mean"], names["std_dev_t"] = step(v)
        _, _, names["prev_sample_mean_ref"], _ = step(given["v_ref"])
        _run(_loss_statements(trees[_SCRIPT]), names)
        info = names["info"]
        levels = scheduler.sigmas
        step_size = torch.stack([levels[at] - levels[at + 1] for at in _STEPS]).view(-1, 1, 1, 1)
        steps = {
            "mean": mean,
            "deviation": deviation * step_size.sqrt(),
            "log probability": old,
            "advantages": torch.as_tensor(advantages),
        }
        kl = ((names["prev_sample_mean"] - names["prev_sample_mean_ref"]) ** 2).mean((1, 2, 3), keepdim=True)
        kl = info["kl_loss"][0] if info["kl_loss"] else (kl / (2 * deviation**2)).mean()
        figures = {"clipped": info["clipfrac"][0], "old_kl": info["approx_kl"][0], "kl": kl}
        values |= _values(case, names["loss"], v, steps | figures)
    return values


def _their_settings(own: FlowGrpoSettings) -> SimpleNamespace:
    return SimpleNamespace(adv_clip_max=own.adv_clip, clip_range=own.clip_range, beta=own.kl_weight)


def _defined(tree: ast.Module, name: str) -> list[ast.stmt]:
    return [node for node in tree.body if getattr(node, "name", None) == name]


def _loss_statements(tree: ast.Module) -> list[ast.stmt]:
    """The statements of a training step from the advantages to the call of `accelerator.backward`."""
    (step,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.With) and ast.unparse(node.items[0]).startswith("accelerator.accumulate")
    )
    texts = [ast.unparse(statement) for statement in step.body]
    first, end = ([text.startswith(words) for text in texts].index(True) for words in ("advantages =", "accelerator.b"))
    return step.body[first:end]


def _run(statements: list[ast.stmt], names: dict[str, Any]) -> None:
    exec(compile(ast.Module(statements, []), _SCRIPT, "exec"), names)


def schedule() -> Any:
    """SD3.5's noise levels for six steps."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(6)
    return scheduler


def fixed_inputs() -> dict[str, torch.Tensor]:
    """Steps and velocities of four samples, float32 [4, 2, 3, 3], rewards of two prompts, and advantages."""
    random = np.random.RandomState(0)  # its stream is the same in every version of numpy

    def normal() -> torch.Tensor:
        return torch.from_numpy(random.standard_normal((4, 2, 3, 3))).float()

    x, v_old = normal(), normal()
    x_next = x - 0.15 * v_old + 0.3 * normal()
    v, v_ref = v_old + normal(), v_old + normal()
    # The advantages of the loss do not sum to 0: otherwise it is small, and its rounding relatively large.
    others = {"rewards": torch.tensor([[0.2, 0.9], [0.5, 0.4]]), "advantages": torch.tensor([1.3, -0.4, 0.8, 2.0])}
    return {"x": x, "x_next": x_next, "v_old": v_old, "v": v, "v_ref": v_ref, **others}


def _values(case: str, loss: torch.Tensor, v: torch.Tensor, others: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    (gradient,) = torch.autograd.grad(loss, v)
    values = {"loss": loss, "gradient": gradient, **others}
    return {f"{name}, {case}": value.detach().double().flatten() for name, value in values.items()}


def main(checkout: Path) -> float:
    """Print and return the largest difference of a value, relative to its largest element."""
    found, expected = ours(), theirs(SimpleNamespace(folder=checkout))
    assert found.keys() == expected.keys()
    off = {
        name: float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-300))
        for name, value in expected.items()
    }
    print(f"FlowGRPO, {len(off)} values: largest relative difference {max(off.values()):.1e}")
    return max(off.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clone", type=Path, help=f"clone of {REPOSITORY}")
    main(parser.parse_args().clone)
