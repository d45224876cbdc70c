"""Generation of candidates: prompts and seeds in, latents and images out.

Service and trainer both use this module, so a seed gives the same image on both sides.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from solrl_core.adapter import Adapter
from solrl_core.devices import upload
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.lora import Merger, target_modules
from solrl_core.precision.layer_policy import apply_policy
from solrl_core.precision.layers import QuantLinear
from solrl_core.precision.support import PRECISIONS, numerics
from solrl_core.rewards.images import as_pil
from solrl_core.sampling.batches import CHUNK_SIZE, PaddedBatch, padded_batches
from solrl_core.sampling.cpu_threads import map_in_threads
from solrl_core.sampling.noise import initial_noise, step_noise
from solrl_core.sampling.sampler import Recorder, Recording, SolverSpec, Trajectory, advance, make_solver

_DECODED_PIXELS = 12 * 512 * 512
"""Pixels decoded per batch: an autoencoder's activations are many times larger than its images."""


@dataclass(frozen=True)
class GeneratorOutput:
    """Candidates in the order of their seeds.

    Attributes:
        trajectory: the state that lets the candidates continue, unless all steps are taken.
        images: decoded clean latents (before the last step: as predicted), float32 [N, 3, H, W] in [0, 1], or clips
            [N, F, 3, H, W]; empty without `decode`.
        recording: all steps taken, on the generator's device; None without `record`.
    """

    trajectory: Trajectory
    images: Tensor
    recording: Recording | None = None

    @property
    def latents(self) -> Tensor:
        """Clean latents x0 (before the last step: as predicted), float32 [N, ...]."""
        assert self.trajectory.clean is not None
        return self.trajectory.clean

    @staticmethod
    def join(parts: Sequence["GeneratorOutput"]) -> "GeneratorOutput":
        """The candidates of all parts, in their order."""
        if len(parts) == 1:
            return parts[0]
        recordings = [part.recording for part in parts if part.recording is not None]
        return GeneratorOutput(
            Trajectory.join([part.trajectory for part in parts]),
            torch.cat([part.images for part in parts]),
            Recording.join(recordings) if recordings else None,
        )

    def pil(self) -> list[Image.Image]:
        """The images, or each clip's frames, as notebooks show them: 8-bit RGB, rounded to nearest."""
        return as_pil(self.images)


