"""The one training loop of the recipe: AdamW, a warm-up, a cosine, averaged weights, and an end by steps or by time."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Budget:
    """How long and how much at a time. `seconds` ends a training early; the learning rate then ends with it.

    Attributes:
        steps: optimiser steps.
        batch: examples a step.
        pool: examples drawn once and trained on again and again.
        seconds: wall-clock limit.
    """

    steps: int
    batch: int
    pool: int
    seconds: float = math.inf


@dataclass(frozen=True)
class Rates:
    """AdamW's settings; `average` is the decay of the averaged weights that a training ends with, 0 for none."""

    rate: float
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    average: float = 0.0


def fit(
    name: str,
    parameters: Sequence[torch.nn.Parameter],
    loss: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    budget: Budget,
    rates: Rates,
    graphed: bool = False,
) -> list[float]:
    """Minimise `loss` over `parameters`, in place.

    Args:
        name: what the progress lines call it.
        parameters: what is trained.
        loss: draws a batch; returns what to minimise and what to log.
        budget: when it ends.
        rates: how it is optimised.
        graphed: whether a step is recorded once and replayed by CUDA: many times faster where the processor, not the
            GPU, is what a step waits for. `loss` must then do nothing that depends on the step or waits for the GPU.

    Returns:
        What was logged, a value a step.

    Raises:
        FloatingPointError: the loss is no longer finite.
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
        value, told = loss()
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return told.detach()

    run = _recorded(step_once) if graphed and on_cuda else step_once
    logged: list[torch.Tensor] = []
    warm_up = min(500, budget.steps / 20)
    start = time.monotonic()
    for step in range(budget.steps):
        if step == 1:
            start = time.monotonic()  # the first step compiles
        elapsed = time.monotonic() - start
        progress = max(step / budget.steps, elapsed / budget.seconds if step else 0.0)
        if progress >= 1:
            break
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
                raise FloatingPointError(f"{name}: the loss is {float(logged[-1])} at step {step}; nothing is saved")
    if rates.average:
        with torch.no_grad():
            for parameter, average in zip(parameters, averaged, strict=True):
                parameter.copy_(average)
    return torch.stack(logged).tolist()


def _recorded(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`step` as a CUDA graph, after a few plain runs at the learning rate that is set."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        told = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return told

    return replay


def cosine(progress: float) -> float:
    """Share of the learning rate, from one down to a hundredth as `progress` goes from 0 to 1."""
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress))
