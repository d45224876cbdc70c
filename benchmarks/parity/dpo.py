"""Diffusion-DPO's loss, gradient and figures, against SalesforceAIResearch/DiffusionDPO."""

from types import SimpleNamespace
from typing import Any

import torch
from solrl_trainer.algorithms.algorithm import Velocities
from solrl_trainer.algorithms.dpo import DiffusionDpo, DpoSettings
from solrl_trainer.algorithms.training_data import ForwardBatch

from parity.published import Published, Values, normals, values_of

REPOSITORY = "https://github.com/SalesforceAIResearch/DiffusionDPO"
_SCRIPT = ("train.py",)
_PAIRS = 6
CASES = {f"beta {beta:g}": beta for beta in (2.0, 2000.0, 5000.0)}
_FIGURES = {
    "accuracy": "implicit_acc",
    "margin": "inside_term",
    "error": "raw_model_loss",
    "reference_error": "raw_ref_loss",
}


def ours(beta: float) -> Values:
    given = fixed_inputs()
    v, x0, noise = given["v"].requires_grad_(), given["x0"], given["noise"]
    t = torch.full((2 * _PAIRS,), 0.5, dtype=torch.float64)
    batch = ForwardBatch((x0 + noise) / 2, t, torch.tensor([1.0, -1.0]).repeat(_PAIRS), x0, noise)
    loss = DiffusionDpo(DpoSettings(beta=beta)).loss(batch, Velocities(v, {"reference": given["v_ref"]}))
    return values_of(loss.value, v, {name: loss.figures[name] for name in _FIGURES})


def theirs(published: Published, beta: float) -> Values:
    """Values of the authors' code, in which all better samples precede all worse ones."""
    halves = torch.arange(2 * _PAIRS).view(-1, 2).T.flatten()
    given = fixed_inputs()
    v, reference = given["v"].requires_grad_(), SimpleNamespace(sample=given["v_ref"][halves])
    names: dict[str, Any] = {
        "torch": torch,
        "F": torch.nn.functional,
        "args": SimpleNamespace(beta_dpo=beta),
        "model_pred": v[halves],
        "target": (given["noise"] - given["x0"])[halves],
        "ref_unet": lambda **arguments: reference,
        "model_batch_args": (),
        "added_cond_kwargs": None,
    }
    names = published.run_statements(_SCRIPT, "model_losses", "loss", names)
    return values_of(names["loss"], v, {ours: names[theirs].mean() for ours, theirs in _FIGURES.items()})


def fixed_inputs() -> dict[str, torch.Tensor]:
    """Predictions, latents and noise in float64 [12, 2, 2, 1]; better and worse samples alternate."""
    rows = (2 * _PAIRS, _PAIRS, 2 * _PAIRS, 2 * _PAIRS)
    x0, noise, change, another = normals(sum(rows), 2, 2, 1).split(rows)
    noise = noise.repeat_interleave(2, 0)
    v_ref = noise - x0 + 0.3 * change
    return {"x0": x0, "noise": noise, "v_ref": v_ref, "v": v_ref + 1e-3 * another}
