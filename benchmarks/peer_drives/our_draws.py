"""The random draws of our trainer, for DiffusionNFT's script: what still differs is the code."""

from collections.abc import Iterator
from typing import Any

import torch
from solrl_core.sampling.noise import initial_noise
from solrl_proto.noise import expand_seeds
from solrl_trainer.policy.update import trained_steps, training_pairs
from solrl_trainer.rollouts.exploration import seed_root
from solrl_trainer.rollouts.selection import choose
from torch import Tensor

from peer_drives.turns import Work, prompt_set


def draw_as_ours(script: Any, config: Any, work: Work, shape: tuple[int, ...]) -> None:
    """Let the script use our initial noise of a turn's samples, and our noise levels and noise of its training.

    The samples of each prompt are a batch. `shape` is that of a sample's latents.
    """
    batches, size, levels = len(work.prompts), work.samples, config.sample.num_steps
    sampler, tracker = script.pipeline_with_logprob, script.PerPromptStatTracker
    sampled = 0
    permutations: Iterator[Tensor] = iter(())
    noises: Iterator[Tensor] = iter(())

    def sample(*args: Any, **kwargs: Any) -> Any:
        nonlocal sampled
        turn, prompt = divmod(sampled, batches)
        sampled += 1
        seeds = expand_seeds(seed_root(work.seed, turn), str(prompt), size)
        return sampler(*args, **kwargs, latents=initial_noise(seeds, shape))

    def begin_training(rewards: Any) -> None:
        nonlocal permutations, noises
        turn = sampled // batches - 1
        scores = torch.as_tensor(rewards)[:, 0].float().split(size)
        prompts = [int(item.id) for item in prompt_set(work).of_iteration(batches, work.seed, turn)]
        order = torch.tensor([size * prompt + i for prompt in prompts for i in choose(scores[prompt].tolist(), size)])
        generator = torch.Generator().manual_seed(expand_seeds(work.seed, f"update/{turn}", 1)[0])
        index, at = training_pairs(len(order), levels, config.train.timestep_fraction, generator)
        drawn = torch.cat([torch.randn(size, *shape, generator=generator) for _ in range(len(index) // size)])
        by_sample = index.argsort(stable=True).view(len(order), trained_steps(levels, config.train.timestep_fraction))
        trained = at[by_sample].tolist()
        others = [[level for level in range(levels) if level not in row] for row in trained]
        permutations = iter([order, *map(torch.tensor, map(list.__add__, trained, others))])
        noises = iter([drawn[pairs] for batch in by_sample.split(size) for pairs in batch.T])

    class Tracker(tracker):  # type: ignore[misc,valid-type]
        def update(self, prompts: Any, rewards: Any, *args: Any) -> Any:
            begin_training(rewards)
            return super().update(prompts, rewards, *args)

    script.pipeline_with_logprob, script.PerPromptStatTracker = sample, Tracker
    vars(script.torch).update(randperm=lambda *_, **__: next(permutations), randn_like=lambda _: next(noises))
