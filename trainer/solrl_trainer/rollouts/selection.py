"""Selection of the candidates of a group for training.

A selection has the indices from the best to the worst score, so its first half is its best half.
"""

import math
from collections.abc import Sequence

import torch
from solrl_proto.noise import expand_seeds
from solrl_proto.selection import best_worst, levelled

from solrl_trainer.rollouts.groups import CandidateGroup
from solrl_trainer.settings.rollout_sections import Explore, SelectionMode


def uniform(scores: Sequence[float], count: int, seed: int) -> list[int]:
    """`count` random candidates."""
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed))
    return sorted(order[:count].tolist(), key=lambda index: (-scores[index], index))


def select(group: CandidateGroup, settings: Explore, seed_root: int) -> CandidateGroup:
    """Select `settings.keep` of a group's candidates, never pruned ones, which have no score.

    Args:
        group: explored candidates of a prompt; stored ones are all trained on.
        settings: selection mode and number of candidates to keep.
        seed_root: seed root of the iteration. A random selection depends only on this and the prompt.
    """
    if settings.source != "model":
        return group
    made = [index for index, score in enumerate(group.scores) if not math.isnan(score)]
    seed = expand_seeds(seed_root, f"select/{group.prompt.id}", 1)[0]
    chosen = choose(settings.selection, [group.scores[index] for index in made], settings.keep, seed)
    return group.rows([made[i] for i in chosen])


def choose(mode: SelectionMode, scores: Sequence[float], count: int, seed: int) -> list[int]:
    """Indices by a mode; scores that are equal up to rounding count as equal."""
    scores = levelled(scores)
    return best_worst(scores, count) if mode == "best_worst" else uniform(scores, count, seed)