class Generator:
    """A transformer at one precision with one adapter merged.

    It is a copy of the backbone's transformer, which shares all weights that no adapter changes.

    Attributes:
        precision: "nvfp4", "fp8" or "bf16".
        numerics: "native" if the hardware computes in that precision, "emulated" if its rounding is reproduced
            in a wider one (NVFP4 on all but a Blackwell GPU; BF16 weights with float32 arithmetic on a CPU).
        layout: module → (out_features, in_features) of every module that an adapter binds.
    """

    def __init__(self, backbone: PipelineBackbone, precision: str) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"got precision {precision!r}; expected one of {PRECISIONS}")
        self.backbone = backbone
        self.precision = precision
        self.numerics = numerics(precision, backbone.device)
        clean = target_modules(backbone.transformer, backbone.lora_targets)
        # Quantised layers get new weights. Copying the old ones first would only raise the peak of memory.
        quantised = set() if precision == "bf16" else set(backbone.policy_at(precision).select(backbone.transformer))
        copied = {id(module.weight) for name, module in clean.items() if name not in quantised}
        tensors = [*backbone.transformer.parameters(), *backbone.transformer.buffers()]
        shared = {id(tensor): tensor for tensor in tensors if id(tensor) not in copied}
        self.transformer = copy.deepcopy(backbone.transformer, shared)
        if precision != "bf16":
            apply_policy(self.transformer, backbone.policy_at(precision), precision, backbone.device)
        self.layout = {name: (module.out_features, module.in_features) for name, module in clean.items()}
        self._merger = Merger(clean, self.transformer)
        if backbone.device.type == "cuda":
            backbone.compile(self.transformer)
        elif backbone.device.type == "cpu":
            pad_to_min_rows(self.transformer)

    def merge_through(self, read: Callable[[str], Tensor], write: Callable[[nn.Module, Tensor], None]) -> None:
        """Merge adapters into weights that are read and written by these from now on; see `Merger.through`."""
        self._merger.through(read, write, self.backbone.device)

    def set_adapter(self, adapter: Adapter | None) -> None:
        """Merge an adapter (None: the base) in place; on an error the previous one stays.

        Raises:
            ValueError: an adapted weight overflows.
        """
        self._merger.merge(adapter)

    def generate(
        self,
        prompt: str | Sequence[str],
        seeds: Sequence[int],
        *,
        steps: int,
        solver: SolverSpec = "euler",
        guidance: float = 1.0,
        start: Trajectory | None = None,
        until: int | None = None,
        between: Callable[[], None] | None = None,
        batch_limit: int = CHUNK_SIZE,
        decode: bool = True,
        record: bool = False,
    ) -> GeneratorOutput:
        """Generate candidates, all or part of the way.

        A stochastic solver's noise is `step_noise` of each candidate's seed, so it does not depend on the batch.

        Args:
            prompt: the text of all candidates, or one for each.
            seeds: one for each candidate.
            steps: solver steps.
            solver: see `SolverSpec`; `start` has its own.
            guidance: 1.0 is none.
            start: trajectory to continue, one row per seed; None for the seeds' initial noise.
            until: number of steps to take; None for all.
            between: called before each step, by one thread at a time; raise from it to stop.
            batch_limit: largest number of candidates in a batch.
            decode: whether to decode images.
            record: whether to record all steps.

        Raises:
            ValueError: unknown solver, or `until` is not after `start`.
        """
        texts = [prompt] * len(seeds) if isinstance(prompt, str) else list(prompt)
        prompts = [self.backbone.conditioning(text, guidance) for text in texts]
        own_solver = make_solver(solver) if start is None else start.solver
        sigmas = own_solver.schedule(steps, self.backbone.sigmas)
        device, shape = self.backbone.device, self.backbone.latent_shape
        lock = threading.Lock()

        def between_steps() -> None:
            if between is not None:
                with lock:
                    between()

        @torch.inference_mode()
        def run(batch: PaddedBatch) -> tuple[Trajectory, Recording | None]:
            own_seeds = [seeds[row] for row in batch.rows]
            conditioning = self.backbone.stack([prompts[row] for row in batch.rows])

            def velocity(x: Tensor, sigma: float) -> Tensor:
                at = torch.full((len(x),), sigma, device=device)
                return self.backbone.velocity(self.transformer, x, at, conditioning, guidance)

            first = Trajectory(initial_noise(own_seeds, shape), own_solver) if start is None else start.rows(batch.rows)
            first = first.to(device)
            recorder = Recorder(first) if record else None
            end = advance(
                velocity,
                first,
                sigmas,
                until=until,
                between=between_steps,
                noise=lambda step: upload(step_noise(own_seeds, step, shape), device),
                recorder=recorder,
            )
            unpadded = slice(batch.count)
            return end.rows(unpadded), None if recorder is None else recorder.recording(sigmas, unpadded)

        parts = map_in_threads(run, padded_batches(len(seeds), batch_limit, device), device)
        end = Trajectory.join([trajectory for trajectory, _ in parts])
        assert end.clean is not None
        recordings = [recording for _, recording in parts if recording is not None]
        images = self.decode(end.clean, batch_limit) if decode else torch.empty(0)
        return GeneratorOutput(end, images, Recording.join(recordings) if record else None)

    def decode(self, latents: Tensor, batch_limit: int = CHUNK_SIZE) -> Tensor:
        """Decode latents with the backbone; see `decode_in_batches`."""
        return decode_in_batches(self.backbone, latents, batch_limit)


def decode_in_batches(backbone: PipelineBackbone, latents: Tensor, batch_limit: int = CHUNK_SIZE) -> Tensor:
    """Decode latents [N, ...] to images or clips, at most `batch_limit` at a time; see `PipelineBackbone.decode`."""
    pixel_limit = max(1, _DECODED_PIXELS // (backbone.frames * backbone.height * backbone.width))
    cut = padded_batches(len(latents), min(batch_limit, pixel_limit), latents.device)
    rows = [latents[list(batch.rows)] for batch in cut]
    parts = map_in_threads(torch.inference_mode()(backbone.decode), rows, latents.device)
    return torch.cat([part[: batch.count] for part, batch in zip(parts, cut, strict=True)])


FEWEST_ROWS = 16


def pad_to_min_rows(transformer: nn.Module) -> None:
    """Compute at least `FEWEST_ROWS` rows in each linear layer of a transformer that gets [rows, in]; in place."""
    for module in transformer.modules():
        if isinstance(module, nn.Linear | QuantLinear):
            module.forward = partial(_padded, module.forward)  # type: ignore[method-assign]


def _padded(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    count = len(x)
    if x.ndim != 2 or count >= FEWEST_ROWS:
        return forward(x)
    return forward(F.pad(x, (0, 0, 0, FEWEST_ROWS - count)))[:count]
