"""A transformer at one precision with one adapter merged, from prompt and seeds to latents and images.

Service and trainer both generate through this, so a seed means the same image on either side.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from solrl_proto.identifiers import Tier
from torch import nn

from solrl_core.adapter import Adapter
from solrl_core.batches import Batch, batches
from solrl_core.families.base import Backbone, stack
from solrl_core.lanes import side_by_side
from solrl_core.lora import Merger, target_modules
from solrl_core.noise import initial_noise, step_noise
from solrl_core.pace import upload
from solrl_core.precision import apply_policy, probe
from solrl_core.sampler import Recorder, Recording, Trajectory, advance
from solrl_core.solvers import SolverSpec, make_solver

PRECISIONS: tuple[Tier, ...] = get_args(Tier)
CHUNK = 24
"""Candidates generated in one batch, on both sides."""
_DECODED_PIXELS = 4 * 1024 * 1024
"""At once: an autoencoder's activations are many times its images."""
_DECODED_ON_GPU = (12, 6, 3, 2, 1)
"""Images at once on a GPU: parts of a batch of 24, so that a whole one needs no filling up."""


@dataclass(frozen=True)
class Generated:
    """Candidates in the order of their seeds.

    Attributes:
        trajectory: where they stand; at its end, or before it.
        images: their clean latents (before the end: as predicted) decoded, float32 [N, 3, H, W] in [0, 1]; none
            where they were not asked for.
        recording: all steps taken, on the generator's device, if they were asked for.
    """

    trajectory: Trajectory
    images: torch.Tensor
    recording: Recording | None = None

    @property
    def latents(self) -> torch.Tensor:
        """Clean latents x0 (before the end: as predicted), float32 [N, ...]."""
        assert self.trajectory.clean is not None
        return self.trajectory.clean


def numerics(precision: str, device: torch.device) -> Literal["native", "emulated"]:
    """Whether `device` computes in `precision`, or its rounding is reproduced in a wider one."""
    return probe(precision, device).numerics or "emulated"


def supported(device: torch.device) -> tuple[Tier, ...]:
    """The precisions that `device` runs, natively or emulated."""
    return tuple(tier for tier in PRECISIONS if probe(tier, device).numerics is not None)


def fastest(device: torch.device) -> Tier:
    """The fastest tier that is native on `device`; an emulation is never it. BF16 on a CPU, which has none faster."""
    return next((tier for tier in PRECISIONS if probe(tier, device).numerics == "native"), "bf16")


