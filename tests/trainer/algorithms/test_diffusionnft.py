"""DiffusionNFT: its gradient, advantages and figures; test_published_parity.py has its values."""

from typing import Any, get_args

import numpy as np
import pytest
import torch
from solrl_trainer.algorithms.algorithm import Velocities, group_advantages
from solrl_trainer.algorithms.diffusionnft import (
    AdvantageMode,
    DiffusionNft,
    DiffusionNftSettings,
    nft_loss,
    trained_advantages,
)
from solrl_trainer.algorithms.training_data import ForwardBatch

DEFAULTS = {"beta": 1.0, "adv_clip": 5.0, "kl_weight": 1e-4}


def batch(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Velocities near the true one, like a trained model's, and advantages beyond the clip."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x0, noise = normal(), normal()
    true = noise - x0
    return {
        name: value.to(dtype)
        for name, value in {
            "v": true + 0.3 * normal(),
            "v_old": true + 0.3 * normal(),
            "v_ref": true + 0.3 * normal(),
            "x0": x0,
            "noise": noise,
            "t": torch.rand(shape[0], generator=generator, dtype=torch.float64) * 0.9 + 0.1,
            "advantages": torch.linspace(-8, 8, shape[0], dtype=torch.float64),
        }.items()
    }


def loss(values: dict[str, torch.Tensor], **changes: Any) -> torch.Tensor:
    return nft_loss(**{**values, **DEFAULTS, **changes})  # type: ignore[arg-type]


def test_at_the_old_policy_an_advantage_of_zero_has_no_gradient() -> None:
    values = batch((4, 3, 8, 8)) | {"advantages": torch.zeros(4, dtype=torch.float64)}
    v = values["v_old"].clone().requires_grad_(True)
    loss(values | {"v": v}, kl_weight=0.0).backward()  # type: ignore[no-untyped-call]
    assert float(v.grad.abs().max()) < 1e-15


@pytest.mark.parametrize("name", ["v", "v_old", "x0", "noise", "t", "advantages"])
def test_a_nan_makes_the_loss_nan(name: str) -> None:
    values = batch((3, 8))
    values[name].view(-1)[0] = float("nan")
    assert not torch.isfinite(loss(values))


def test_advantages_are_centred_per_group_and_scaled_over_all() -> None:
    rewards = torch.tensor([[1.0, 3.0], [10.0, 20.0]], dtype=torch.float64)
    every, groups = np.std([1, 3, 10, 20]), [np.std([1, 3]), np.std([10, 20])]
    found = group_advantages(rewards)
    assert np.allclose(found, [[-1 / (every + 1e-4), 1 / (every + 1e-4)], [-5 / (every + 1e-4), 5 / (every + 1e-4)]])
    found = group_advantages(rewards, global_std=False)
    assert np.allclose(found, [[s * d / (g + 1e-4) for s in (-1, 1)] for d, g in zip((1, 5), groups, strict=True)])

    # Equal rewards give none.
    for global_std in (True, False):
        assert torch.equal(group_advantages(torch.full((2, 4), 0.3), global_std=global_std), torch.zeros(2, 4))


MODES = {
    "all": [-7.0, -0.5, 0.0, 0.25, 6.0],
    "positive_only": [0.0, 0.0, 0.0, 0.25, 6.0],
    "negative_only": [-7.0, -0.5, 0.0, 0.0, 0.0],
    "one_only": [0.0, 0.0, 0.0, 1.0, 1.0],
    "binary": [-1.0, -1.0, 0.0, 1.0, 1.0],
}


@pytest.mark.parametrize("mode", get_args(AdvantageMode))
def test_advantages_are_trained_by_mode_and_used_by_the_loss(mode: AdvantageMode) -> None:
    found = trained_advantages(torch.tensor(MODES["all"]), mode)
    assert found.tolist() == MODES[mode]
    assert found.dtype == torch.float32
    assert trained_advantages(torch.tensor([float("nan")]), mode).isnan().all()
    values = batch((5, 8)) | {"advantages": torch.tensor(MODES["all"], dtype=torch.float64)}
    found, _ = through_the_algorithm(values, advantage_mode=mode)
    assert found == float(loss(values | {"advantages": torch.tensor(MODES[mode], dtype=torch.float64)}))
    assert (found == float(loss(values))) == (mode == "all")


def through_the_algorithm(values: dict[str, torch.Tensor], **settings: Any) -> tuple[float, dict[str, float]]:
    """Loss and figures of the algorithm on a micro-batch."""
    batch = ForwardBatch(values["x0"], values["t"], values["advantages"], values["x0"], values["noise"])
    velocity = Velocities(values["v"], {"old": values["v_old"], "reference": values["v_ref"]})
    found = DiffusionNft(DiffusionNftSettings(**settings)).loss(batch, velocity)
    return float(found.value.detach()), {name: float(figure) for name, figure in found.figures.items()}


def test_its_figures_are_distances_and_the_share_of_clipped_advantages() -> None:
    values = batch((8, 3, 4)) | {"advantages": torch.tensor([-9.0, -5.1, -5.0, -1, 0, 4.9, 5.0, 5.1])}
    current = values["v"].clone().requires_grad_(True)
    _, figures = through_the_algorithm(values | {"v": current}, advantage_mode="binary")
    assert figures == {
        "old_distance": pytest.approx(float((values["v"] - values["v_old"]).square().mean())),
        "kl": pytest.approx(float((values["v"] - values["v_ref"]).square().mean())),
        "clipped": 3 / 8,
    }
    assert figures["old_distance"] != pytest.approx(figures["kl"])
    assert through_the_algorithm(values, kl_weight=0)[1].keys() == {"old_distance", "clipped"}
