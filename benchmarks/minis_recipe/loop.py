"""Training loop of the recipe: AdamW, warm-up, cosine decay, averaged weights."""

import math
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
    """

    steps: int
    batch: int
    pool: int


@dataclass(frozen=True)
class Rates:
    """Settings of AdamW; `average` is the decay of the averaged weights that training returns, 0 for none."""

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
        name: name in the progress lines.
        parameters: parameters to train.
        loss: draws a batch; returns (value to minimise, value to log).
        budget: length of the training.
        rates: settings of the optimiser.
        graphed: on a GPU, record a step once and replay it as a CUDA graph: many times faster if a step is bound by the
            CPU. `loss` must then not depend on the step and not wait for the GPU.

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
    for step in range(budget.steps):
        now = rates.rate * min(1.0, (step + 1) / warm_up) * cosine(step / budget.steps)
        if isinstance(rate, torch.Tensor):
            rate.fill_(now)
        else:
            optimizer.param_groups[0]["lr"] = now
        logged.append(run().clone())
        decay = min(rates.average, (step + 1) / (step + 20))
        if rates.average:
            torch._foreach_lerp_(averaged, [p.detach() for p in parameters], 1 - decay)
        if step % 500 == 0 or step in (20, 100):
            print(f"{name} step {step} of {budget.steps}: {float(logged[-1]):.5f}", flush=True)
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
