"""The shipped miniature, loaded once for this folder's tests, which must not modify its transformer; FP8 on a CPU."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from solrl_core.families import Backbone, load_backbone
from solrl_core.precision import fp8
from torch import Tensor


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    return load_backbone("mini-sana")


@pytest.fixture
def inference() -> Iterator[None]:
    """Random numbers of one seed, and no gradients."""
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.fixture
def fp8_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 layers without FP8 units: their product is that of the codes."""

    def product(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(codes.float() * scale, weight.float() * weight_scale, None if bias is None else bias.float())

    monkeypatch.setattr(fp8, "require_fp8", lambda device: None)
    monkeypatch.setattr(fp8, "product", product)
