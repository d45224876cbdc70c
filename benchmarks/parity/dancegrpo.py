"""DanceGRPO's steps, advantages and loss, against its code: `python benchmarks/parity/dancegrpo.py CLONE`.

The authors' step with log-probabilities, and the parts of their training step that compute advantages and loss, are
read from the clone and run on fixed tensors.
"""

import argparse
import ast
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from solrl_core.sde import DanceSde
from solrl_trainer.algorithms.base import Velocities
from solrl_trainer.algorithms.dancegrpo import DanceGrpo, DanceGrpoSettings
from solrl_trainer.algorithms.training_data import TrajectoryBatch

REPOSITORY = "https://github.com/XueZeyue/DanceGRPO"
_SCRIPT = "fastvideo/train_grpo_flux.py"
_STEPS = (0, 1, 4, 9)
"""Steps of a schedule of twelve, of one sample each."""
CASES: dict[str, dict[str, Any]] = {
    "scripts": {},
    "wide": {"clip_range": 0.1, "eta": 0.7},
    "clipped advantages": {"clip_range": 0.2, "adv_clip": 0.5},
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
        given, settings = fixed_inputs(), DanceGrpoSettings(recompute=False, **chosen)
        algorithm, solver = DanceGrpo(settings), DanceSde(settings.eta)
        levels = given["sigmas"].double()
        sigma, sigma_next = levels[list(_STEPS)], levels[[step + 1 for step in _STEPS]]
        x, x_next, v = given["x"], given["x_next"], given["v"].requires_grad_()
        log_prob = solver.log_prob(x, sigma, sigma_next, given["v_old"], x_next)
        current = solver.log_prob(x, sigma, sigma_next, given["v"], x_next)
        advantages = algorithm.advantages(given["rewards"])
        batch = TrajectoryBatch(x, sigma.float(), given["advantages"], x_next, sigma, sigma_next, log_prob, solver)
        loss = algorithm.loss(batch, Velocities(v, {}))
        steps = {"log probability": log_prob, "current log probability": current, "advantages": advantages}
        values |= _values(case, loss.value, v, steps)
    return values


def theirs(published: Clone) -> dict[str, torch.Tensor]:
    """Values of the authors' code."""
    tree = ast.parse((published.folder / _SCRIPT).read_text(encoding="utf-8"))
    values: dict[str, torch.Tensor] = {}
    for case, chosen in CASES.items():
        given, settings = fixed_inputs(), DanceGrpoSettings(**chosen)
        names: dict[str, Any] = {"torch": torch, "math": math, "_": 0, "train_timesteps": 1}
        names["args"] = SimpleNamespace(num_generations=given["rewards"].shape[1], gradient_accumulation_steps=1)
        names |= {"clip_range": settings.clip_range, "adv_clip_max": settings.adv_clip}
        _run([node for node in tree.body if getattr(node, "name", None) == "flux_step"], names)
        names["samples"] = {"rewards": given["rewards"].flatten()}
        _run(_between(tree, "n", "samples['advantages']"), names)
        v = given["v"].requires_grad_()
        old, current = (
            _their_log_prob(names["flux_step"], velocity, given, settings) for velocity in (given["v_old"], v)
        )
        advantages = names["samples"]["advantages"]
        names |= {"new_log_probs": current, "sample": {"advantages": given["advantages"], "log_probs": old[:, None]}}
        _run(_between(tree, "advantages", "loss"), names)
        steps = {"log probability": old, "current log probability": current, "advantages": advantages}
        values |= _values(case, names["loss"], v, steps)
    return values


def _their_log_prob(
    step: Any, velocity: torch.Tensor, given: dict[str, torch.Tensor], settings: DanceGrpoSettings
) -> torch.Tensor:
    rows = [slice(row, row + 1) for row in range(len(_STEPS))]
    return torch.cat(
        [
            step(
                *(velocity[row], given["x"][row], settings.eta, given["sigmas"], at, given["x_next"][row]),
                grpo=True,
                sde_solver=True,
            )[2]
            for row, at in zip(rows, _STEPS, strict=True)
        ]
    )


def _between(tree: ast.Module, first: str, last: str) -> Sequence[ast.stmt]:
    """Consecutive statements of the training step, by the targets of the first and the last assignment."""
    (function,) = (node for node in tree.body if getattr(node, "name", None) == "train_one_step")
    for node in ast.walk(function):
        body: list[ast.stmt] = getattr(node, "body", [])
        targets = [ast.unparse(one.targets[0]) if isinstance(one, ast.Assign) else None for one in body]
        if node is not function and first in targets and last in targets:
            return body[targets.index(first) : targets.index(last) + 1]
    raise LookupError(f"{_SCRIPT} has no statements from {first!r} to {last!r}; expected a clone of {REPOSITORY}")


def _run(statements: Sequence[ast.stmt], names: dict[str, Any]) -> None:
    exec(compile(ast.Module(list(statements), []), _SCRIPT, "exec"), names)


def fixed_inputs() -> dict[str, torch.Tensor]:
    """Steps and velocities of four samples, float32 [4, 2, 3, 3], noise levels, rewards of a prompt, and advantages."""
    random = np.random.RandomState(0)  # its stream is the same in every version of numpy

    def normal() -> torch.Tensor:
        return torch.from_numpy(random.standard_normal((4, 2, 3, 3))).float()

    x, v_old = normal(), normal()
    x_next = x - 0.08 * v_old + 0.1 * normal()
    # The advantages of the loss do not sum to 0: otherwise it is small, and its rounding relatively large.
    others = {"rewards": torch.tensor([[0.2, 0.9, 0.55, 0.4]]), "advantages": torch.tensor([1.3, -0.4, 0.8, 2.0])}
    times = torch.linspace(1, 0, 13)
    sigmas = 3 * times / (1 + 2 * times)
    return {"x": x, "x_next": x_next, "v_old": v_old, "v": v_old + normal(), "sigmas": sigmas, **others}


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
    print(f"DanceGRPO, {len(off)} values: largest relative difference {max(off.values()):.1e}")
    return max(off.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clone", type=Path, help=f"clone of {REPOSITORY}")
    main(parser.parse_args().clone)
