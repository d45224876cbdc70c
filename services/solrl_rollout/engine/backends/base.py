"""The protocol between the engine and whatever generates candidates.

A backend may run in this process, in another process or in another environment, and may compute with something else
than torch. What passes between the two can always be written as JSON (prompts, plans, identities) and safetensors
(latents, images, adapters), and is never pickled. The queue, turns, scoring and recovery from exhausted memory belong
to the engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from solrl_core.pace import Mark
from solrl_core.sampler import Trajectory
from solrl_proto.identifiers import Tier
from solrl_proto.models import PrecisionInfo
from solrl_proto.rollouts import Plan

from solrl_rollout.engine.work import VersionedAdapter
from solrl_rollout.settings import ModelSpec, Settings


class AdapterMergeError(ValueError):
    """An adapter cannot be merged; the backend still serves the adapter it served before."""


class LayerPrecisionError(ValueError):
    """A layer of the model cannot run at the requested precision."""


@dataclass(frozen=True)
class Identity:
    """The model behind a backend, as trainers compare it and adapters bind to it.

    Attributes:
        family: e.g. "sana".
        height, width: image size in pixels.
        latent_shape: shape of one candidate's latents.
        digests: part (transformer, text_encoder, tokenizer, vae, scheduler) → digest.
        adapter_layout: module → (out_features, in_features) of every LoRA target.
        reward_options: options that the model's own files give to built-in rewards, by reward.
        device: the hardware, for people to read.
    """

    family: str
    height: int
    width: int
    latent_shape: tuple[int, ...]
    digests: Mapping[str, str]
    adapter_layout: Mapping[str, tuple[int, int]]
    reward_options: Mapping[str, Mapping[str, Any]]
    device: str


@dataclass(frozen=True)
class Capabilities:
    """Features of a backend; the service refuses requests that need a missing one.

    Attributes:
        precisions: the precisions it runs, natively or emulated, in the order of preference.
        prunes: whether it stops after some steps and continues from a trajectory.
        cancels: whether it calls `between` before each step. Without that a cancelled chunk runs to its end, and
            health calls wait for it.
        overlaps: whether it leaves this process's CPU free, so that one chunk is scored while the next is generated.
    """

    precisions: tuple[PrecisionInfo, ...]
    prunes: bool
    cancels: bool
    overlaps: bool

    @property
    def fastest(self) -> Tier:
        """The first precision that is native; an emulation is never chosen by itself."""
        return next((info.precision for info in self.precisions if info.numerics == "native"), "bf16")


@dataclass(frozen=True)
class GenerationRequest:
    """Candidates of one prompt that a backend is asked for, all or part of the way.

    Attributes:
        prompt: the text.
        seeds: one seed per candidate, which alone determines its initial noise (`solrl_core.noise`).
        precision: the precision to run at, under the adapter that was set for it last.
        plan: solver, number of steps and guidance. Pruning is the engine's business.
        start: latents to continue from, one row per seed; None for the seeds' noise.
        until: the number of steps behind the candidates when it returns; None for all.
        batch_limit: the most candidates to compute at once.
    """

    prompt: str
    seeds: Sequence[int]
    precision: Tier
    plan: Plan
    start: Trajectory | None
    until: int | None
    batch_limit: int


@dataclass(frozen=True)
class Generation:
    """Candidates in the order of their seeds.

    Attributes:
        images: float32 [N, 3, H, W] in [0, 1], or uint8 [N, H, W, 3]; before the last step, of the predicted latents.
        trajectory: latents from which the candidates can continue; None after the last step.
    """

    images: torch.Tensor
    trajectory: Trajectory | None


class Backend(Protocol):
    """Generates the candidates of one model. All calls come from the engine thread."""

    @property
    def identity(self) -> Identity:
        """The model behind it."""

    @property
    def capabilities(self) -> Capabilities:
        """The features it has."""

    def batch_sizes(self, limit: int) -> Sequence[int]:
        """Sizes of the batches it computes where `limit` candidates fit at once; each is warmed up at the start."""

    def set_adapter(self, precision: Tier, adapter: VersionedAdapter | None) -> None:
        """Serve an adapter at a precision from now on; None is the base model.

        Raises:
            AdapterMergeError: the merged weights are not finite; the previous adapter is still served.
            LayerPrecisionError: the model does not run at this precision.
            torch.OutOfMemoryError: the weights do not fit.
        """

    def generate(self, request: GenerationRequest, between: Callable[[], None]) -> Generation:
        """Generate candidates. The tensors may still be on their way to a GPU's memory when this returns: see `mark`.

        Args:
            request: the candidates.
            between: called before each step, in this thread; if it raises, stop and raise the same.

        Raises:
            torch.OutOfMemoryError: the memory does not hold the batch; a smaller one may fit.
        """

    def mark(self) -> Mark:
        """The point that the device reaches once it has done all that it was asked for so far."""

    def check(self) -> None:
        """Raise if it computes no more, for instance after a device error."""

    def close(self) -> None:
        """End its processes and connections."""


BackendLoader = Callable[[ModelSpec, Settings], Backend]
"""Loads the backend of one model. Raises ValueError, OSError or RuntimeError where it cannot."""
