"""Rewards of single prompts: named with their weights in the metadata's field `rewards`, or else the run's."""

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


def prompt_overrides(prompt: PromptItem) -> Mapping[str, float] | None:
    """Reward → weight that a prompt names in place of the run's; None if it names none."""
    overrides: Mapping[str, float] | None = prompt.metadata.get(FIELD)
    return overrides


def rewards_to_score(prompt: PromptItem, names: Collection[str]) -> tuple[str, ...]:
    """Rewards of a prompt's images: `names`; or the prompt's own rewards, if they have a weight or are in `names`."""
    overrides = prompt_overrides(prompt)
    if overrides is None:
        return tuple(names)
    return tuple(name for name, weight in overrides.items() if weight or name in names)


def scored_prompts(name: str, prompts: Iterable[PromptItem], always: Collection[str] = ()) -> list[PromptItem]:
    """The prompts whose images a reward of the run scores, or all if it is one of `always`."""
    return [prompt for prompt in prompts if name in (prompt_overrides(prompt) or (name,)) or name in always]


def prompt_weights(prompt: PromptItem, rewards: Mapping[str, float]) -> dict[str, float]:
    """Trained reward → weight in the score of a prompt's images, in a run with these rewards."""
    overrides = prompt_overrides(prompt)
    return {name: weight for name, weight in (rewards if overrides is None else overrides).items() if weight}


def weights_per_prompt(
    prompts: Sequence[PromptItem], rewards: Mapping[str, float]
) -> Mapping[str, float | torch.Tensor]:
    """Trained reward → its weight for all prompts, or [prompts, 1] where prompts differ."""
    per_prompt = [prompt_weights(prompt, rewards) for prompt in prompts]
    if all(weights == per_prompt[0] for weights in per_prompt):
        return per_prompt[0] if per_prompt else run_weights(rewards)
    import torch

    names = dict.fromkeys(name for weights in (run_weights(rewards), *per_prompt) for name in weights)
    return {name: torch.tensor([[weights.get(name, 0.0)] for weights in per_prompt]) for name in names}


def mean_weights(prompts: Sequence[PromptItem], rewards: Mapping[str, float]) -> dict[str, float]:
    """Mean weight of each trained reward over these prompts; {} if no prompt has weights of its own."""
    per_prompt = [prompt_weights(prompt, rewards) for prompt in prompts]
    if all(weights == run_weights(rewards) for weights in per_prompt):
        return {}
    names = sorted({name for weights in per_prompt for name in weights})
    return {name: math.fsum(weights.get(name, 0.0) for weights in per_prompt) / len(per_prompt) for name in names}


def run_weights(rewards: Mapping[str, float]) -> dict[str, float]:
    """Trained reward → its weight for prompts that name none."""
    return {name: weight for name, weight in rewards.items() if weight}


def group_indices(values: Iterable[Value]) -> list[tuple[Value, list[int]]]:
    """Each different value with its indices, in order of appearance: a, b, a → (a, [0, 2]), (b, [1])."""
    groups: list[tuple[Value, list[int]]] = []
    for row, value in enumerate(values):
        rows = next((rows for key, rows in groups if key == value), None)
        if rows is None:
            groups.append((value, [row]))
        else:
            rows.append(row)
    return groups


def check_overrides(rewards: Any, place: str) -> None:
    """Refuse a prompt's rewards that are no weights, or all 0, by a ValueError that names the place."""
    weights = list(rewards.values()) if isinstance(rewards, Mapping) else []
    numbers = all(isinstance(w, int | float) and not isinstance(w, bool) and math.isfinite(w) for w in weights)
    if not (numbers and any(weights)):
        raise ValueError(
            f"{place}: got the rewards {rewards!r}; expected weights by name, such as {{'ocr': 1.0}}, not all 0. "
            "Rename the field if it is something else"
        )


def check_known(prompts: Iterable[PromptItem], rewards: Collection[str], where: str) -> None:
    """Refuse prompts that name a reward which the run lacks, by a ValueError with the first one and `where` it is."""
    for prompt in prompts:
        if unknown := next((name for name in prompt_overrides(prompt) or () if name not in rewards), None):
            raise ValueError(
                f"{where}: prompt {prompt.text[:80]!r} names the reward {unknown!r}{did_you_mean(unknown, rewards)}; "
                f"expected some of the run's rewards: {', '.join(rewards)}"
            )
