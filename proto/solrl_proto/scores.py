"""Messages of a reward service: images and prompts in, scores out.

The body of `POST /v1/scores` is a safetensors file: a tensor `images`, uint8 [N, 3, H, W], or [N, F, 3, H, W] for
clips, with sides of at most `MAX_SCORED_SIDE` and at most `MAX_SCORED_RATIO` between them, and a `ScoreRequest` as JSON
in the metadata field `request`.
"""

from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, model_validator

from solrl_proto.identifiers import Digest, Message
from solrl_proto.rollouts import Metadata

SCORES_MEDIA_TYPE = "application/x-safetensors"
IMAGES_TENSOR = "images"
REQUEST_FIELD = "request"
MAX_SCORED_IMAGES = 256
"""Images of one request."""

MAX_SCORED_REWARDS = 16
"""Rewards of one request."""

MAX_CHECKED_PROMPTS = 1024
"""Prompts of one request to check them."""

MAX_SCORED_SIDE = 8192
MAX_SCORED_RATIO = 8
"""Most ratio of an image's longer side to its shorter side, since rewards enlarge the shorter side."""

MAX_ANSWER_SECONDS = 86_400.0

RewardName = Annotated[str, StringConstraints(min_length=1, max_length=128)]
"""A registered name, or `package.module:attribute`."""


class ScorePrompt(Message):
    """The prompt of an image, unchanged, and its metadata for rewards that read it."""

    text: Annotated[str, StringConstraints(max_length=4096)]
    metadata: Metadata = Field(default_factory=dict)


class ScoreRequest(Message):
    """A request for scores of images with each of the named rewards."""

    rewards: Annotated[tuple[RewardName, ...], Field(min_length=1, max_length=MAX_SCORED_REWARDS, fail_fast=True)]
    prompts: Annotated[tuple[ScorePrompt, ...], Field(min_length=1, max_length=MAX_SCORED_IMAGES, fail_fast=True)]
    """One for each image."""

    @model_validator(mode="after")
    def _rewards_differ(self) -> Self:
        if len(set(self.rewards)) != len(self.rewards):
            raise ValueError("a reward is named twice")
        return self

    @property
    def texts(self) -> list[str]:
        return [prompt.text for prompt in self.prompts]

    @property
    def metadata(self) -> list[dict[str, Any]]:
        return [prompt.metadata for prompt in self.prompts]


class PromptCheck(Message):
    """A question whether a reward can judge images of each of these prompts."""

    reward: RewardName
    prompts: Annotated[tuple[ScorePrompt, ...], Field(min_length=1, max_length=MAX_CHECKED_PROMPTS, fail_fast=True)]


class PromptVerdict(Message):
    """Why a reward cannot judge images of the first unsuitable prompt; null if there is none, or if it does not say."""

    fault: str | None


_Scores = Annotated[tuple[float, ...], Field(max_length=MAX_SCORED_IMAGES, fail_fast=True)]


class ScoreAnswer(Message):
    """Raw scores by reward, in the order of the images, and the digest of each reward that gave them."""

    scores: Annotated[dict[str, _Scores], Field(max_length=MAX_SCORED_REWARDS)]
    digests: Annotated[dict[str, Digest], Field(max_length=MAX_SCORED_REWARDS)]


class RewardInfo(Message):
    """A reward that a service computes."""

    name: str
    digest: Digest
    max_latency_s: Annotated[float, Field(gt=0, le=MAX_ANSWER_SECONDS)] | None = None
    """Seconds that scores may take, for a reward that asks another service and waits for it."""
    takes_clips: Annotated[bool, Field(exclude_if=lambda value: not value)] = False
    """Whether the reward scores clips as a whole; otherwise it gets their frames. Absent if false."""


class RewardList(Message):
    """Answer of `GET /v1/rewards`."""

    rewards: Annotated[tuple[RewardInfo, ...], Field(max_length=256, fail_fast=True)]
