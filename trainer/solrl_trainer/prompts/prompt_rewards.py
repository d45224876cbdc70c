"""Rewards of single prompts: those that a prompt's metadata names in `rewards`, with their weights, or the run's."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from solrl_core.suggestions import did_you_mean
from solrl_proto.rollouts import PromptItem

if TYPE_CHECKING:
    import torch

FIELD = "rewards"
"""Field of a prompt's metadata: reward → weight in the score of the prompt's images."""

Value = TypeVar("Value")


def own_rewards(prompt: PromptItem) -> Mapping[str, float] | None:
    """The rewards that a prompt names with their weights; None if those of the run apply."""
    found: Mapping[str, float] | None = prompt.metadata.get(FIELD)
    return found


def asked_rewards(prompt: PromptItem, names: Collection[str]) -> tuple[str, ...]:
    """Rewards to compute of a prompt's images where `names` are wanted: its own ones that are trained or wanted."""
    own = own_rewards(prompt)
    return tuple(names) if own is None else tuple(name for name, weight in own.items() if weight or name in names)


def scored_prompts(name: str, prompts: Iterable[PromptItem], judges: Collection[str] = ()) -> list[PromptItem]:
    """The prompts whose images a reward of the run scores, or all if it is one of `judges`."""
    return [prompt for prompt in prompts if name in (own_rewards(prompt) or (name,)) or name in judges]


def weights_of(prompt: PromptItem, rewards: Mapping[str, float]) -> dict[str, float]:
    """Trained reward → weight in the score of a prompt's images, in a run with these rewards."""
    own = own_rewards(prompt)
    return {name: weight for name, weight in (rewards if own is None else own).items() if weight}


def weights_of_all(prompts: Sequence[PromptItem], rewards: Mapping[str, float]) -> Mapping[str, float | torch.Tensor]:
    """Trained reward → its weight for all prompts, or [prompts, 1] where prompts differ."""
    each = [weights_of(prompt, rewards) for prompt in prompts]
    if all(own == each[0] for own in each):
        return each[0] if each else weights_of_run(rewards)
    import torch

    names = dict.fromkeys(name for own in (weights_of_run(rewards), *each) for name in own)
    return {name: torch.tensor([[own.get(name, 0.0)] for own in each]) for name in names}


def mean_weights(prompts: Sequence[PromptItem], rewards: Mapping[str, float]) -> dict[str, float]:
    """Trained reward → its mean weight for these prompts; empty if all have the weights of the run."""
    each = [weights_of(prompt, rewards) for prompt in prompts]
    if all(own == weights_of_run(rewards) for own in each):
        return {}
    names = sorted({name for own in each for name in own})
    return {name: math.fsum(own.get(name, 0.0) for own in each) / len(each) for name in names}


def weights_of_run(rewards: Mapping[str, float]) -> dict[str, float]:
    """Trained reward → its weight for prompts that name none."""
    return {name: weight for name, weight in rewards.items() if weight}


def rows_alike(values: Iterable[Value]) -> list[tuple[Value, list[int]]]:
    """Each different value with the indices where it is."""
    found: list[tuple[Value, list[int]]] = []
    for row, value in enumerate(values):
        rows = next((rows for known, rows in found if known == value), None)
        if rows is None:
            found.append((value, [row]))
        else:
            rows.append(row)
    return found


def check_own_rewards(given: Any, place: str) -> None:
    """Refuse a prompt's rewards that are no weights, or all 0.

    Raises:
        ValueError: names the place.
    """
    weights = list(given.values()) if isinstance(given, Mapping) else []
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one) for one in weights)
    if not (numbers and any(weights)):
        raise ValueError(
            f"{place}: got the rewards {given!r}; expected weights by name, such as {{'ocr': 1.0}}, not all 0. Rename "
            "the field if it is something else"
        )


def check_known(prompts: Iterable[PromptItem], rewards: Collection[str], where: str) -> None:
    """Refuse prompts that name a reward which the run does not have.

    Raises:
        ValueError: names the reward, the first such prompt and `where` it is.
    """
    for prompt in prompts:
        if unknown := next((name for name in own_rewards(prompt) or () if name not in rewards), None):
            raise ValueError(
                f"{where}: prompt {prompt.text[:80]!r} names the reward {unknown!r}{did_you_mean(unknown, rewards)}; "
                f"expected some of the run's rewards: {', '.join(rewards)}"
            )
