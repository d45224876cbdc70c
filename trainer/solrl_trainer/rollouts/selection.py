"""Selection of the candidates of a group for training.

A selection has the indices from the best to the worst score, so its first half is its best half.
"""

from collections.abc import Sequence

from solrl_proto.selection import best_worst, merge_ties

from solrl_trainer.rollouts.groups import CandidateGroup
from solrl_trainer.settings.rollout_sections import Explore


def select(group: CandidateGroup, settings: Explore) -> CandidateGroup:
    """Select the best and the worst `settings.keep` of a group's candidates. Stored images are all trained on."""
    if settings.source != "model":
        return group
    return group.rows(choose(group.scores, settings.keep))


def choose(scores: Sequence[float], count: int) -> list[int]:
    """Indices of the best and the worst; scores that are equal up to rounding count as equal."""
    return best_worst(merge_ties(scores), count)
