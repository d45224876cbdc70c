"""Messages about hosted models: digests of all parts that generate or score images, and actual numerics."""

from typing import Annotated, Any, Literal

from pydantic import Field

from solrl_proto.identifiers import Digest, Message, ModelName, Precision

Numerics = Literal["native", "emulated"]
"""Whether the hardware computes in a precision, or its rounding is reproduced in a wider one."""


class NoiseContract(Message):
    """The service's side of the noise contract: its version and the probe row it draws."""

    version: int
    probe: tuple[float, ...]


class RankFidelity(Message):
    """Rank correlation of candidates at a precision with BF16's, measured by a service that loads them for the first
    time. Of several rewards it is the one that suffers most."""

    reward: str
    spearman: Annotated[float, Field(ge=-1, le=1)]
    """Mean over the prompts."""
    low: Annotated[float, Field(ge=-1, le=1)]
    high: Annotated[float, Field(ge=-1, le=1)]
    """Limits of its 95 % interval."""
    prompts: int
    candidates: int
    """Candidates of each prompt."""
    trusted: bool
    """Whether the whole interval is at least 0.6, or BF16 ranks no better by the same plan."""


class PrecisionInfo(Message):
    """One precision as the service runs it."""

    precision: Precision
    numerics: Numerics
    how: str
    """The implementation, tested with a small product at the start; if not native, the reason."""
    quantized_share: float
    """Quantised share of the transformer blocks' linear FLOPs, 0 to 1."""
    rank_fidelity: RankFidelity | None = None
    """Rank fidelity of the service's default precision; null for other precisions, and where it was not measured."""


class ModelInfo(Message):
    """A hosted model."""

    name: ModelName
    family: str
    height: int
    width: int
    frames: Annotated[int, Field(ge=1, exclude_if=lambda value: value == 1)] = 1
    """Frames of a clip; absent for a model that makes images."""
    latent_shape: tuple[int, ...]
    digests: dict[str, Digest]
    """Part name (transformer, text_encoder, tokenizer, vae, scheduler, reward:<name>) to digest."""
    rewards: tuple[str, ...]
    precisions: tuple[PrecisionInfo, ...]
    lora_targets: tuple[str, ...]
    arithmetic: dict[str, str] | None = None
    """What changes the rounding of equal computations, by name: device, threads on a CPU, libraries. Digests leave it
    out."""
    pipeline_call: dict[str, Any] = Field(default_factory=dict)
    """Arguments that make the model's diffusers pipeline generate as the service does without guidance, by name."""


class ModelList(Message):
    """Answer of `GET /v1/models`."""

    noise: NoiseContract
    models: tuple[ModelInfo, ...]
    reward_hosts: Annotated[tuple[str, ...], Field(exclude_if=lambda value: not value)] = ()
    """Addresses of reward servers that a request may name for rewards of its own. Absent if there are none."""
    scopes: Annotated[tuple[str, ...] | None, Field(exclude_if=lambda value: value is None)] = None
    """Scopes of the request's token, such as rollout and push. Absent if the service takes no tokens."""
