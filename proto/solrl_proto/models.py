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


class PrecisionInfo(Message):
    """One precision as the service runs it."""

    precision: Precision
    numerics: Numerics
    how: str
    """The implementation, tested with a small product at the start; if not native, the reason."""
    quantized_share: float
    """Quantised share of the transformer blocks' linear FLOPs, 0 to 1."""


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
