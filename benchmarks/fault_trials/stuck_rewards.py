"""Rewards that never return, each in another way, and one that does."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def brightness(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Mean of an image's pixels."""
    return images.mean((1, 2, 3))


def asleep(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Sleeps."""
    while True:
        time.sleep(1000)


def locked(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Waits for a lock that it has itself."""
    lock = threading.Lock()
    with lock, lock:
        return images.mean((1, 2, 3))


def reading(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Reads from a connection on which nothing arrives."""
    ours, others = socket.socketpair()
    with ours, others:
        return torch.tensor([len(ours.recv(1))] * len(images))


def busy(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Computes in Python."""
    while True:
        pass


def computing(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Computes in torch."""
    while True:
        images = images * 1.0


def waiting(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Waits for a program that does not end before this one does."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as program:
        program.wait()
    return images.mean((1, 2, 3))
