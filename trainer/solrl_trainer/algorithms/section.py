"""The base of every section of a run's settings."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from solrl_proto.rollouts import MAX_STEPS

Positive = Annotated[int, Field(ge=1)]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]


class Section(BaseModel):
    """A group of settings. Unknown keys are errors, and so are numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
