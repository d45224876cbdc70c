"""The protocol of backends, which generate the candidates of one model.

A backend may run in this process, in another process or in another environment, and need not use torch to compute.
All data between the two can be written as JSON (prompts, plans, identities) and safetensors (latents, images,
adapters); nothing is pickled. Queueing, scoring and recovery from exhausted memory are the caller's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from solrl_core.adapter import Adapter
from solrl_core.sampling.device_events import DeviceEvent
from solrl_core.sampling.generator import GeneratorOutput
from solrl_proto.identifiers import Precision
from solrl_proto.models import PrecisionInfo
from solrl_proto.rollouts import Plan


class AdapterMergeError(ValueError):
    """An adapter cannot be merged; the backend still serves the adapter it served before."""


class LayerPrecisionError(ValueError):
    """A layer of the model cannot run at the requested precision."""


@dataclass(frozen=True, eq=False)
class VersionedAdapter:
    """A decoded adapter, and the digest that names its content."""

    digest: str
    adapter: Adapter


@dataclass(frozen=True)
class Identity:
    """Identity of a backend's model, which trainers compare and adapters are bound to.

    Attributes:
        family: e.g. "sana".
        height, width: image size in pixels.
        frames: frames of a clip; 1 for images.
        latent_shape: shape of one candidate's latents.
        digests: part (transformer, text_encoder, tokenizer, vae, scheduler, schedule) → digest.
        adapter_layout: module → (out_features, in_features) of every LoRA target.
        reward_options: reward → options for built-in rewards from the model's files.
        device: description of the hardware.
        pipeline_call: arguments that make the model's diffusers pipeline generate as this backend, without guidance.
    """

    family: str
    height: int
    width: int
    latent_shape: tuple[int, ...]
    digests: Mapping[str, str]
    adapter_layout: Mapping[str, tuple[int, int]]
    reward_options: Mapping[str, Mapping[str, Any]]
    device: str
    pipeline_call: Mapping[str, Any] = field(default_factory=dict)
    frames: int = 1


@dataclass(frozen=True)
class Capabilities:
    """Features of a backend.

    Attributes:
        precisions: supported precisions, native or emulated, in order of preference.
        overlaps: it leaves this process's CPU free, so one chunk can be scored while the next is generated.
    """

    precisions: tuple[PrecisionInfo, ...]
    overlaps: bool

    @property
    def fastest(self) -> Precision:
        """The fastest native precision, never an emulation; BF16 if there is no other."""
        return next((info.precision for info in self.precisions if info.numerics == "native"), "bf16")


@dataclass(frozen=True)
class GenerationRequest:
    """Candidates to generate together.

    Attributes:
        prompts: one text for each candidate.
        seeds: one seed for each, which alone determines its noise (`solrl_core.sampling.noise`).
        plan: number of steps, solver and guidance.
        precision: precision to run at, with the adapter that was last set for it.
    """

    prompts: Sequence[str]
    seeds: Sequence[int]
    plan: Plan
    precision: Precision

    @property
    def prompt(self) -> str:
        """The first candidate's prompt, for a caller whose candidates all have it."""
        return self.prompts[0]

    def rows(self, which: slice) -> Self:
        return replace(self, prompts=self.prompts[which], seeds=self.seeds[which])


class Backend(Protocol):
    """Generates the candidates of one model. All calls come from one thread of its worker."""

    @property
    def identity(self) -> Identity:
        """Identity of its model."""

    @property
    def capabilities(self) -> Capabilities:
        """Features it supports."""

    def batch_sizes(self, limit: int) -> Sequence[int]:
        """Batch sizes that it uses if at most `limit` candidates fit; each is warmed up at the start."""

    def set_adapter(self, precision: Precision, adapter: VersionedAdapter | None) -> None:
        """Switch a precision of its capabilities to an adapter; None is the base model.

        Raises:
            AdapterMergeError: the merged weights are not finite; the previous adapter is still served.
            LayerPrecisionError: the model does not run at this precision.
            torch.OutOfMemoryError: the weights do not fit.
        """

    def generate(
        self, request: GenerationRequest, batch_size: int, between: Callable[[], None] | None = None
    ) -> GeneratorOutput:
        """Generate candidates. A GPU may still be computing the tensors when this returns; see `record_event`.

        Args:
            request: the candidates.
            batch_size: largest batch.
            between: called before each step, in this thread; if it raises, generation stops with its error. So the
                caller can cancel, and do small work of its own.

        Raises:
            torch.OutOfMemoryError: the batch does not fit into memory; a smaller one may.
        """

    def record_event(self) -> DeviceEvent:
        """Record an event that the device reaches when it has finished all work submitted so far."""

    def check(self) -> None:
        """Raise if it no longer works, e.g. after a device error."""

    def close(self) -> None:
        """Close its processes and connections."""
