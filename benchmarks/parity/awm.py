"""AWM's advantages, loss, gradient and figures, against scxue/advantage_weighted_matching.

The authors' training step, from the forward passes to the loss, runs on fixed velocities.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from solrl_trainer.algorithms import awm
from solrl_trainer.algorithms.algorithm import FixedPolicy, Velocities
from solrl_trainer.algorithms.awm import Awm, AwmSettings
from solrl_trainer.algorithms.training_data import ForwardBatch

from parity.published import Published, Values, normals, values_of

REPOSITORY = "https://github.com/scxue/advantage_weighted_matching"
_SCRIPT = ("advantage_weighted_matching/scripts/train_sd3_awm.py",)
_TRACKER = ("advantage_weighted_matching/flow_grpo/stat_tracking.py",)
_PROMPTS, _KEPT, _TIMES = 2, 2, 3
_SAMPLES = _PROMPTS * _KEPT
_ROWS = _SAMPLES * _TIMES


def _uniform(error: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The authors' plainest log-probability. Its ratios go far enough to be clipped."""
    return -error


CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "power": {"POWER": 0.4},
    "clipped ratios": {"log_prob": _uniform, "RATIO_CLIP": 0.02},
    "clipped advantages": {"adv_clip": 0.5, "ADV_MAX": 2.0, "global_std": False},
    "distances": {"kl_weight": 0.7, "OLD_KL_WEIGHT": 0.3},
}
"""Settings of each comparison, and names of the algorithm's module with other values."""
_FIGURES = {"kl": "kl_loss", "old_distance": "ema_kl_loss", "clipped": "clipfrac"}


@contextmanager
def _settings(case: Mapping[str, Any]) -> Iterator[AwmSettings]:
    """The case's settings; the module's names have its other values within the block."""
    others = {name: value for name, value in case.items() if hasattr(awm, name)}
    with patch.multiple(awm, **others) if others else nullcontext():
        yield AwmSettings(**{name: value for name, value in case.items() if name not in others})


def ours(case: Mapping[str, Any]) -> Values:
    with _settings(case) as settings:
        return _our_values(settings)


def _our_values(settings: AwmSettings) -> Values:
    given = fixed_inputs()
    algorithm = Awm(settings)
    advantages = algorithm.advantages(given["rewards"]).flatten().repeat(_TIMES)
    v = given["v"].requires_grad_()
    batch = ForwardBatch(given["x_t"], given["t"], advantages, given["x0"], given["noise"])
    fixed: dict[FixedPolicy, torch.Tensor] = {"old": given["v_old"], "reference": given["v_ref"]}
    loss = algorithm.loss(batch, Velocities(v, fixed))
    return values_of(loss.value, v, {name: loss.figures[name] for name in _FIGURES})


def theirs(published: Published, case: Mapping[str, Any]) -> Values:
    """Values of the authors' training step."""
    with _settings(case) as settings:
        return _their_values(published, settings)


def _their_values(published: Published, settings: AwmSettings) -> Values:
    given = fixed_inputs()
    names: dict[str, Any] = {"torch": torch, "np": np, "autocast": nullcontext, "i": 0}
    names["accelerator"] = SimpleNamespace(is_main_process=False, backward=lambda loss: None)
    names |= published.definitions(_SCRIPT, ["compute_log_prob_awm"], names)
    names |= published.definitions(_TRACKER, ["PerPromptStatTracker"], names)
    prompts = [f"prompt {prompt}" for prompt in range(_PROMPTS) for _ in range(_KEPT)]
    rewards = given["rewards"].reshape(-1, 1).numpy()
    t, x0, noise = given["t"].view(-1, 1, 1, 1), given["x0"], given["noise"]
    sample = {
        "advantages": torch.as_tensor(names["PerPromptStatTracker"](settings.global_std).update(prompts, rewards)),
        "timesteps": t,
        "train_random_noise": noise,
        "clean_latents": x0,
    }
    transformer, config = _Transformer(given), SimpleNamespace(train=_their_settings(settings))
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
    names = published.run_statements(_SCRIPT, "timesteps", "accelerator.backward(loss)", names)
    return values_of(names["loss"], given["v"], {ours: info[theirs][0] for ours, theirs in _FIGURES.items()})


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


def _their_settings(settings: AwmSettings) -> SimpleNamespace:
    return SimpleNamespace(
        cfg=False,
        off_policy=True,
        loss_type="exp_first",
        train_timesteps=_TIMES,
        batch_size=_SAMPLES,
        weighting="Uniform" if awm.log_prob is _uniform else "ghuber",
        ghuber_power=awm.POWER,
        adv_clip_max=settings.adv_clip,
        advantage_max=awm.ADV_MAX,
        clip_range=awm.RATIO_CLIP,
        beta=settings.kl_weight,
        kl_weight="Uniform",
        ema_beta=awm.OLD_KL_WEIGHT,
        kl_ema_weight="Uniform",
    )


def fixed_inputs() -> dict[str, torch.Tensor]:
    """Velocities, latents, noise and noise levels in float64 [12, 2, 2, 1] and [12], and rewards [2, 2].

    The rows are every sample at the first noise level, then every sample at the second, and so on.
    """
    rows = (_SAMPLES, _ROWS, _ROWS, _ROWS, _ROWS)
    x0, noise, *changes = normals(sum(rows), 2, 2, 1).split(rows)
    x0 = x0.repeat(_TIMES, 1, 1, 1)
    v_old = noise - x0 + 0.3 * changes[0]
    v, v_ref = v_old + 0.05 * changes[1], v_old + 0.1 * changes[2]
    t = torch.tensor([1.0, 0.8, 0.35], dtype=torch.float64).repeat_interleave(_SAMPLES)
    at = t.view(-1, 1, 1, 1)
    rewards = torch.tensor([[0.2, 0.9], [0.5, 0.4]], dtype=torch.float64)
    points = {"x0": x0, "noise": noise, "t": t, "x_t": (1 - at) * x0 + at * noise}
    return points | {"v": v, "v_old": v_old, "v_ref": v_ref, "rewards": rewards}
