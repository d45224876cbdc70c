"""Training loop of the recipe: AdamW, warm-up, cosine decay, averaged weights, and a limit in steps or seconds."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Budget:
    """Length and batch size of a training.

    Attributes:
        steps: optimiser steps.
        batch: examples per step.
        pool: size of the training set, drawn once at the start; 0 if examples are drawn at each step.
        seconds: wall-clock limit. The learning rate reaches its end by then.
    """

    steps: int
    batch: int
    pool: int
    seconds: float = math.inf


@dataclass(frozen=True)
class Rates:
    """Settings of AdamW; `average` is the decay of the averaged weights that training returns, 0 for none."""

    rate: float
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    average: float = 0.0


@dataclass(frozen=True)
class Speed:
    """What makes a training faster on a GPU: a compiled transformer, CUDA graphs, bfloat16."""

    compiled: bool = False
    graphed: bool = False
    mixed: bool = True


EAGER = Speed()

SNAPSHOTS = (30, 50, 70, 85)
"""Percentages of a training at which it hands out its averaged weights, for a choice of how good a model is."""
Snapshot = Callable[[int, Sequence[torch.Tensor]], None]
"""(percentage of the training, averaged weights in the order of the parameters)."""


def fit(
    name: str,
    parameters: Sequence[torch.nn.Parameter],
    loss: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    budget: Budget,
    rates: Rates,
    graphed: bool = False,
    snapshot: Snapshot | None = None,
) -> list[float]:
    """Minimise `loss` over `parameters`, in place.

    Args:
        name: name in the progress lines.
        parameters: parameters to train.
        loss: draws a batch; returns (value to minimise, value to log).
        budget: length of the training.
        rates: settings of the optimiser.
        graphed: record a step once and replay it as a CUDA graph: many times faster if a step is bound by the CPU.
            `loss` must then not depend on the step and not wait for the GPU.
        snapshot: called at each percentage of `SNAPSHOTS`.

    Returns:
        The logged value of each step.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    averaged = [p.detach().clone() for p in parameters]
    device = parameters[0].device
    on_cuda = device.type == "cuda"
    rate = torch.tensor(0.0, device=device) if on_cuda else 0.0
    optimizer = torch.optim.AdamW(
        parameters, rate, rates.betas, weight_decay=rates.weight_decay, fused=on_cuda, capturable=on_cuda
    )

    def step_once() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        value, log_value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return log_value.detach()

    run = _recorded(step_once) if graphed and on_cuda else step_once
    logged: list[torch.Tensor] = []
    warm_up = min(500, budget.steps / 20)
    left = list(SNAPSHOTS) if snapshot else []
    start = time.monotonic()
    for step in range(budget.steps):
        if step == 1:
            start = time.monotonic()  # the first step compiles
        elapsed = time.monotonic() - start
        progress = max(step / budget.steps, elapsed / budget.seconds if step else 0.0)
        if progress >= 1:
            break
        if snapshot and left and 100 * progress >= left[0]:
            snapshot(left.pop(0), averaged)
        now = rates.rate * min(1.0, (step + 1) / warm_up) * cosine(progress)
        if isinstance(rate, torch.Tensor):
            rate.fill_(now)
        else:
            optimizer.param_groups[0]["lr"] = now
        logged.append(run().clone())
        decay = min(rates.average, (step + 1) / (step + 20))
        if rates.average:
            torch._foreach_lerp_(averaged, [p.detach() for p in parameters], 1 - decay)
        if step % 500 == 0 or step in (20, 100):
            print(f"{name} step {step} of {budget.steps}: {float(logged[-1]):.5f}, {elapsed:.1f} s", flush=True)
            if not math.isfinite(float(logged[-1])):
                raise FloatingPointError(f"{name}: the loss is {float(logged[-1])} at step {step}; nothing was saved")
    if rates.average:
        with torch.no_grad():
            for parameter, average in zip(parameters, averaged, strict=True):
                parameter.copy_(average)
    return torch.stack(logged).tolist()


def _recorded(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Record `step` as a CUDA graph, after a few eager runs at the current learning rate."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        log_value = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return log_value

    return replay


def cosine(progress: float) -> float:
    """Factor on the learning rate: decays from 1 to 0.01 as `progress` goes from 0 to 1."""
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress))