class Generator:
    """Generates with its own copy of a backbone's transformer; what no adapter changes is shared with the backbone.

    Attributes:
        precision: "nvfp4", "fp8" or "bf16".
        numerics: "native" if the hardware computes in that precision, "emulated" if its rounding is reproduced
            in a wider one (NVFP4 on all but a Blackwell GPU; BF16 weights with float32 arithmetic on a CPU).
        layout: module → (out_features, in_features) of what an adapter binds.
    """

    def __init__(self, backbone: Backbone, precision: str) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"got precision {precision!r}; expected one of {PRECISIONS}")
        self.backbone = backbone
        self.precision = precision
        self.numerics = numerics(precision, backbone.device)
        clean = target_modules(backbone.transformer, backbone.lora_targets)
        self.transformer = _copy(backbone.transformer, {id(module.weight) for module in clean.values()})
        if precision != "bf16":
            apply_policy(self.transformer, backbone.policy_at(precision), precision)
        self.layout = {name: (module.out_features, module.in_features) for name, module in clean.items()}
        self._merger = Merger(clean, self.transformer)
        if backbone.device.type == "cuda":
            backbone.compile(self.transformer)

    def set_adapter(self, adapter: Adapter | None) -> None:
        """Merge an adapter (None: the base) in place; on an error the one before goes on serving."""
        self._merger.merge(adapter)

    def generate(
        self,
        prompt: str | Sequence[str],
        seeds: Sequence[int],
        *,
        steps: int,
        solver: SolverSpec = "euler",
        guidance: float = 1.0,
        begin: Trajectory | None = None,
        until: int | None = None,
        between: Callable[[], None] | None = None,
        at_once: int = CHUNK,
        decode: bool = True,
        record: bool = False,
    ) -> Generated:
        """Make candidates, wholly or a part of the way.

        Args:
            prompt: the text of all candidates, or one for each.
            seeds: one for each candidate.
            steps: solver steps.
            solver: see `solrl_core.solvers`; a trajectory to begin from has its own.
            guidance: 1.0 is none.
            begin: go on from here, a row for each seed, instead of from the seeds' noise.
            until: stop after so many steps; None for all.
            between: called before each step; raise from it to stop.
            at_once: candidates in one batch at most.
            decode: whether images are wanted.
            record: whether all steps are kept.

        A stochastic solver's noise is `step_noise` of each candidate's seed, so that it does not depend on the batch.
        """
        texts = [prompt] * len(seeds) if isinstance(prompt, str) else list(prompt)
        rows = [self.backbone.conditioning(text, guidance) for text in texts]
        fresh = make_solver(solver) if begin is None else begin.solver
        sigmas = fresh.schedule(steps, self.backbone.sigmas)
        device, shape = self.backbone.device, self.backbone.latent_shape
        turn = threading.Lock()

        def between_steps() -> None:
            if between is not None:
                with turn:
                    between()

        @torch.inference_mode()
        def make(batch: Batch) -> tuple[Trajectory, Recording | None]:
            own_seeds = [seeds[place] for place in batch.places]
            conditioning = stack([rows[place] for place in batch.places])

            def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
                at = torch.full((len(x),), sigma, device=device)
                return self.backbone.velocity(self.transformer, x, at, conditioning, guidance)

            start = Trajectory(initial_noise(own_seeds, shape), fresh) if begin is None else begin.rows(batch.places)
            start = start.to(device)
            recorder = Recorder(start) if record else None
            end = advance(
                velocity,
                start,
                sigmas,
                until=until,
                between=between_steps,
                noise=lambda step: upload(step_noise(own_seeds, step, shape), device),
                recorder=recorder,
            )
            asked_for = slice(batch.count)
            return end.rows(asked_for), None if recorder is None else recorder.recording(sigmas, asked_for)

        made = side_by_side(make, batches(len(seeds), at_once, device), device)
        end = Trajectory.join([trajectory for trajectory, _ in made])
        assert end.clean is not None
        recordings = [recording for _, recording in made if recording is not None]
        images = self.decode(end.clean, at_once) if decode else torch.empty(0)
        return Generated(end, images, Recording.join(recordings) if record else None)

    def decode(self, latents: torch.Tensor, at_once: int = CHUNK) -> torch.Tensor:
        """Images [N, 3, H, W] of latents that were made `at_once`, decoded fewer at a time where they are large."""
        at_once = min(at_once, max(1, _DECODED_PIXELS // (self.backbone.height * self.backbone.width)))
        decode = torch.inference_mode()(self.backbone.decode)
        if latents.device.type == "cpu":
            cut = batches(len(latents), at_once, latents.device)
            parts = side_by_side(decode, [latents[list(batch.places)] for batch in cut], latents.device)
            return torch.cat([part[: batch.count] for part, batch in zip(parts, cut, strict=True)])
        at_once = next(number for number in _DECODED_ON_GPU if number <= at_once)
        # Filled up, because the decoder is compiled for each shape that it meets.
        filled = torch.cat([latents, *[latents[-1:]] * (-len(latents) % at_once)])
        return torch.cat([decode(part) for part in torch.split(filled, at_once)])[: len(latents)]


def _copy(transformer: nn.Module, own: set[int]) -> nn.Module:
    """A copy that has weights of its own where their `id` is in `own`, and shares all others."""
    tensors = [*transformer.parameters(), *transformer.buffers()]
    return copy.deepcopy(transformer, {id(tensor): tensor for tensor in tensors if id(tensor) not in own})
