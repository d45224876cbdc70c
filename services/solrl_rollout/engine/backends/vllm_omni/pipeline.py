"""The part in vLLM-Omni's processes: a pipeline of its transformer and our steps, and calls about adapters.

vLLM-Omni imports both classes by name. Only its environment can import this module.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from inspect import signature
from pkgutil import resolve_name
from typing import Any

import torch
from solrl_core.devices import upload
from solrl_core.families import Backbone, Conditioning
from solrl_core.families.skeleton import load_skeleton
from solrl_core.sampling.noise import initial_noise, step_noise
from solrl_core.sampling.sampler import Trajectory, advance, make_solver
from torch import nn
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm_omni.diffusion.attention.layer import Attention
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.distributed.utils import get_local_device
from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader
from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension

from solrl_rollout.engine.backends.vllm_omni.orders import ORDER, Order, as_packed
from solrl_rollout.engine.backends.vllm_omni.peft_adapters import PACKED
from solrl_rollout.engine.backends.vllm_omni.support import FAMILIES

_EXTRA = "solrl_progress"


@dataclass
class _Progress:
    """A request between two steps."""

    order: Order
    conditioning: Conditioning
    trajectory: Trajectory


class RolloutPipeline(nn.Module):
    """vLLM-Omni's transformer of a model, in its step-wise protocol: our noise first, our solver after each pass.

    Encoding and decoding are left to the service, so that no text encoder or autoencoder is loaded here.
    """

    supports_step_execution = True
    # The LoRA manager reads it from here, since the FLUX.1 transformer keeps it to itself.
    stacked_params_mapping = tuple((f".{fused}", f".{part}") for fused, parts in PACKED.items() for part in parts)

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.device = get_local_device()
        self.weights_sources = [
            DiffusersPipelineLoader.ComponentSource(
                model_or_path=od_config.model,
                subfolder="transformer",
                revision=None,
                prefix="transformer.",
                fall_back_to_pt=False,
            )
        ]
        backbone: Backbone = load_skeleton(od_config.model)
        backbone.device, backbone.dtype = self.device, od_config.dtype
        self._backbone = backbone
        with torch.device(self.device):
            self.transformer: nn.Module = _transformer(backbone.family, od_config)

    def to(self, *_: Any, **__: Any) -> "RolloutPipeline":
        """Return this pipeline, made on its device; layers to quantise are on the meta device until they are loaded."""
        return self

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the transformer's weights."""
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights)
        return loaded

    def prepare_encode(self, state: Any, **_: Any) -> Any:
        """Draw a request's noise."""
        order: Order = state.sampling.extra_args[ORDER]
        noise = initial_noise(order.seeds, order.shape)
        first = Trajectory(noise, make_solver(order.solver)).to(self.device)
        conditioning = {
            name: upload(tensor, self.device).expand(len(order.seeds), *tensor.shape[1:]).contiguous()
            for name, tensor in order.conditioning.items()
        }
        state.extra[_EXTRA] = _Progress(order, conditioning, first)
        state.latents = first.x
        state.timesteps = torch.arange(order.steps, device=self.device)
        return state

    def denoise_step(self, input_batch: Any, *, states: Sequence[Any] | None = None, **_: Any) -> torch.Tensor:
        """Velocity of all candidates of the one request."""
        (state,) = states or ()
        now: _Progress = state.extra[_EXTRA]
        sigma = now.order.sigmas[now.trajectory.index]
        x = now.trajectory.x
        at = torch.full((len(x),), sigma, device=self.device)
        return self._backbone.velocity(self.transformer, x, at, now.conditioning, now.order.guidance)

    def step_scheduler(self, state: Any, noise_pred: torch.Tensor, **_: Any) -> None:
        """Take one step of the request's solver."""
        now: _Progress = state.extra[_EXTRA]
        seeds, shape = now.order.seeds, now.order.shape
        now.trajectory = advance(
            lambda x, sigma: noise_pred,
            now.trajectory,
            now.order.sigmas,
            until=now.trajectory.index + 1,
            noise=lambda step: upload(step_noise(seeds, step, shape), self.device),
        )
        state.latents = now.trajectory.x
        state.step_index += 1

    def post_decode(self, state: Any, **_: Any) -> Any:
        """The request's trajectory, on the CPU."""
        now: _Progress = state.extra.pop(_EXTRA)
        return DiffusionOutput(output=as_packed(now.trajectory))


def _transformer(family: str, od_config: Any) -> nn.Module:
    kind = resolve_name(f"vllm_omni.diffusion.models.{FAMILIES[family].transformer}")
    arguments = get_transformer_config_kwargs(od_config.tf_model_config, kind)
    extra = {"od_config": od_config, "quant_config": od_config.quantization_config}
    accepted = extra.keys() & signature(kind).parameters
    transformer: nn.Module = kind(**arguments, **{name: extra[name] for name in accepted})
    return transformer


class RolloutWorker(CustomPipelineWorkerExtension):  # type: ignore[misc]
    """Calls that the service makes in every process of the engine, in addition to vLLM-Omni's own."""

    def solrl_bind(self, name: str, number: int, folder: str) -> None:
        """Load an adapter and make it active; vLLM-Omni raises ValueError if one of its modules finds no layer.

        Afterwards, a request with this number finds it loaded, so the folder may go.
        """
        self.lora_manager.set_active_adapter(LoRARequest(name, number, folder))

    def solrl_quantised(self) -> list[str]:
        """Names of the checkpoint's linear layers that run quantised."""
        names: list[str] = []
        for name, module in self.model_runner.pipeline.transformer.named_modules():
            if isinstance(module, LinearBase) and not isinstance(module.quant_method, UnquantizedLinearMethod):
                parent, _, last = name.rpartition(".")
                names += [f"{parent}.{part}" for part in PACKED.get(last, (last,))]
        return names

    def solrl_attention(self) -> list[str]:
        """vLLM-Omni's names of the transformer's attention kernels."""
        modules = self.model_runner.pipeline.transformer.modules()
        return sorted({module.attn_backend.get_name() for module in modules if isinstance(module, Attention)})
