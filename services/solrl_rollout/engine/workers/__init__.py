"""Workers, which generate and score the engine's chunks behind one protocol."""

import os
from collections.abc import Sequence
from functools import partial

import torch
from solrl_core.devices import require_device

from solrl_rollout.engine.backends import BackendLoader
from solrl_rollout.engine.workers.local import LocalWorker
from solrl_rollout.engine.workers.process import ProcessConnection, memory_file
from solrl_rollout.engine.workers.remote import RemoteWorker, SharedAdapters
from solrl_rollout.engine.workers.worker import Worker
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics

__all__ = ["Worker", "make_workers", "process_workers", "worker_devices"]


def make_workers(settings: RolloutSettings, metrics: RolloutMetrics, load_backend: BackendLoader) -> list[Worker]:
    """The workers of the settings, not loaded yet: a single one in this process, several in processes of their own.

    Raises:
        ValueError: the settings name devices that this machine lacks, or CPU workers on a GPU.
        RuntimeError: there is no Ray, or its cluster lacks what the settings name.
    """
    if settings.on_ray:
        from solrl_rollout.engine.workers.ray_cluster import ray_workers  # needs an extra

        return ray_workers(settings, metrics, load_backend)
    devices = worker_devices(settings)
    if len(devices) == 1:
        return [LocalWorker(settings.model_copy(update={"device": devices[0]}), metrics, load_backend)]
    return process_workers(settings, devices, metrics, load_backend)


def process_workers(
    settings: RolloutSettings, devices: Sequence[str], metrics: RolloutMetrics, load_backend: BackendLoader
) -> list[Worker]:
    """A worker process for each device, `cpu` or `cuda:N`. They share the cores, unless OMP_NUM_THREADS is set.

    Raises:
        ValueError: the loader cannot be imported by another process.
    """
    files = SharedAdapters(memory_file)
    threads = max(1, len(os.sched_getaffinity(0)) // len(devices))
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    workers: list[Worker] = []
    for i, device in enumerate(devices):
        kind, _, number = device.partition(":")
        variables = environment | ({"CUDA_VISIBLE_DEVICES": _visible(int(number))} if kind == "cuda" else {})
        name = device if kind == "cuda" else f"{device}:{i}"
        there = settings.model_copy(update={"device": kind})
        connect = partial(ProcessConnection, variables, files)
        workers.append(RemoteWorker(there, metrics, load_backend, name=name, connect=connect))
    return workers


def worker_devices(settings: RolloutSettings) -> list[str]:
    """The device of each worker on this machine, such as `["cuda:0", "cuda:1"]`.

    Raises:
        ValueError: the settings name devices that this machine lacks, or CPU workers on a GPU.
    """
    if settings.gpus is not None:
        present = torch.cuda.device_count()
        numbers = range(present) if settings.gpus == "all" else [int(number) for number in settings.gpus.split(",")]
        if not numbers or max(numbers) >= present:
            raise ValueError(
                f"got --gpus {settings.gpus}, and PyTorch finds {present} GPUs; expected numbers below {present}"
                if present
                else f"got --gpus {settings.gpus}, and PyTorch finds no GPU; `solrl-rollout doctor` finds the "
                "reason, and --workers starts several workers on a CPU"
            )
        return [f"cuda:{number}" for number in numbers]
    number, _ = settings.worker_number or 1, require_device(settings.device)
    if number > 1 and settings.torch_device != "cpu":
        raise ValueError(
            f"got --workers {number} on {settings.torch_device}; expected --gpus all, or their numbers, for "
            "one worker on each GPU, or --device cpu"
        )
    return [settings.device if number == 1 else "cpu"] * number


def _visible(number: int) -> str:
    """A GPU in terms of CUDA_VISIBLE_DEVICES. `number` counts the GPUs that are visible here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[number].strip() if visible else str(number)
