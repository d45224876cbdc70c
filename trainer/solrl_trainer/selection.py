"""Selection of the candidates of a group for training.

Every mode returns indices from the best to the worst score, so the first half of a selection is its best half.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from solrl_proto.noise import expand_seeds
from solrl_proto.selection import best_worst, levelled, rounding

from solrl_trainer.rollouts.groups import CandidateGroup
from solrl_trainer.settings.rollout_sections import Explore, Regenerate, SelectionMode

__all__ = ["MODES", "best_worst", "extremes_random", "mean_deviation", "reselect", "select", "uniform"]

Mode = Callable[[Sequence[float], int, int], list[int]]
"""(scores, number to keep, seed) → indices, from the best to the worst."""


def uniform(scores: Sequence[float], count: int, seed: int) -> list[int]:
    """`count` random candidates."""
    return _by_score(_shuffled(range(len(scores)), seed)[:count], scores)


def mean_deviation(scores: Sequence[float], count: int) -> list[int]:
    """Candidates whose scores are furthest from the group's mean."""
    values = torch.as_tensor(scores, dtype=torch.float64)
    deviations = levelled((values - values.mean()).abs().tolist(), rounding(scores))
    order = sorted(range(len(scores)), key=deviations.__getitem__, reverse=True)
    return _by_score(order[:count], scores)


def extremes_random(scores: Sequence[float], count: int, seed: int) -> list[int]:
    """The best and the worst candidate, and random others."""
    ends = best_worst(scores, 2)
    others = [index for index in range(len(scores)) if index not in ends]
    return _by_score([*ends, *_shuffled(others, seed)][:count], scores)


MODES: Mapping[SelectionMode, Mode] = {
    "best_worst": lambda scores, count, seed: best_worst(scores, count),
    "random": uniform,
    "mean_deviation": lambda scores, count, seed: mean_deviation(scores, count),
    "extremes_random": extremes_random,
}


def select(group: CandidateGroup, settings: Explore, seed_root: int) -> CandidateGroup:
    """Select `settings.keep` of a group's candidates, never pruned ones, which have no score.

    Args:
        group: explored candidates of a prompt.
        settings: selection mode and number of candidates to keep.
        seed_root: seed root of the iteration. Random modes depend only on this and the prompt.
    """
    made = [index for index, score in enumerate(group.scores) if not math.isnan(score)]
    seed = expand_seeds(seed_root, f"select/{group.prompt.id}", 1)[0]
    chosen = choose(settings.selection, [group.scores[index] for index in made], settings.keep, seed)
    return group.rows([made[i] for i in chosen])


def reselect(group: CandidateGroup, settings: Regenerate, seed_root: int) -> CandidateGroup:
    """Select `settings.keep` of a group's regenerated samples by their rewards; without it, the group itself.

    `seed_root` as in `select`.
    """
    if settings.keep is None:
        return group
    seed = expand_seeds(seed_root, f"reselect/{group.prompt.id}", 1)[0]
    return group.rows(choose(settings.selection, group.trained.scores.tolist(), settings.keep, seed))


def choose(mode: SelectionMode, scores: Sequence[float], count: int, seed: int) -> list[int]:
    """Indices by a mode; scores that are equal up to rounding count as equal."""
    return MODES[mode](levelled(scores, rounding(scores)), count, seed)


def _shuffled(indices: Sequence[int], seed: int) -> list[int]:
    order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(seed))
    return [indices[i] for i in order.tolist()]


def _by_score(indices: Sequence[int], scores: Sequence[float]) -> list[int]:
    return sorted(indices, key=lambda index: (-scores[index], index))
