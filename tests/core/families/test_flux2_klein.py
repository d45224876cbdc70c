"""FLUX.2 [klein]: its schedule and positions."""

import pytest
import torch
from solrl_core.families.flux2_klein import position_ids
from tiny_models import Tiny, variants


@variants("flux2-klein")
def test_the_shift_depends_on_the_steps(tiny: Tiny) -> None:
    """With the shift of 2 steps, the middle one of 4 steps would be the same."""
    assert tiny.backbone.sigmas(4)[2] != pytest.approx(tiny.backbone.sigmas(2)[1], abs=1e-4)


@variants("flux2-klein")
def test_positions_equal_the_pipelines(tiny: Tiny) -> None:
    cpu = torch.device("cpu")
    image = tiny.pipeline._prepare_latent_ids(torch.zeros(1, 16, 4, 6))[0]
    text = tiny.pipeline._prepare_text_ids(torch.zeros(1, 9, 32))[0]
    assert torch.equal(position_ids(1, 4, 6, 1, cpu), image)
    assert torch.equal(position_ids(1, 1, 1, 9, cpu), text)
