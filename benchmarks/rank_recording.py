"""One rank of `solrl-train run` that records its update: `python benchmarks/rank_recording.py FOLDER SAMPLES run …`.

Writes FOLDER/samples.safetensors (rank 0) and FOLDER/gradients-RANK.safetensors, with a gradient per micro-batch.
SAMPLES is a file of recorded samples to train on instead of the run's own, or `own`.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from solrl_trainer import cli, loop
from solrl_trainer.algorithms.training_data import TrainingSamples
from solrl_trainer.lane_gradients import LaneGradients
from solrl_trainer.rollouts.iteration import IterationSamples
from solrl_trainer.session import Session

OWN = "own"
_CONDITIONING = "conditioning/"


def main() -> None:
    """Install the recorders, then run `solrl-train`."""
    folder, samples, *words = sys.argv[1:]
    record_samples(Path(folder), None if samples == OWN else load_file(samples))
    record_gradients(Path(folder))
    sys.argv = ["solrl-train", *words]
    cli.main()


def record_samples(folder: Path, stored: dict[str, torch.Tensor] | None) -> None:
    """Save what an update trains on; replace it by what is `stored`."""
    make = loop.training_samples

    def recorded(session: Session, samples: IterationSamples, advantages: torch.Tensor) -> TrainingSamples:
        made = make(session, samples, advantages)
        if _rank() == 0:
            found = {"latents": made.latents, "scores": samples.scores, "advantages": made.advantages}
            found |= {f"{_CONDITIONING}{name}": value for name, value in made.conditioning.items()}
            save_file({name: value.cpu().contiguous() for name, value in found.items()}, folder / "samples.safetensors")
        if stored is None:
            return made
        return replace(
            made,
            latents=stored["latents"].to(made.latents),
            advantages=stored["advantages"].to(made.advantages),
            conditioning={
                name: stored[f"{_CONDITIONING}{name}"].to(value) for name, value in made.conditioning.items()
            },
        )

    loop.training_samples = recorded


def record_gradients(folder: Path) -> None:
    """Save the gradients of this rank's micro-batches."""
    add, total = LaneGradients.add, LaneGradients.total
    found: dict[str, torch.Tensor] = {}

    def recorded(self: LaneGradients, number: int, part: int, gradient: Sequence[torch.Tensor]) -> None:
        found[f"{number}/{part}"] = torch.cat([one.flatten() for one in gradient]).cpu()
        add(self, number, part, gradient)

    def saved(self: LaneGradients) -> list[torch.Tensor]:
        save_file(found, folder / f"gradients-{_rank()}.safetensors")
        return total(self)

    LaneGradients.add, LaneGradients.total = recorded, saved  # type: ignore[method-assign]


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


if __name__ == "__main__":
    main()
