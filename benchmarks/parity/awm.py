"""AWM's advantages, loss, gradient and figures, against its authors' code: `python benchmarks/parity/awm.py CLONE`.

The authors' training step, from the forward passes to the loss, is read from the clone and run on fixed velocities.
"""

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from solrl_trainer.algorithms.awm import Awm, AwmSettings
from solrl_trainer.algorithms.base import FixedPolicy, Velocities
from solrl_trainer.algorithms.training_data import ForwardBatch

REPOSITORY = "https://github.com/scxue/advantage_weighted_matching"
_SCRIPT = "advantage_weighted_matching/scripts/train_sd3_awm.py"
_TRACKER = "advantage_weighted_matching/flow_grpo/stat_tracking.py"
_PROMPTS, _KEPT, _TIMES = 2, 2, 3
_SAMPLES = _PROMPTS * _KEPT
_ROWS = _SAMPLES * _TIMES
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    **{name: {"weighting": name} for name in ("uniform", "t", "t_squared", "huber")},
    "power": {"power": 0.4},
    "elbo": {"kl_weighting": "elbo", "kl_weight": 0.5},
    "clipped ratios": {"weighting": "uniform", "ratio_clip": 0.02},
    "clipped advantages": {"adv_clip": 0.5, "adv_max": 2.0, "global_std": False},
    "distances": {"kl_weight": 0.7, "old_kl_weight": 0.3},
}
"""Settings of each comparison."""
_THEIR_NAMES = {"uniform": "Uniform", "elbo": "ELBO", "t_squared": "t**2"}
_FIGURES = {"kl": "kl_loss", "old_distance": "ema_kl_loss", "clipped": "clipfrac"}


class Clone(Protocol):
    """A clone of the authors' repository; `folder` is its root."""

    @property
    def folder(self) -> Path: ...


def ours() -> dict[str, torch.Tensor]:
    """Values of this project."""
    values: dict[str, torch.Tensor] = {}
    for case, settings in CASES.items():
        given = fixed_inputs()
        algorithm = Awm(AwmSettings(**settings))
        advantages = algorithm.advantages(given["rewards"]).flatten().repeat(_TIMES)
        v = given["v"].requires_grad_()
        batch = ForwardBatch(given["x_t"], given["t"], advantages, given["x0"], given["noise"])
        fixed: dict[FixedPolicy, torch.Tensor] = {"old": given["v_old"], "reference": given["v_ref"]}
        loss = algorithm.loss(batch, Velocities(v, fixed))
        values |= _values(case, loss.value, v, {name: torch.as_tensor(loss.figures[name]) for name in _FIGURES})
    return values


def theirs(published: Clone) -> dict[str, torch.Tensor]:
    """Values of the authors' code."""
    script, tracker = (ast.parse((published.folder / name).read_text(encoding="utf-8")) for name in (_SCRIPT, _TRACKER))
    values: dict[str, torch.Tensor] = {}
    for case, settings in CASES.items():
        loss, v, info = _their_step(script, tracker, AwmSettings(**settings))
        values |= _values(case, loss, v, {ours: info[theirs][0] for ours, theirs in _FIGURES.items()})
    return values


def _their_step(
    script: ast.Module, tracker: ast.Module, own: AwmSettings
) -> tuple[torch.Tensor, torch.Tensor, dict[str, list[torch.Tensor]]]:
    """Loss, current velocity and figures of a training step."""
    given = fixed_inputs()
    names: dict[str, Any] = {"torch": torch, "np": np, "autocast": nullcontext, "i": 0}
    names["accelerator"] = SimpleNamespace(is_main_process=False)
    _run([*_defined(script, "compute_log_prob_awm"), *_defined(tracker, "PerPromptStatTracker")], names)
    prompts = [f"prompt {prompt}" for prompt in range(_PROMPTS) for _ in range(_KEPT)]
    rewards = given["rewards"].reshape(-1, 1).numpy()
    t, x0, noise = given["t"].view(-1, 1, 1, 1), given["x0"], given["noise"]
    sample = {
        "advantages": torch.as_tensor(names["PerPromptStatTracker"](own.global_std).update(prompts, rewards)),
        "timesteps": t,
        "train_random_noise": noise,
        "clean_latents": x0,
    }
    transformer, config = _Transformer(given), SimpleNamespace(train=_their_settings(own))
    transformer.set_adapter("ema")
    old, *_ = names["compute_log_prob_awm"](
        *(transformer, None, sample, t, None, None, config, given["x_t"], x0, noise),
        weighting=config.train.weighting,
    )
    transformer.set_adapter("default")
    sample["old_log_probs"] = old.reshape(_TIMES, _SAMPLES)
    info: dict[str, list[torch.Tensor]] = defaultdict(list)
    names |= dict.fromkeys(("pipeline", "embeds", "pooled_embeds"))
    names |= {"transformer": transformer, "sample": sample, "config": config, "info": info}
    _run(_until_backward(script), names)
    return names["loss"], given["v"], info


