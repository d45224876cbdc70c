"""Training loop of the recipe: AdamW, warm-up, cosine decay, averaged weights, and a limit in steps or seconds."""

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from solrl_proto.text_files import read_json


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
CHECKPOINT_SECONDS = 45.0
_MOMENTS = ("exp_avg", "exp_avg_sq")
"""State of AdamW."""


def fit(
    name: str,
    parameters: Sequence[torch.nn.Parameter],
    loss: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    budget: Budget,
    rates: Rates,
    graphed: bool = False,
    snapshot: Snapshot | None = None,
    checkpoint: Path | None = None,
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
        checkpoint: folder of the training's state, written every `CHECKPOINT_SECONDS`. If it exists, the training goes
            on from there. It is removed at the end.

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
    earlier: list[float] = []
    spent = 0.0
    if checkpoint is not None and checkpoint.is_dir():
        earlier, spent = _read(checkpoint, parameters, averaged, optimizer)
    first = len(earlier)

    def step_once() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        value, log_value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return log_value.detach()

    run = _recorded(step_once) if graphed and on_cuda else step_once
    logged: list[torch.Tensor] = []
    written = 0
    warm_up = min(500, budget.steps / 20)
    left = list(SNAPSHOTS) if snapshot else []
    start = time.monotonic() - spent
    for step in range(first, budget.steps):
        if step == first + 1:
            start = time.monotonic() - spent  # the first step compiles
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
        if checkpoint is not None and elapsed - spent > CHECKPOINT_SECONDS * (written + 1):
            written += 1
            _write(checkpoint, parameters, averaged, optimizer, [*earlier, *torch.stack(logged).tolist()], elapsed)
    if rates.average:
        with torch.no_grad():
            for parameter, average in zip(parameters, averaged, strict=True):
                parameter.copy_(average)
    if checkpoint is not None:
        shutil.rmtree(checkpoint, ignore_errors=True)
    return [*earlier, *(torch.stack(logged).tolist() if logged else [])]


def _write(
    folder: Path,
    parameters: Sequence[torch.nn.Parameter],
    averaged: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    losses: Sequence[float],
    seconds: float,
) -> None:
    """Write a checkpoint, instead of an older one."""
    states = [(place, optimizer.state[parameter]) for place, parameter in enumerate(parameters)]
    files: dict[str, list[tuple[int, torch.Tensor]]]
    files = {"parameters": list(enumerate(parameters)), "averaged": list(enumerate(averaged))}
    # What gets no gradient has no moments.
    files |= {name: [(place, state[name]) for place, state in states if name in state] for name in _MOMENTS}
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, tensors in files.items():
        dense = {str(place): tensor.detach().contiguous() for place, tensor in tensors}
        save_file(dense, partial / f"{name}.safetensors")
    (partial / "progress.json").write_text(json.dumps({"losses": losses, "seconds": seconds}), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


@torch.no_grad()
def _read(
    folder: Path,
    parameters: Sequence[torch.nn.Parameter],
    averaged: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> tuple[list[float], float]:
    """Read a checkpoint in place; returns the losses so far, one of each step, and the seconds."""
    progress = read_json(folder / "progress.json")
    device = parameters[0].device
    files = {name: load_file(folder / f"{name}.safetensors") for name in ("parameters", "averaged", *_MOMENTS)}
    for name, tensors in (("parameters", parameters), ("averaged", averaged)):
        for place, tensor in enumerate(tensors):
            tensor.copy_(files[name][str(place)])
    steps = torch.tensor(float(len(progress["losses"])), device=device)
    for place in files[_MOMENTS[0]]:
        moments = {name: files[name][place].to(device) for name in _MOMENTS}
        optimizer.state[parameters[int(place)]] = {"step": steps.clone(), **moments}
    return progress["losses"], progress["seconds"]


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
