"""Milliseconds of a training micro-batch, against a baseline: `python benchmarks/training_phase.py`, on a GPU.

The baseline has diffusers' uncompiled blocks, PEFT's layers, flash attention, and recomputes every block of FLUX.1 and
SD3.5-L. Both train the same random weights of the true shapes with the presets' settings, and are measured in turns.
Each model is measured in a separate process. Writes benchmarks/results/training_phase.{json,md}.
"""

import argparse
import copy
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from solrl_core.families import Backbone
from solrl_core.lora import target_modules
from solrl_core.sampling.device_events import DeviceEvent
from solrl_trainer.algorithms.registry import ALGORITHMS
from solrl_trainer.algorithms.training_data import TrainingSamples
from solrl_trainer.policy.policy import CURRENT, OLD, Policy
from solrl_trainer.policy.update import Updater
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import resolve
from solrl_trainer.settings.training_sections import Lora
from support.results import Row, device_name, in_turns, measure_models, table
from support.true_size import random_backbone
from torch import nn

PRESETS = {"flux": "flux1", "sd3": "sd3", "sana": "sana", "sd3-medium": "sd3-medium"}
RECOMPUTED = {"flux": True, "sd3": True, "sana": False, "sd3-medium": False}
"""Whether the baseline recomputes its blocks."""
NAMES = {"flux": "FLUX.1 512²", "sd3": "SD3.5-L 1024²", "sana": "SANA 1.6B 1024²", "sd3-medium": "SD3.5-M 512²"}
ROUNDS = 3
MICRO_BATCHES = 2
PARTS = ("reference", "old", "current", "optimizer")


class PeftPolicy:
    """The baseline's policy: PEFT's layers in diffusers' blocks, run operation by operation."""

    def __init__(self, backbone: Backbone, lora: Lora, checkpointing: bool) -> None:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        self.transformer = self.base = backbone.transformer
        if checkpointing:
            self.transformer.enable_gradient_checkpointing()  # type: ignore[operator]
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=int(lora.alpha),
            target_modules=backbone.lora_targets,
            init_lora_weights="gaussian",
        )
        self.layers = list(target_modules(self.transformer, backbone.lora_targets))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in (CURRENT, OLD):
                inject_adapter_in_model(config, self.transformer, adapter_name=name)
        self._tuners = [module for module in self.transformer.modules() if isinstance(module, BaseTunerLayer)]
        self.parameters: list[nn.Parameter] = []
        for layer in map(self.transformer.get_submodule, self.layers):
            for part in (layer.lora_A, layer.lora_B):
                self.parameters.append(part.float()[CURRENT].weight)  # type: ignore[index,union-attr,operator]
        self._activate(CURRENT)

    def is_behaviour(self) -> bool:
        """False: the baseline makes every pass."""
        return False

    def _activate(self, name: str) -> None:
        for layer in self._tuners:
            layer.set_adapter(name, inference_mode=name != CURRENT)
            layer.enable_adapters(True)

    @contextmanager
    def old(self) -> Iterator[None]:
        """Within: the transformer is the behaviour policy, without gradient."""
        self._activate(OLD)
        with torch.no_grad():
            yield
        self._activate(CURRENT)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within: the transformer is the base model, without gradient."""
        for layer in self._tuners:
            layer.enable_adapters(False)
        with torch.no_grad():
            yield
        self._activate(CURRENT)

    def gradient_norm(self, limit: float) -> float:
        """Clip the gradient to norm `limit`; return its norm before clipping."""
        return float(torch.nn.utils.clip_grad_norm_(self.parameters, limit))


class Timed:
    """An updater whose work is timed by part."""

    def __init__(self, policy: Any, backbone: Backbone, config: RunConfig) -> None:
        self.device = backbone.device
        self._marks: list[tuple[str, DeviceEvent]] = []
        for name in ("reference", "old"):
            setattr(policy, name, self._timed(name, getattr(policy, name)))
        optimizer = torch.optim.AdamW(policy.parameters, lr=config.optimizer.learning_rate)
        norm = policy.gradient_norm

        def gradient_norm(limit: float) -> float:
            self._mark("current")
            return float(norm(limit))

        policy.gradient_norm = gradient_norm
        policy.is_behaviour = lambda: False  # else the first update has no part "old"
        self.policy = policy
        algorithm = ALGORITHMS.find(config.algorithm.name)(config.algorithm)
        self.updater = Updater(backbone, policy, optimizer, algorithm, config)

    def _mark(self, part: str) -> None:
        """Count the device's work since the last mark as `part`."""
        self._marks.append((part, DeviceEvent(self.device)))

    def _timed(self, part: str, context: Callable[[], Any]) -> Callable[[], Any]:
        @contextmanager
        def within() -> Iterator[None]:
            self._mark("current")  # of the previous micro-batch
            with context():
                yield
            self._mark(part)

        return within

    def run(self, samples: TrainingSamples, iteration: int) -> dict[str, float]:
        """Milliseconds of a micro-batch, by part and in total."""
        self._marks.clear()
        self._mark("")
        self.updater.update(samples, iteration)
        self._mark("optimizer")
        self._marks[-1][1].wait()
        each = dict.fromkeys(PARTS, 0.0)
        for (_, before), (part, after) in pairwise(self._marks):
            each[part] += 1000 * after.since(before) / MICRO_BATCHES
        return each | {"all": sum(each.values())}