class _Transformer:
    """Answers the forward passes of the training step with fixed velocities."""

    def __init__(self, given: dict[str, torch.Tensor]) -> None:
        self._velocities = {"default": given["v"].requires_grad_(), "ema": given["v_old"], "base": given["v_ref"]}
        self._adapter = "default"
        self.module = self

    def set_adapter(self, name: str) -> None:
        self._adapter = name

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        self._adapter = "base"
        yield
        self._adapter = "default"

    def __call__(self, **arguments: Any) -> tuple[torch.Tensor]:
        return (self._velocities[self._adapter],)


def _their_settings(own: AwmSettings) -> SimpleNamespace:
    kl = _THEIR_NAMES[own.kl_weighting]
    return SimpleNamespace(
        cfg=False,
        off_policy=True,
        loss_type="exp_first",
        train_timesteps=_TIMES,
        batch_size=_SAMPLES,
        weighting=_THEIR_NAMES.get(own.weighting, own.weighting),
        ghuber_power=own.power,
        adv_clip_max=own.adv_clip,
        advantage_max=own.adv_max,
        clip_range=own.ratio_clip,
        beta=own.kl_weight,
        kl_weight=kl,
        ema_beta=own.old_kl_weight,
        kl_ema_weight=kl,
    )


def _defined(tree: ast.Module, name: str) -> list[ast.stmt]:
    return [node for node in tree.body if getattr(node, "name", None) == name]


def _until_backward(tree: ast.Module) -> list[ast.stmt]:
    """The statements of a training step, up to the call of `accelerator.backward`."""
    (step,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.With) and ast.unparse(node.items[0]).startswith("accelerator.accumulate")
    )
    texts = [ast.unparse(statement) for statement in step.body]
    return step.body[: [text.startswith("accelerator.backward") for text in texts].index(True)]


def _run(statements: Sequence[ast.stmt], names: dict[str, Any]) -> None:
    exec(compile(ast.Module(list(statements), []), _SCRIPT, "exec"), names)


def fixed_inputs() -> dict[str, torch.Tensor]:
    """Velocities, latents, noise and noise levels in float64 [12, 2, 2, 1] and [12], and rewards [2, 2].

    The rows are every sample at the first noise level, then every sample at the second, and so on.
    """
    random = np.random.RandomState(0)  # its stream is the same in every version of numpy

    def normal(rows: int = _ROWS) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal((rows, 2, 2, 1)))

    x0, noise = normal(_SAMPLES).repeat(_TIMES, 1, 1, 1), normal()
    v_old = noise - x0 + 0.3 * normal()
    v, v_ref = v_old + 0.05 * normal(), v_old + 0.1 * normal()
    t = torch.tensor([1.0, 0.8, 0.35], dtype=torch.float64).repeat_interleave(_SAMPLES)
    at = t.view(-1, 1, 1, 1)
    rewards = torch.tensor([[0.2, 0.9], [0.5, 0.4]], dtype=torch.float64)
    points = {"x0": x0, "noise": noise, "t": t, "x_t": (1 - at) * x0 + at * noise}
    return points | {"v": v, "v_old": v_old, "v_ref": v_ref, "rewards": rewards}


def _values(
    case: str, loss: torch.Tensor, v: torch.Tensor, figures: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    (gradient,) = torch.autograd.grad(loss, v)
    values = {"loss": loss, "gradient": gradient, **figures}
    return {f"{name}, {case}": value.detach().double().flatten() for name, value in values.items()}


def main(checkout: Path) -> float:
    """Print and return the largest difference of a value, relative to its largest element."""
    found, expected = ours(), theirs(SimpleNamespace(folder=checkout))
    assert found.keys() == expected.keys()
    off = {
        name: float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-300))
        for name, value in expected.items()
    }
    print(f"AWM, {len(off)} values: largest relative difference {max(off.values()):.1e}")
    return max(off.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clone", type=Path, help=f"clone of {REPOSITORY}")
    main(parser.parse_args().clone)
