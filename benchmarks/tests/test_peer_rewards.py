"""Rewards of trainings beside a peer's, and the random draws that a peer can share with ours."""

from types import SimpleNamespace

import numpy as np
import peer_rewards
import pytest
import torch
from peer_drives.our_draws import draw_as_ours
from peer_drives.turns import Work
from solrl_core.sampling.noise import initial_noise
from solrl_proto.noise import expand_seeds
from solrl_trainer.policy.update import training_pairs
from solrl_trainer.rollouts.exploration import seed_root


@pytest.mark.parametrize(
    ("apart", "equal"), [((0.02, -0.02, 0.0), True), ((0.3, -0.3, 0.0), False), ((0.2,) * 3, False)]
)
def test_rewards_are_equal_if_the_whole_interval_lies_within_a_quarter_of_the_gain(
    apart: tuple[float, ...], equal: bool
) -> None:
    gained = np.arange(5) / 4  # 0.5 above the first turn in the mean
    rows = [{"beside": "peer", "trainer": "ours", "rewards": list(gained)} for _ in apart]
    rows += [{"beside": "peer", "trainer": "peer", "rewards": list(gained + by)} for by in apart]
    (span,) = peer_rewards.spans(rows)
    assert (span.first, span.last, span.margin, span.equal) == (1, 5, 0.125, equal)


def test_rewards_are_compared_within_equal_seconds() -> None:
    common = {"part": "learning, fast", "seed": 1}
    rows = [
        common | {"trainer": "ours", "cpu": [1.0] * 4, "rewards": [1.0, 2.0, 3.0, 5.0]},
        common | {"trainer": "DiffusionNFT", "cpu": [2.0, 2.0, 2.0], "rewards": [0.5, 2.5, 9.0]},
    ]
    first, second = peer_rewards.halves(rows)
    assert first == ("0 to 2", "1", "2.0", "1.0", "1.5000", "0.5000", "-1.0000 [no limit]")
    assert second == ("2 to 4", "1", "2.0", "1.0", "4.0000", "2.5000", "-1.5000 [no limit]")


class NoAdvantages:
    """In the place of a peer's class of advantages."""

    def update(self, prompts: list[str], rewards: np.ndarray) -> None: ...


def test_a_peer_gets_our_draws_of_each_turn() -> None:
    shape, size, steps, trained = (1, 2, 2), 3, 10, 3
    work = Work("sd3-medium", "diffusionnft", "cpu", size, ("a", "b"), seed=7)
    script = SimpleNamespace(
        torch=SimpleNamespace(), pipeline_with_logprob=lambda latents: latents, PerPromptStatTracker=NoAdvantages
    )
    config = SimpleNamespace(sample=SimpleNamespace(num_steps=steps), train=SimpleNamespace(timestep_fraction=0.3))
    draw_as_ours(script, config, work, shape)
    for turn in range(2):
        for prompt in range(2):
            seeds = expand_seeds(seed_root(7, turn), str(prompt), size)
            assert torch.equal(script.pipeline_with_logprob(), initial_noise(seeds, shape))
        script.PerPromptStatTracker().update(["a"] * size + ["b"] * size, np.array([[2], [3], [1], [5], [4], [6]]))
        order = script.torch.randperm(2 * size).tolist()
        assert sorted([order[:size], order[size:]]) == [[1, 0, 2], [5, 3, 4]]
        levels = [script.torch.randperm(steps).tolist() for _ in order]
        assert all(sorted(row) == list(range(steps)) for row in levels)
        noise = torch.stack([script.torch.randn_like(None) for _ in range(2 * trained)]).view(2, trained, size, *shape)

        generator = torch.Generator().manual_seed(expand_seeds(7, f"update/{turn}", 1)[0])
        index, at = training_pairs(2 * size, steps, 0.3, generator)
        ours = torch.cat([torch.randn(size, *shape, generator=generator) for _ in range(2 * trained)])
        for sample, level, row in zip(index.tolist(), at.tolist(), ours, strict=True):
            batch, place = divmod(sample, size)
            assert torch.equal(noise[batch, levels[sample][:trained].index(level), place], row)