def main() -> None:
    measure_models("training_phase", __doc__, list(PRESETS), measure, page)


def measure(model: str, args: argparse.Namespace) -> Iterator[Row]:
    """Yield rows of the baseline and of solrl, measured in turns."""
    config = resolve(f"{PRESETS[model]}/sol_rl/hpsv2", overrides=["optimizer.updates=1"]).config
    backbone, count = random_backbone(model, args.device, config.guidance), config.optimizer.batch
    latents = torch.randn(count, *backbone.latent_shape, generator=torch.Generator().manual_seed(0))
    samples = TrainingSamples(
        latents.to(args.device),
        torch.linspace(-2, 2, count),
        backbone.encode(["a"], config.guidance),
        torch.zeros(count, dtype=torch.int64),
    )
    fraction = MICRO_BATCHES / (len(backbone.sigmas(config.regenerate.steps)) - 1)
    config = with_settings(config, {"algorithm.timestep_fraction": min(1.0, fraction + 1e-6)})
    theirs = with_settings(config, {"optimizer.activation_checkpointing": False})
    ways = {
        "baseline": Timed(PeftPolicy(beside(backbone), config.lora, RECOMPUTED[model]), backbone, theirs),
        "solrl": Timed(Policy(backbone, config.lora, config.seed), backbone, config),
    }
    works = {way: lambda turn, one=one: one.run(samples, max(0, turn)) for way, one in ways.items()}
    for way, each in in_turns(works, ROUNDS).items():
        yield {
            **{"model": model, "device": device_name(args.device), "torch": torch.__version__, "kind": "way"},
            **{"way": way, "batch": config.optimizer.batch, "rounds": each},
            **{part: statistics.median(one[part] for one in each) for part in (*PARTS, "all")},
        }


def beside(backbone: Backbone) -> Backbone:
    """The backbone with a copy of its transformer that shares all weights."""
    own = copy.copy(backbone)
    shared = (*backbone.transformer.parameters(), *backbone.transformer.buffers())
    own.transformer = copy.deepcopy(backbone.transformer, {id(tensor): tensor for tensor in shared})
    return own


def with_settings(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    raw = config.model_dump()
    for key, value in values.items():
        section, _, name = key.partition(".")
        raw[section][name] = value
    return RunConfig.model_validate(raw)


HEAD = (
    "model, micro-batch",
    "",
    "reference, ms",
    "old",
    "current, forward and backward",
    "optimizer",
    "total",
    "ratio",
)


def page(found: Mapping[str, Any]) -> str:
    rows = [row for model in NAMES for row in found["rows"] if row["model"] == model]
    baseline = {row["model"]: row["all"] for row in rows if row["way"] == "baseline"}
    lines = [
        "# A training micro-batch against diffusers and PEFT",
        "",
        f"By `python benchmarks/training_phase.py` on one {rows[0]['device']}, torch {rows[0]['torch']}: random",
        "weights of the true shapes, the presets' settings (DiffusionNFT, a BF16 reference at weight 1e-4, rank 32),",
        f"both in turns, medians of {ROUNDS} rounds of {MICRO_BATCHES} micro-batches by the GPU's clock. The baseline",
        "has diffusers' uncompiled blocks, PEFT's layers and flash attention, and recomputes every block of FLUX.1 and",
        "SD3.5-L.",
        "",
        *table(HEAD, (_cells(row, baseline[row["model"]] / row["all"]) for row in rows)),
        "",
        "The optimizer's time is half of a step: a step has two micro-batches here, and more in a run.",
    ]
    return "\n".join(lines) + "\n"


def _cells(row: Row, ratio: float) -> Sequence[str]:
    parts = (f"{row[part]:.1f}" for part in (*PARTS, "all"))
    return f"{NAMES[row['model']]}, {row['batch']}", row["way"], *parts, f"{ratio:.2f}"


if __name__ == "__main__":
    main()
