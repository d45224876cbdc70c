"""The backend: encodes prompts and decodes latents in this process, and has vLLM-Omni take the steps between."""

from collections.abc import Callable, Sequence

import torch
from solrl_core.families.load import load_backbone, model_folder, split_model
from solrl_core.families.skeleton import Meta, load_skeleton
from solrl_core.fingerprint import SCHEDULE, checkpoint_digest, part_digests, schedule_digest
from solrl_core.lora import adapter_layout
from solrl_core.model_options import ImageSize
from solrl_core.precision.support import numerics
from solrl_core.sampling.device_events import DeviceEvent
from solrl_core.sampling.generator import GeneratorOutput, decode_in_batches
from solrl_core.sampling.sampler import Trajectory, make_solver
from solrl_engine.backend import (
    AdapterMergeError,
    Capabilities,
    GenerationRequest,
    Identity,
    VersionedAdapter,
)
from solrl_proto.identifiers import Precision
from solrl_proto.models import PrecisionInfo

from solrl_rollout.engine.backends.vllm_omni.orders import Order
from solrl_rollout.engine.backends.vllm_omni.peft_adapters import adapter_number, peft_folder
from solrl_rollout.engine.backends.vllm_omni.support import INSTALL, VERSIONS, require_packages, served_family
from solrl_rollout.settings import ModelSpec, RolloutSettings

_FULL_SHARE = 0.9
"""Share of the blocks' linear FLOPs. A precision with a larger share needs no label."""


class VllmOmniBackend:
    """A model whose transformer runs in vLLM-Omni, at one precision, with adapters beside the weights, not merged."""

    def __init__(self, spec: ModelSpec, settings: RolloutSettings) -> None:
        """Load the model.

        Raises:
            ValueError: the model or the precision is not supported; the message names the engine that supports it.
            OSError: the model cannot be loaded.
            RuntimeError: the packages are missing or untested, or the engine does not start.
        """
        require_packages()
        if split_model(spec.location)[0] is not None:
            raise ValueError("vllm-omni reads models in diffusers format; serve single files with --engine solrl")
        size = ImageSize(settings.height, settings.width, settings.frames)
        skeleton = load_skeleton(spec.location, revision=spec.revision, size=size)
        served = served_family(skeleton.family, settings.precision)
        self._output = served.output
        folder = model_folder(spec.location, revision=spec.revision)
        device = torch.device(settings.torch_device)
        self._precision: Precision = "fp8" if settings.precision == "fp8" else "bf16"
        self._adapter: tuple[str, int] | None = None
        backbone = load_backbone(str(folder), device=str(device), transformer=skeleton.transformer, size=size)
        self._backbone, self._device = backbone, backbone.device
        if self._device.type == "cuda":
            backbone.compile_decoder()
        other_parts = {name: part for name, part in backbone.parts.items() if part is not skeleton.transformer}
        transformer = checkpoint_digest(skeleton.transformer, folder / "transformer", self._device)
        self.identity = Identity(
            family=backbone.family,
            height=backbone.height,
            width=backbone.width,
            latent_shape=backbone.latent_shape,
            digests={
                "transformer": transformer,
                **part_digests(other_parts),
                SCHEDULE: schedule_digest(backbone.sigmas),
            },
            adapter_layout=adapter_layout(skeleton.transformer, backbone.lora_targets),
            reward_options=backbone.options.rewards,
            device=str(self._device),
            pipeline_call=backbone.pipeline_arguments,
        )
        try:
            # Imported here, where both packages are installed. For some models they import further packages.
            from solrl_rollout.engine.backends.vllm_omni.engine import OmniEngine

            self._engine = OmniEngine(
                folder, served.pipeline, device, quantise=self._precision == "fp8", options=settings.engine_options
            )
        except ImportError as error:
            raise RuntimeError(
                f"--engine vllm-omni cannot import what it needs here, {error}: install all packages of {INSTALL}"
            ) from error
        try:
            share = 0.0
            if self._precision == "fp8":
                with Meta():
                    share = skeleton.share_of(self._engine.call("solrl_quantised"))
            self.capabilities = Capabilities(precisions=(self._describe(share),), overlaps=self._device.type == "cuda")
        except BaseException:
            self._engine.close()
            raise

    def batch_sizes(self, limit: int) -> Sequence[int]:
        """One size: vLLM-Omni compiles for all of them."""
        return (limit,)

    def set_adapter(self, precision: Precision, adapter: VersionedAdapter | None) -> None:
        """Load an adapter; on an error the previous one is still served."""
        if adapter is None:
            self._adapter = None
            return
        number = adapter_number(adapter.digest)
        try:
            with peft_folder(adapter.adapter, output=self._output) as folder:
                self._engine.call("solrl_bind", adapter.digest, number, str(folder))
        except torch.OutOfMemoryError:
            raise
        except (ValueError, RuntimeError) as error:
            # It may be loaded, though it is not bound, and would take the place of the served one.
            self._engine.call("remove_lora", number)
            raise AdapterMergeError(str(error)) from error
        self._adapter = adapter.digest, number

    def generate(
        self, request: GenerationRequest, batch_size: int, between: Callable[[], None] | None = None
    ) -> GeneratorOutput:
        """Generate candidates; the images are still being decoded on a GPU when this returns."""
        plan, size = request.plan, batch_size
        solver = plan.solver_spec
        sigmas = make_solver(solver).schedule(plan.steps, self._backbone.sigmas)
        conditioning = self._backbone.conditioning(request.prompt, plan.guidance)
        there = {name: tensor.cpu() for name, tensor in conditioning.items()}
        ends = []
        for first in range(0, len(request.seeds), size):
            rows = slice(first, first + size)
            order = Order(
                conditioning=there,
                guidance=plan.guidance,
                seeds=tuple(request.seeds[rows]),
                solver=solver,
                sigmas=sigmas,
                shape=self._backbone.latent_shape,
            )
            ends.append(self._engine.generate(order, self._adapter, between or (lambda: None)))
        end = Trajectory.join(ends).to(self._device)
        assert end.clean is not None
        images = decode_in_batches(self._backbone, end.clean, size)
        return GeneratorOutput(end, images)

    def record_event(self) -> DeviceEvent:
        """Record an event in this process's work; the engine's is finished whenever `generate` returns."""
        return DeviceEvent(self._device)

    def check(self) -> None:
        """Raise if the device or a process of the engine no longer works."""
        torch.ones(1, device=self._device).sum().item()
        self._engine.check()

    def close(self) -> None:
        """End the engine's processes."""
        self._engine.close()

    def _describe(self, share: float) -> PrecisionInfo:
        attention = " and ".join(self._engine.call("solrl_attention"))
        how = f"vLLM-Omni {VERSIONS['vllm-omni']}, attention by {attention}"
        if self._precision == "fp8" and share < _FULL_SHARE:
            how += f", fp8-partial: {share:.0%} of the blocks' linear FLOPs, the rest in bfloat16"
        return PrecisionInfo(
            precision=self._precision,
            numerics=numerics(self._precision, self._device),
            how=how,
            quantized_share=share,
        )
