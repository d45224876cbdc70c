"""Sections of a run's settings: the adapter, its optimiser, and the policies that follow it."""

import math
import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from solrl_trainer.algorithms.section import Positive, Section


class Lora(Section):
    """Shape of the adapter, which has Gaussian initialisation."""

    rank: Positive = 32
    """Rank of each layer's update."""
    alpha: Annotated[float, Field(gt=0)] = 64.0
    """Each layer's update is scaled by alpha / rank."""
    targets: str | None = None
    """Regular expression of whole dotted names of layers, as PEFT's target_modules, among the family's; null: all."""

    @field_validator("targets")
    @classmethod
    def _is_an_expression(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"{value!r} is no regular expression: {error}; expected one") from error
        return value


class Optimizer(Section):
    """AdamW, and the size of its steps."""

    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    """Learning rate, after warm-up and before decay."""
    warmup_iterations: Annotated[int, Field(ge=0)] = 0
    """Iterations of the learning rate's linear rise."""
    cosine_iterations: Positive | Literal["all"] | None = None
    """Iterations until the learning rate is 0, along half a cosine after warm-up. all: the run's; null: it is
    constant."""
    cosine_power: Annotated[float, Field(gt=0)] = 1.0
    """Power of the cosine's factor; above 1, the learning rate falls sooner."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW's second beta; if smaller, steps follow growing gradients sooner."""
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    """AdamW's weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm."""
    updates: Positive = 1
    """Optimiser steps per iteration."""
    batch: Positive = 16
    """Samples per backward pass."""
    activation_checkpointing: bool | Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Transformer blocks that recompute activations in the backward pass, which is slower: true for all, false for
    none, or a number. auto: the fewest that fit the GPU; none on a CPU."""
    shard_base: bool | Literal["auto"] = "auto"
    """Spread the frozen base over the ranks, which is slower. auto: if it does not fit one GPU."""
    encoders: Literal["auto", "gpu", "cpu"] = "auto"
    """Where text encoders wait; from cpu, they move to the GPU once per iteration. auto: cpu if the run would else not
    fit, or recompute more blocks."""

    def rate(self, iteration: int) -> float:
        """Learning rate of an iteration, from 0."""
        warmup, end = self.warmup_iterations, self.cosine_iterations
        assert end != "all", "a run's settings have the number"
        if iteration < warmup:
            return self.learning_rate * (iteration + 1) / warmup
        if end is None:
            return self.learning_rate
        factor = (1 + math.cos(math.pi * (iteration - warmup) / (end - warmup))) / 2
        return self.learning_rate * math.pow(factor, self.cosine_power)


class PolicySettings(Section):
    """Settings of the behaviour policy and the evaluation weights, which both follow the trained policy."""

    decay_rate: Annotated[float, Field(ge=0)] = 0.001
    """After iteration s, from 1, the behaviour policy old ← d·old + (1 − d)·current with d = min(decay_rate · max(s −
    decay_flat, 0), decay_max)."""
    decay_max: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Largest d; 0: the behaviour policy becomes the current one after each iteration."""
    decay_flat: Annotated[int, Field(ge=0)] = 0
    """d remains 0 up to this s."""
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Largest decay of the averaged evaluation weights, which is (1 + i) / (10 + i) in early iterations i, from 0."""
