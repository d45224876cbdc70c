"""The real vLLM-Omni on a GPU answers like the local engine. Runs in its environment alone: see docs/scale-out.md."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from solrl_engine.backend import Backend, GenerationRequest
from solrl_proto.rollouts import Plan
from solrl_rollout.engine.backends import load_backend
from solrl_rollout.engine.work import VersionedAdapter
from solrl_rollout.settings import RolloutSettings, parse_model
from tests.support.adapters import random_adapter

MODEL = "mini-flux"
REQUEST = GenerationRequest(["a red circle"] * 3, [3, 1, 4], Plan(steps=4), "bf16")
SDPA = {"diffusion_attention_config": {"default": "TORCH_SDPA"}}
"""The miniature's heads of 32 values are too small for FlashAttention."""
CLOSE = 3e-3
"""Mean difference of the images' values: two BF16 kernels round differently."""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(not (find_spec("vllm_omni") and torch.cuda.is_available()), reason="needs vllm-omni and a GPU"),
]


@pytest.fixture(scope="module")
def local() -> Backend:
    return load_backend(parse_model(MODEL), RolloutSettings(device="cuda", precision="bf16"))


@pytest.fixture(scope="module")
def real() -> Iterator[Backend]:
    backend = load_backend(parse_model(MODEL), RolloutSettings(engine="vllm-omni", device="cuda", engine_options=SDPA))
    yield backend
    backend.close()


@pytest.fixture
def adapter(local: Backend) -> VersionedAdapter:
    return VersionedAdapter(f"sha256:{'ab' * 32}", random_adapter(dict(local.identity.adapter_layout), seed=1))


def images(backend: Backend, adapter: VersionedAdapter | None, request: GenerationRequest = REQUEST) -> torch.Tensor:
    """Images of a chunk [N, 3, H, W] in [0, 1], on the CPU."""
    backend.set_adapter("bf16", adapter)
    made = backend.generate(request, 24).images.cpu()
    return made / 255 if made.dtype == torch.uint8 else made


def mean_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).abs().mean())


def test_it_is_the_same_model(real: Backend, local: Backend) -> None:
    assert real.identity.digests == local.identity.digests
    assert mean_difference(images(real, None), images(local, None)) < CLOSE


def test_an_adapter_changes_its_images_as_ours(real: Backend, local: Backend, adapter: VersionedAdapter) -> None:
    changed = images(real, adapter)
    assert mean_difference(changed, images(local, adapter)) < CLOSE
    assert mean_difference(changed, images(real, None)) > 5 * CLOSE


def test_a_cancelled_chunk_stops_between_steps_and_the_next_is_whole(real: Backend) -> None:
    before, steps = images(real, None), list[int]()

    def cancel() -> None:
        steps.append(0)
        if len(steps) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        real.generate(REQUEST, 24, cancel)
    assert len(steps) == 3
    assert mean_difference(images(real, None), before) < CLOSE
