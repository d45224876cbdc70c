"""The training loop: one that was cut off goes on from its checkpoint to the same weights."""

from pathlib import Path

import pytest
import torch
from torch import nn

from minis_recipe import loop
from minis_recipe.loop import Budget, Rates, fit

BUDGET = Budget(steps=10, batch=4, pool=0)


class CutOffError(Exception):
    """Ends a training from outside."""


def trained(checkpoint: Path | None = None, calls: int = 10) -> tuple[list[float], torch.Tensor]:
    """Losses and weights of a training, which is cut off before it has drawn more batches than `calls`."""
    torch.manual_seed(0)
    model, unused = nn.Linear(3, 2), nn.Linear(1, 1)
    count = 0

    def loss() -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal count
        count += 1
        if count > calls:
            raise CutOffError
        value = (model(torch.ones(4, 3)) - 1).square().mean()
        return value, value

    parameters = [*unused.parameters(), *model.parameters()]
    losses = fit("test", parameters, loss, BUDGET, Rates(0.1, average=0.5), checkpoint=checkpoint)
    return losses, torch.cat([parameter.detach().flatten() for parameter in parameters])


def test_a_training_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    losses, weights = trained()
    with pytest.raises(CutOffError):
        trained(tmp_path / "state", calls=4)
    assert (tmp_path / "state").is_dir()
    again, same = trained(tmp_path / "state", calls=6)
    assert again == pytest.approx(losses)
    assert torch.allclose(same, weights)
    assert not (tmp_path / "state").exists()
