"""A simulated device with memory for few candidates, on a CPU."""

import os
from collections.abc import Callable
from typing import Any

import solrl_core.sampling.batches
import torch
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.families.sana import Sana
from solrl_core.rewards.clipscore import ClipScore
from solrl_core.sampling.batches import CHUNK_SIZE
from solrl_rollout import cli


def limited(work: Callable[..., Any], rows_at: int, most: int) -> Callable[..., Any]:
    """Limit argument number `rows_at` of `work` to `most` rows."""

    def checked(*arguments: Any, **more: Any) -> Any:
        rows = len(arguments[rows_at])
        if rows > most:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {rows} rows, and there is room for {most}")
        return work(*arguments, **more)

    return checked


def whole_chunks() -> tuple[Any, str, int]:
    """A patch that makes a chunk one batch, as on a GPU, in a process with one thread."""
    return solrl_core.sampling.batches, "MOST_ON_CPU", CHUNK_SIZE


def of_transformer(most: int) -> tuple[type, str, Any]:
    """A patch that limits the transformer to this many rows; with guidance, a candidate has two."""

    def velocity(self: Sana, transformer: torch.nn.Module, *rest: Any) -> torch.Tensor:
        return whole(self, limited(transformer, 0, most), *rest)  # type: ignore[arg-type]

    whole = Sana.velocity
    return Sana, "velocity", velocity


def of_decoder(most: int) -> tuple[type, str, Any]:
    """A patch that limits the autoencoder."""
    return PipelineBackbone, "decode", limited(PipelineBackbone.decode, 1, most)


def of_rewards(most: int) -> tuple[type, str, Any]:
    """A patch that limits CLIPScore."""
    return ClipScore, "_pixels", limited(ClipScore._pixels, 1, most)


def main() -> None:
    """`solrl-rollout` on such a device, with room for ROOM_TO_MAKE and ROOM_TO_SCORE."""
    setattr(*whole_chunks())
    setattr(*of_transformer(int(os.environ["ROOM_TO_MAKE"])))
    setattr(*of_rewards(int(os.environ["ROOM_TO_SCORE"])))
    cli.main()
