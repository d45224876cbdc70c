"""The policies of a run on one transformer: current (trained), old (behaviour) and reference (no adapter)."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from solrl_core.adapter import Adapter, lora_a_key, lora_b_key
from solrl_core.families import Backbone
from solrl_core.lora import adapter_layout
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from solrl_trainer.policy.lora import chosen_layers, inject
from solrl_trainer.settings.training_sections import Lora, PolicySettings

CURRENT, OLD = "current", "old"
_WITHOUT_GRADIENT = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Kernels that torch may choose from in passes without gradient."""


class CheckpointWrapper(nn.Module):
    """A transformer block in training, compiled on a GPU.

    Attributes:
        checkpointed: activation checkpointing: the backward pass recomputes activations, which are not kept.
        discarding: the block runs in gradient mode, but its graph is discarded. A compiler fuses a pass without
            gradient differently, and equal weights would then give different numbers.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.checkpointed = False
        self.discarding = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return value of the block."""
        if self.discarding:
            with torch.enable_grad():
                return tree_map(_detached, self.block(*args, **kwargs))
        if self.checkpointed and torch.is_grad_enabled():
            return checkpoint(self.block, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        return self.block(*args, **kwargs)


def wrap_blocks(transformer: nn.Module, backbone: Backbone) -> list[CheckpointWrapper]:
    """Wrap each block in a `CheckpointWrapper`, in place; return these in execution order."""
    blocks = []
    for name in backbone.blocks:
        parent = transformer.get_submodule(name)
        for index, block in list(parent.named_children()):
            blocks.append(CheckpointWrapper(block))
            setattr(parent, index, blocks[-1])
    return blocks


def _detached(x: Any) -> Any:
    """A tensor without its graph but with its `requires_grad`, which selects compiled code, too."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


class Policy:
    """LoRA adapters injected into a backbone's frozen transformer.

    On a GPU its blocks are compiled, and the current and the old policy run through the same graphs: equal adapters
    give equal velocities, bit for bit.

    Attributes:
        transformer: the trained transformer.
        layers: its adapted layers, by name.
        blocks: blocks of the trained transformer, in execution order.
        parameters: the current policy's LoRA weights, float32, in the order of their names.
    """

    def __init__(self, backbone: Backbone, lora: Lora, seed: int) -> None:
        self._lora = lora
        self.transformer = backbone.transformer
        self._on_gpu = backbone.device.type == "cuda"
        full_layout = adapter_layout(self.transformer, backbone.lora_targets)
        chosen = chosen_layers(self.transformer, backbone.lora_targets, lora.targets)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = inject(self.transformer, chosen, lora.rank, lora.alpha, backbone.device)
        self._others = {
            key: zeros
            for module, (rows, columns) in full_layout.items()
            if module not in layers
            for key, zeros in (
                (lora_a_key(module), torch.zeros(lora.rank, columns)),
                (lora_b_key(module), torch.zeros(rows, lora.rank)),
            )
        }
        self.layers = layers
        self._weights: dict[str, dict[str, torch.nn.Parameter]] = {CURRENT: {}, OLD: {}}
        for module, layer in layers.items():
            for name, pair in ((CURRENT, layer.current), (OLD, layer.old)):
                self._weights[name] |= {lora_a_key(module): pair.a, lora_b_key(module): pair.b}
        self.averaged = self.tensors(CURRENT)
        self.parameters = list(self._weights[CURRENT].values())
        if self._on_gpu:
            backbone.compile(self.transformer)
        self.blocks = wrap_blocks(self.transformer, backbone)

    def checkpoint_activations(self, blocks: int) -> None:
        """Use activation checkpointing in the first `blocks` blocks: the backward pass recomputes their activations.

        It frees the last blocks' activations first, which makes room for recomputed ones.
        """
        for index, block in enumerate(self.blocks):
            block.checkpointed = index < blocks

    def _activate(self, name: Literal["current", "old"] | None) -> None:
        for layer in self.layers.values():
            layer.active = None if name is None else getattr(layer, name)
        for block in self.blocks:
            block.discarding = self._on_gpu and name == OLD

    @contextmanager
    def old(self) -> Iterator[None]:
        """Make the transformer the behaviour policy within the block, without gradient."""
        self._activate("old")
        try:
            with torch.no_grad():
                yield
        finally:
            self._activate("current")

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Make `transformer` the base model within the block, without gradient."""
        self._activate(None)
        try:
            with torch.no_grad(), sdpa_kernel(_WITHOUT_GRADIENT) if self._on_gpu else nullcontext():
                yield
        finally:
            self._activate("current")

    def is_behaviour(self) -> bool:
        """Whether both policies have equal weights, as before an iteration's first optimiser step without decay."""
        pairs = zip(self.parameters, self._weights[OLD].values(), strict=True)
        return bool(torch.stack([(current == old).all() for current, old in pairs]).all())

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """A copy of one adapter's weights on the CPU, by PEFT key."""
        return {key: weight.detach().to("cpu", copy=True) for key, weight in self._weights[name].items()}

    @torch.no_grad()
    def restore(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Set one adapter's weights."""
        for key, weight in self._weights[name].items():
            weight.copy_(tensors[key])

    def start_from(self, tensors: dict[str, torch.Tensor]) -> None:
        """Set the weights of all policies before the first step."""
        for name in (CURRENT, OLD):
            self.restore(name, tensors)
        self.averaged = self.tensors(CURRENT)

    def decay_and_average(self, iteration: int, settings: PolicySettings) -> None:
        """Move the behaviour policy and the evaluation weights towards the policy that the iteration trained."""
        self.decay_old(old_decay(iteration + 1, settings))
        self.average(iteration, settings.ema)

    @torch.no_grad()
    def decay_old(self, decay: float) -> None:
        """old ← decay · old + (1 − decay) · current."""
        for key, weight in self._weights[OLD].items():
            weight.lerp_(self._weights[CURRENT][key], 1 - decay)

    @torch.no_grad()
    def average(self, count: int, ema: float) -> None:
        """Move the evaluation weights towards the current ones, with decay `average_decay(count, ema)`."""
        decay = average_decay(count, ema)
        for key, weight in self._weights[CURRENT].items():
            self.averaged[key].lerp_(weight.detach().cpu(), 1 - decay)

    def behaviour(self) -> Adapter:
        """The behaviour policy as an adapter of all layers that the family adapts, as a service wants it.

        Its tensors are the policy's own: encode or copy them before the policy changes.
        """
        return self.adapter({key: weight.detach() for key, weight in self._weights[OLD].items()} | self._others)

    def average_adapter(self) -> Adapter:
        """The evaluation weights as an adapter."""
        return self.adapter(self.averaged)

    def adapter(self, tensors: dict[str, torch.Tensor]) -> Adapter:
        """An adapter of these weights, with the run's rank and alpha."""
        return Adapter(rank=self._lora.rank, alpha=self._lora.alpha, tensors=tensors)

    def gradient_norm(self, limit: float) -> float:
        """Clip the gradient to norm `limit`; return its norm before clipping."""
        return float(torch.nn.utils.clip_grad_norm_(self.parameters, limit))


def old_decay(count: int, settings: PolicySettings) -> float:
    """Decay of the behaviour policy after `count` iterations: flat at 0, then linear, then flat."""
    return min(settings.decay_rate * max(count - settings.decay_flat, 0), settings.decay_max)


def average_decay(count: int, ema: float) -> float:
    """Decay of the evaluation weights, smaller early in the run."""
    return min(ema, (1 + count) / (10 + count))


def require_finite(value: float, what: str, where: str) -> None:
    """Stop the run at a loss or gradient that is not finite, by a FloatingPointError that names the step."""
    if not math.isfinite(value):
        raise FloatingPointError(
            f"{what} is {value} at {where}; the run stops, and its checkpoints are intact. Lower "
            "optimizer.learning_rate, or check the rewards of this iteration in metrics.jsonl; "
            "`--resume` continues from the last checkpoint"
        )
