"""The policies of a run on one transformer: current (trained), old (behaviour) and reference (no adapter)."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from solrl_core.adapter import Adapter, lora_a_key, lora_b_key
from solrl_core.families import Backbone
from solrl_core.lora import target_modules

from solrl_trainer.config import Lora, PolicySettings

CURRENT, OLD = "current", "old"


class Policy:
    """LoRA adapters injected into a backbone's frozen transformer.

    Attributes:
        parameters: the current policy's LoRA weights, float32, in the order of their names.
    """

    def __init__(self, backbone: Backbone, lora: Lora, seed: int, *, checkpointing: bool = False) -> None:
        """`checkpointing`: the backward pass recomputes activations."""
        self._lora = lora
        self.transformer = backbone.transformer
        if checkpointing:
            self.transformer.enable_gradient_checkpointing()  # type: ignore[operator]
        self._modules = list(target_modules(self.transformer, backbone.lora_targets))
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type, unused-ignore]
            target_modules=backbone.lora_targets,
            init_lora_weights="gaussian",
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # two adapters are intended
            torch.manual_seed(seed)
            for name in (CURRENT, OLD):
                inject_adapter_in_model(config, self.transformer, adapter_name=name)
        self._layers = [m for m in self.transformer.modules() if isinstance(m, BaseTunerLayer)]
        self._weights = {name: self._named_weights(name) for name in (CURRENT, OLD)}
        for weights in self._weights.values():
            for weight in weights.values():
                weight.data = weight.data.float()
        self.restore(OLD, self.tensors(CURRENT))
        self.averaged = self.tensors(CURRENT)
        self._activate(CURRENT)
        self.parameters = list(self._weights[CURRENT].values())

    def _named_weights(self, name: str) -> dict[str, torch.nn.Parameter]:
        weights = {}
        for module in self._modules:
            layer = self.transformer.get_submodule(module)
            weights[lora_a_key(module)] = layer.lora_A[name].weight  # type: ignore[index, union-attr]
            weights[lora_b_key(module)] = layer.lora_B[name].weight  # type: ignore[index, union-attr]
        return weights

    def _activate(self, name: str) -> None:
        for layer in self._layers:
            layer.set_adapter(name, inference_mode=name != CURRENT)
            layer.enable_adapters(True)

    @contextmanager
    def old(self) -> Iterator[None]:
        """Make the transformer the behaviour policy within the block, without gradient."""
        self._activate(OLD)
        try:
            with torch.no_grad():
                yield
        finally:
            self._activate(CURRENT)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Make the transformer the base model within the block, without gradient."""
        for layer in self._layers:
            layer.enable_adapters(False)
        try:
            with torch.no_grad():
                yield
        finally:
            self._activate(CURRENT)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """A copy of one adapter's weights on the CPU, by PEFT key."""
        return {key: weight.detach().cpu().clone() for key, weight in self._weights[name].items()}

    @torch.no_grad()
    def restore(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Set one adapter's weights."""
        for key, weight in self._weights[name].items():
            weight.copy_(tensors[key])

    def decay_and_average(self, iteration: int, settings: PolicySettings) -> None:
        """Move the behaviour policy and the evaluation weights towards the policy that the iteration trained."""
        self.decay_old(min(settings.decay_rate * (iteration + 1), settings.decay_max))
        self.average(iteration, settings.ema)

    @torch.no_grad()
    def decay_old(self, decay: float) -> None:
        """old ← decay · old + (1 − decay) · current."""
        for key, weight in self._weights[OLD].items():
            weight.lerp_(self._weights[CURRENT][key], 1 - decay)

    @torch.no_grad()
    def average(self, iteration: int, ema: float) -> None:
        """Move the evaluation weights towards the current ones, faster in early iterations: by (1 + i) / (10 + i)."""
        decay = min(ema, (1 + iteration) / (10 + iteration))
        for key, weight in self._weights[CURRENT].items():
            self.averaged[key].lerp_(weight.detach().cpu(), 1 - decay)

    def behaviour(self) -> Adapter:
        """The behaviour policy as an adapter."""
        return self.adapter(self.tensors(OLD))

    def average_adapter(self) -> Adapter:
        """The evaluation weights as an adapter."""
        return self.adapter(self.averaged)

    def adapter(self, tensors: dict[str, torch.Tensor]) -> Adapter:
        """An adapter of these weights, with the run's rank and alpha."""
        return Adapter(rank=self._lora.rank, alpha=self._lora.alpha, tensors=tensors)

    def gradient_norm(self, limit: float) -> float:
        """Clip the gradient to norm `limit`; its norm before clipping."""
        return float(torch.nn.utils.clip_grad_norm_(self.parameters, limit))


def require_finite(value: float, what: str, where: str) -> None:
    """Stop the run at a loss or gradient that is not finite.

    Raises:
        FloatingPointError: the value is not finite; names the step.
    """
    if not math.isfinite(value):
        raise FloatingPointError(
            f"{what} is {value} at {where}; the run stops before it changes any weight. Lower "
            "optimizer.learning_rate, or look at the rewards of this iteration in metrics.jsonl; "
            "`--resume` continues from the last checkpoint"
        )
