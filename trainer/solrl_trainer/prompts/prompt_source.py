"""One of several prompt sets of a run, as its settings have it."""

from typing import Annotated

from pydantic import Field, field_validator

from solrl_trainer.algorithms.section import Section
from solrl_trainer.prompts.prompt_rewards import check_overrides


class PromptSource(Section):
    """One of several prompt sets."""

    share: Annotated[float, Field(gt=0)] = 1.0
    """Its share of the prompts, in proportion to the other sets' shares."""
    rewards: dict[str, float] | None = None
    """Rewards of its prompts, with their weights; null: the run's."""

    @field_validator("rewards")
    @classmethod
    def _trains_something(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value is not None:
            check_overrides(value, "rewards")
        return value
