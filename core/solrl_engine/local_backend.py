"""A backend in this process: solrl_core on the CPU or one GPU."""

from collections.abc import Callable, Sequence

import torch
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.fingerprint import SCHEDULE, part_digests, schedule_digest
from solrl_core.lora import adapter_layout
from solrl_core.precision.support import numerics, probe, supported_precisions
from solrl_core.sampling.batches import gpu_batch_sizes
from solrl_core.sampling.device_events import DeviceEvent, RunAheadLimit
from solrl_core.sampling.generator import Generator, GeneratorOutput
from solrl_proto.identifiers import Precision
from solrl_proto.models import PrecisionInfo

from solrl_engine.backend import (
    AdapterMergeError,
    Capabilities,
    GenerationRequest,
    Identity,
    LayerPrecisionError,
    VersionedAdapter,
)


class LocalBackend:
    """A backbone with one generator per precision, each built when it is first needed."""

    def __init__(self, backbone: PipelineBackbone, *, emulates: bool = True) -> None:
        """Serve a backbone at the precisions of its device; NVFP4 that it only emulates if `emulates`."""
        self.backbone = backbone
        self._device = backbone.device
        self._generators: dict[Precision, Generator] = {}
        self._run_ahead = RunAheadLimit(self.record_event)
        self.identity = Identity(
            family=backbone.family,
            height=backbone.height,
            width=backbone.width,
            latent_shape=backbone.latent_shape,
            digests={**part_digests(backbone.parts), SCHEDULE: schedule_digest(backbone.sigmas)},
            adapter_layout=adapter_layout(backbone.transformer, backbone.lora_targets),
            reward_options=backbone.options.rewards,
            device=str(backbone.device),
            pipeline_call=backbone.pipeline_arguments,
            frames=backbone.frames,
        )
        self.capabilities = Capabilities(
            precisions=tuple(
                PrecisionInfo(
                    precision=precision,
                    numerics=numerics(precision, backbone.device),
                    how=probe(precision, backbone.device).how,
                    quantized_share=backbone.quantized_share(precision),
                )
                for precision in supported_precisions(backbone.device)
                if emulates or precision != "nvfp4" or numerics(precision, backbone.device) == "native"
            ),
            overlaps=backbone.device.type == "cuda",
        )

    def batch_sizes(self, limit: int) -> Sequence[int]:
        """Two sizes on a GPU, since each is compiled; `limit` on a CPU."""
        return (limit,) if self._device.type == "cpu" else gpu_batch_sizes(limit)

    def generator(self, precision: Precision) -> Generator:
        """The generator of a precision, built if it is not yet there.

        Raises:
            LayerPrecisionError: the model does not run at this precision.
        """
        if precision not in self._generators:
            try:
                self._generators[precision] = Generator(self.backbone, precision)
            except ValueError as error:
                raise LayerPrecisionError(str(error)) from error
        return self._generators[precision]

    def set_adapter(self, precision: Precision, adapter: VersionedAdapter | None) -> None:
        new = precision not in self._generators
        generator = self.generator(precision)
        if new and adapter is None:
            return
        try:
            generator.set_adapter(adapter.adapter if adapter else None)
        except ValueError as error:
            raise AdapterMergeError(str(error)) from error

    def generate(
        self, request: GenerationRequest, batch_size: int, between: Callable[[], None] | None = None
    ) -> GeneratorOutput:
        """Generate candidates; on a GPU they are only queued when this returns, except for the last step."""

        def step() -> None:
            self._run_ahead.step()
            if between is not None:
                between()

        plan = request.plan
        return self._generators[request.precision].generate(
            request.prompts,
            request.seeds,
            steps=plan.steps,
            solver=plan.solver_spec,
            guidance=plan.guidance,
            between=step,
            batch_limit=batch_size,
        )

    def record_event(self) -> DeviceEvent:
        return DeviceEvent(self._device)

    def check(self) -> None:
        torch.ones(1, device=self._device).sum().item()

    def close(self) -> None:
        """Do nothing: the backend has no processes or connections."""
