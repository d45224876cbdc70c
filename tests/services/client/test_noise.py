"""The client's noise equals that of torch."""

import pytest
from solrl_client.noise import initial_noise
from solrl_core.sampling.noise import initial_noise as noise_of_torch
from solrl_proto.noise import PROBE_SEED


@pytest.mark.parametrize("shape", [(16,), (17,), (4, 5, 5), (8, 8, 8), (3, 33, 5)])
def test_noise_is_that_of_torch(shape: tuple[int, ...]) -> None:
    seeds = [0, 7, 2**32 + 7, 2**53 - 1, PROBE_SEED]
    found = initial_noise(seeds, shape)
    assert (found.dtype, found.shape) == ("float32", (5, *shape))
    assert found == pytest.approx(noise_of_torch(seeds, shape).numpy(), abs=2e-6)
    assert initial_noise([], shape).shape == (0, *shape)


def test_noise_that_no_candidate_has_is_refused() -> None:
    for seed, shape in ((2**53, (16,)), (-1, (16,)), (0, (3, 5))):
        with pytest.raises(ValueError, match="expected"):
            initial_noise([seed], shape)
