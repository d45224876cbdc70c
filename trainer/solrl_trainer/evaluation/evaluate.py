"""Evaluation on held-out prompts with fixed seeds."""

from collections.abc import Callable, Sequence

import torch
from solrl_core.image_files import for_showing
from solrl_engine.sampler import Sampler
from solrl_engine.scorer import Scorer
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import PromptItem

from solrl_trainer.policy.progress import OnProgress
from solrl_trainer.ranks.communicator import Communicator, gather_rows, shard
from solrl_trainer.records.evaluations import Evaluation
from solrl_trainer.rollouts.sample_scorer import score_policy_images

SEED_ROOT = 0
_AHEAD = 4
"""Batches whose prompts are encoded together; the cache of prompts has room for them."""


def shown_seed(prompt: PromptItem) -> int:
    """The seed of a held-out prompt's first image, which grid, report and trackers show."""
    return expand_seeds(SEED_ROOT, prompt.id, 1)[0]


def evaluate(
    sampler: Sampler,
    scorer: Scorer,
    prompts: Sequence[PromptItem],
    world: Communicator,
    *,
    seeds: int,
    always: Sequence[str] = (),
    encode: Callable[[Sequence[str], float], None] = lambda texts, guidance: None,
    progress: OnProgress = lambda done, total: None,
) -> Evaluation:
    """Generate `seeds` images per prompt, always from the same seeds, and score them with every loaded reward.

    Each rank generates its share of the prompts, and all get the whole result. A prompt that names its own rewards is
    scored with these and with `always`. `encode` is called with the texts of this rank's next few batches, and the
    guidance; `progress` with the numbers of images that it has made and will make.
    """
    names, backbone, part = scorer.rewards.names, sampler.generator.backbone, shard(prompts, world)
    pairs = [(prompt, seed) for prompt in part for seed in expand_seeds(SEED_ROOT, prompt.id, seeds)]
    scores: dict[str, list[torch.Tensor]] = {name: [torch.empty(0)] for name in names}
    frames = [backbone.frames] if backbone.frames > 1 else []
    images = [for_showing(torch.empty(0, *frames, 3, backbone.height, backbone.width))]
    if pairs:
        progress(0, len(pairs))
    size = sampler.batch.size
    for start in range(0, len(pairs), size):
        if start % (_AHEAD * size) == 0:
            encode([prompt.text for prompt, _ in pairs[start : start + _AHEAD * size]], sampler.plan().guidance)
        batch, own_seeds = zip(*pairs[start : start + size], strict=True)
        sampled = sampler.sample(batch, own_seeds).images
        for name, values in score_policy_images(scorer, names, sampled, batch, always)[0].items():
            scores[name].append(values)
        images.append(for_showing(sampled[-start % seeds :: seeds]).cpu())  # of each prompt's first seed
        progress(start + len(batch), len(pairs))
    return Evaluation(
        scores={name: gather_rows(torch.cat(values).view(len(part), seeds), world) for name, values in scores.items()},
        images=gather_rows(torch.cat(images), world),
    )
