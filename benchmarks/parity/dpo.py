"""Diffusion-DPO's loss, gradient and figures, against its authors' code: `python benchmarks/parity/dpo.py CLONE`.

The authors' statements from the predictions to the loss are read from the clone and run on fixed predictions.
"""

import argparse
import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from solrl_trainer.algorithms.base import Velocities
from solrl_trainer.algorithms.dpo import DiffusionDpo, DpoSettings
from solrl_trainer.algorithms.training_data import ForwardBatch

REPOSITORY = "https://github.com/SalesforceAIResearch/DiffusionDPO"
_SCRIPT = "train.py"
_PAIRS = 6
BETAS = (2.0, 2000.0, 5000.0)
_FIGURES = {
    "accuracy": "implicit_acc",
    "margin": "inside_term",
    "error": "raw_model_loss",
    "reference_error": "raw_ref_loss",
}


class Clone(Protocol):
    """A clone of the authors' repository; `folder` is its root."""

    @property
    def folder(self) -> Path: ...


def ours() -> dict[str, torch.Tensor]:
    """Values of this project."""
    values: dict[str, torch.Tensor] = {}
    for beta in BETAS:
        given = fixed_inputs()
        v, x0, noise = given["v"].requires_grad_(), given["x0"], given["noise"]
        t = torch.full((2 * _PAIRS,), 0.5, dtype=torch.float64)
        batch = ForwardBatch((x0 + noise) / 2, t, torch.tensor([1.0, -1.0]).repeat(_PAIRS), x0, noise)
        loss = DiffusionDpo(DpoSettings(beta=beta)).loss(batch, Velocities(v, {"reference": given["v_ref"]}))
        values |= _values(beta, loss.value, v, {name: torch.as_tensor(loss.figures[name]) for name in _FIGURES})
    return values


def theirs(published: Clone) -> dict[str, torch.Tensor]:
    """Values of the authors' code, in which all better samples precede all worse ones."""
    statements = _loss_statements(ast.parse((published.folder / _SCRIPT).read_text(encoding="utf-8")))
    halves = torch.arange(2 * _PAIRS).view(-1, 2).T.flatten()
    values: dict[str, torch.Tensor] = {}
    for beta in BETAS:
        given = fixed_inputs()
        v, reference = given["v"].requires_grad_(), SimpleNamespace(sample=given["v_ref"][halves])
        names: dict[str, Any] = {
            "torch": torch,
            "F": torch.nn.functional,
            "args": SimpleNamespace(beta_dpo=beta),
            "model_pred": v[halves],
            "target": (given["noise"] - given["x0"])[halves],
            "ref_unet": lambda reference=reference, **arguments: reference,
            "model_batch_args": (),
            "added_cond_kwargs": None,
        }
        exec(compile(ast.Module(statements, []), _SCRIPT, "exec"), names)
        values |= _values(beta, names["loss"], v, {ours: names[theirs].mean() for ours, theirs in _FIGURES.items()})
    return values


def _loss_statements(tree: ast.Module) -> list[ast.stmt]:
    """The branch of the training step that computes the DPO loss."""
    first = "model_losses ="
    branches = [node.body for node in ast.walk(tree) if isinstance(node, ast.If)]
    (found,) = (body for body in branches if ast.unparse(body[0]).startswith(first))
    return found


def fixed_inputs() -> dict[str, torch.Tensor]:
    """Predictions, latents and noise in float64 [12, 2, 2, 1]; better and worse samples alternate."""
    random = np.random.RandomState(0)  # its stream is the same in every version of numpy

    def normal(rows: int = 2 * _PAIRS) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal((rows, 2, 2, 1)))

    x0, noise = normal(), normal(_PAIRS).repeat_interleave(2, 0)
    v_ref = noise - x0 + 0.3 * normal()
    return {"x0": x0, "noise": noise, "v_ref": v_ref, "v": v_ref + 1e-3 * normal()}


def _values(
    beta: float, loss: torch.Tensor, v: torch.Tensor, figures: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    (gradient,) = torch.autograd.grad(loss, v)
    values = {"loss": loss, "gradient": gradient, **figures}
    return {f"{name}, beta {beta:g}": value.detach().double().flatten() for name, value in values.items()}


def main(checkout: Path) -> float:
    """Print and return the largest difference of a value, relative to its largest element."""
    found, expected = ours(), theirs(SimpleNamespace(folder=checkout))
    assert found.keys() == expected.keys()
    off = {name: float((found[name] - value).abs().max() / value.abs().max()) for name, value in expected.items()}
    print(f"Diffusion-DPO, {len(off)} values: largest relative difference {max(off.values()):.1e}")
    return max(off.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clone", type=Path, help=f"clone of {REPOSITORY}")
    main(parser.parse_args().clone)
