"""vLLM-Omni's call surface with a small engine behind it, in this process, on a CPU.

Names, parameters and the order of calls are those of vllm 0.30.0 and vllm-omni 0.30.0: `test_vllm_omni_wheel.py`
compares them with the wheel. The engine computes with diffusers' transformer, its projections fused as vLLM-Omni fuses
them, merges adapters, and passes every request through pickle as between vLLM-Omni's processes.
"""

import json
import pickle
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum, auto
from importlib import metadata
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType, SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file
from torch import nn


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""


class UnquantizedLinearMethod:
    pass


class Fp8LinearMethod:
    pass


LinearBase = nn.Linear


class AutoWeightsLoader:
    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        named = ((name.removeprefix("transformer."), tensor) for name, tensor in weights)
        return {f"transformer.{name}" for name in self._module.get_submodule("transformer").load_weights(named)}


@dataclass
class OmniDiffusionConfig:
    model: str = ""
    model_class_name: str | None = None
    dtype: torch.dtype = torch.bfloat16
    quantization_config: Any = None
    output_type: str = "pil"
    step_execution: bool = False
    max_num_seqs: int = 1
    max_cpu_loras: int = 1
    custom_pipeline_args: dict[str, Any] | None = None
    worker_extension_cls: str | None = None
    distributed_executor_backend: str | None = None
    tf_model_config: Any = None

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "OmniDiffusionConfig":
        return cls(**kwargs)

    def enrich_config(self) -> None:
        self.tf_model_config = json.loads((Path(self.model) / "transformer" / "config.json").read_text())


@dataclass
class DiffusionOutput:
    output: Any = None
    error: str | None = None


@dataclass
class OmniDiffusionSamplingParams:
    num_outputs_per_prompt: int = 1
    seed: int | None = None
    step_index: int | None = None
    num_inference_steps: int | None = None
    extra_args: dict[str, Any] = field(default_factory=dict)
    lora_request: LoRARequest | None = None


@dataclass
class OmniDiffusionRequest:
    prompt: Any
    sampling_params: OmniDiffusionSamplingParams
    request_id: str


class DiffusionRequestStatus(IntEnum):
    FINISHED_ABORTED = auto()


class StepScheduler:
    def __init__(self) -> None:
        self.requests: dict[str, OmniDiffusionRequest] = {}
        self.finished: set[str] = set()

    def initialize(self, od_config: OmniDiffusionConfig) -> None:
        assert od_config.max_num_seqs == 1

    def add_request(self, request: OmniDiffusionRequest) -> str:
        assert (request.sampling_params.num_inference_steps or 0) > 0
        self.requests[request.request_id] = request
        return request.request_id

    def schedule(self) -> Any:
        finished, self.finished = self.finished, set()
        return next(iter(self.requests.values())), finished

    def finish_requests(self, request_ids: str | list[str], status: DiffusionRequestStatus) -> None:
        assert isinstance(request_ids, str)
        self.finished.add(request_ids)

    def pop_request_state(self, request_id: str) -> Any:
        return self.requests.pop(request_id, None)


class DiffusersPipelineLoader:
    @dataclass
    class ComponentSource:
        model_or_path: str
        subfolder: str | None
        revision: str | None
        prefix: str = ""
        fall_back_to_pt: bool = True


def get_local_device() -> torch.device:
    return torch.device("cpu")


def get_transformer_config_kwargs(tf_model_config: Any, model_class: Any = None) -> dict[str, Any]:
    return {name: value for name, value in tf_model_config.items() if not name.startswith("_")}


class Attention(nn.Module):
    """Names its kernel, and is not called: diffusers' transformer attends by itself."""

    attn_backend = SimpleNamespace(get_name=lambda: "SDPA")


class FluxTransformer2DModel(diffusers.FluxTransformer2DModel):
    """With `to_qkv` for the image's projections. At fp8, only the single-stream blocks count as quantised."""

    def __init__(self, od_config: Any = None, quant_config: Any = None, **config: Any) -> None:
        super().__init__(**config)
        self.attentions = nn.ModuleList([Attention(), Attention()])
        self.quantised = quant_config is not None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        tensors = {name: tensor.bfloat16().float() for name, tensor in weights}
        self.load_state_dict(tensors)
        self.fuse_qkv_projections()
        for attention in [module for module in self.modules() if hasattr(module, "to_qkv")]:
            del attention.to_q, attention.to_k, attention.to_v
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                fp8 = self.quantised and name.startswith("single_") and not name.endswith("norm.linear")
                module.quant_method = Fp8LinearMethod() if fp8 else UnquantizedLinearMethod()
        return set(tensors)


class LoraManager:
    """Like vLLM-Omni's, it keeps an adapter that it could not bind to its layers. Here it merges them.

    Attributes:
        slices: the checkpoint's name of each linear layer → its part of a weight, and this part without an adapter.
    """

    def __init__(self, pipeline: Any, cached: int) -> None:
        self._cached = cached
        self._adapters: dict[int, tuple[list[str], dict[str, torch.Tensor]]] = {}
        self._active: int | None = None
        self.slices: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        packed: dict[str, list[str]] = {}
        for fused, part in pipeline.stacked_params_mapping:
            packed.setdefault(fused.strip("."), []).append(part.strip("."))
        for name, module in pipeline.transformer.named_modules():
            if isinstance(module, nn.Linear):
                parent, _, last = name.rpartition(".")
                parts = packed.get(last, [last])
                for part, weight in zip(parts, module.weight.data.chunk(len(parts)), strict=True):
                    self.slices[f"{parent}.{part}"] = weight, weight.clone()

    def set_active_adapter(self, lora_request: LoRARequest | None) -> None:
        number = None if lora_request is None else lora_request.lora_int_id
        if number == self._active:
            return
        if lora_request is not None and number not in self._adapters:
            self._load(lora_request)
        self._active = None
        for weight, base in self.slices.values():
            weight.copy_(base)
        if number is None:
            return
        targets, tensors = self._adapters[number] = self._adapters.pop(number)  # the newest
        unbound = {key.rpartition(".lora_")[0] for key in tensors}
        for name, (weight, _) in self.slices.items():
            module = f"base_model.model.{name}"
            if module in unbound and any(re.match(rf".*\.{target}$", name) for target in targets):
                unbound.remove(module)
                weight += tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
        if unbound:
            raise ValueError(f"LoRA adapter {number} binding is incomplete: unbound modules={sorted(unbound)}")
        self._active = number

    def remove_adapter(self, adapter_id: int) -> bool:
        if self._active == adapter_id:
            self.set_active_adapter(None)
        return self._adapters.pop(adapter_id, None) is not None

    def _load(self, request: LoRARequest) -> None:
        while len(self._adapters) >= self._cached:
            self.remove_adapter(next(iter(self._adapters)))
        folder = Path(request.lora_path)
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["lora_alpha"] == config["r"]
        tensors = load_file(folder / "adapter_model.safetensors")
        self._adapters[request.lora_int_id] = config["target_modules"], tensors


class CustomPipelineWorkerExtension:
    lora_manager: LoraManager
    model_runner: Any

    def remove_lora(self, adapter_id: int) -> bool:
        return self.lora_manager.remove_adapter(adapter_id)


@dataclass
class StepRequestState:
    sampling: OmniDiffusionSamplingParams
    latents: torch.Tensor | None = None
    timesteps: torch.Tensor | None = None
    step_index: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


class DiffusionEngine:
    """The engine, its executor and its one worker.

    Attributes:
        states: requests that the worker holds; empty between requests, except for an aborted one until the next.
        fail: raised by the next step.
    """

    last: "DiffusionEngine"

    def __init__(self, od_config: OmniDiffusionConfig, scheduler: StepScheduler) -> None:
        assert od_config.step_execution
        assert od_config.distributed_executor_backend == "mp"
        assert od_config.custom_pipeline_args is not None
        od_config.dtype = torch.float32  # this processor's
        self.executor = self
        self.scheduler = scheduler
        self.scheduler.initialize(od_config)
        self.closed = False
        self.fail: Exception | None = None
        self.states: dict[str, StepRequestState] = {}
        self.pipeline = resolve_name(od_config.custom_pipeline_args["pipeline_class"])(od_config=od_config).to("cpu")
        (source,) = self.pipeline.weights_sources
        (file,) = (Path(source.model_or_path) / source.subfolder).glob("*.safetensors")
        expected = {name for name, _ in self.pipeline.named_parameters()}
        weights = {source.prefix + name: tensor for name, tensor in load_file(file).items()}
        assert self.pipeline.load_weights(weights.items()) == expected
        self.worker = resolve_name(str(od_config.worker_extension_cls))()
        self.worker.lora_manager = LoraManager(self.pipeline, od_config.max_cpu_loras)
        self.worker.model_runner = self
        DiffusionEngine.last = self

    @torch.inference_mode()
    def add_req_and_wait_for_response(self, request: OmniDiffusionRequest) -> DiffusionOutput:
        assert not self.closed
        self.scheduler.add_request(request)
        while True:
            try:
                _, finished = self.scheduler.schedule()
            except Exception:
                self.closed = True
                raise
            try:
                output = self._step(request, finished)
            except Exception as error:
                output = DiffusionOutput(error=f"Worker failed with error '{error}'")
            if output is not None:
                self.scheduler.finished.add(request.request_id)
                self.scheduler.pop_request_state(request.request_id)
                return output

    def _step(self, request: OmniDiffusionRequest, finished: set[str]) -> DiffusionOutput | None:
        for name in finished:
            self.states.pop(name, None)
        self.worker.lora_manager.set_active_adapter(request.sampling_params.lora_request)
        if (state := self.states.get(request.request_id)) is None:
            there: OmniDiffusionRequest = pickle.loads(pickle.dumps(request))
            state = self.states[request.request_id] = StepRequestState(there.sampling_params)
            self.pipeline.prepare_encode(state)
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        velocity = self.pipeline.denoise_step(None, states=[state])
        self.pipeline.step_scheduler(state, velocity)
        assert state.timesteps is not None
        if state.step_index < len(state.timesteps):
            return None
        output: DiffusionOutput = pickle.loads(pickle.dumps(self.pipeline.post_decode(state)))
        del self.states[request.request_id]
        return output

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        try:
            return [getattr(self.worker, method)(*args)]
        except Exception as error:
            raise RuntimeError(f"RPC '{method}' failed on worker rank(s): {error}") from error

    def check_health(self) -> None:
        if self.closed:
            raise RuntimeError("the worker is dead")

    def close(self) -> None:
        self.closed = True


SURFACE: dict[str, tuple[Any, ...]] = {
    **{"vllm.lora.request": (LoRARequest,), "vllm.model_executor.layers.linear": (UnquantizedLinearMethod,)},
    "vllm.model_executor.models.utils": (AutoWeightsLoader,),
    "vllm_omni.diffusion.attention.layer": (Attention,),
    "vllm_omni.diffusion.data": (DiffusionOutput, OmniDiffusionConfig),
    "vllm_omni.diffusion.diffusion_engine": (DiffusionEngine,),
    "vllm_omni.diffusion.distributed.utils": (get_local_device,),
    "vllm_omni.diffusion.model_loader.diffusers_loader": (DiffusersPipelineLoader,),
    "vllm_omni.diffusion.models.flux.flux_transformer": (FluxTransformer2DModel,),
    **{"vllm_omni.diffusion.request": (OmniDiffusionRequest,), "vllm_omni.diffusion.sched": (StepScheduler,)},
    "vllm_omni.diffusion.sched.interface": (DiffusionRequestStatus,),
    "vllm_omni.diffusion.utils.tf_utils": (get_transformer_config_kwargs,),
    "vllm_omni.diffusion.worker.diffusion_worker": (CustomPipelineWorkerExtension,),
    "vllm_omni.inputs.data": (OmniDiffusionSamplingParams,),
}
"""Module → what the backend imports from it."""


def install(patch: pytest.MonkeyPatch) -> None:
    """Put the modules where the backend imports them, and their versions where it looks them up."""
    from solrl_rollout.engine.backends.vllm_omni import support

    for name, found in SURFACE.items():
        for parent in [name[: dot.start()] for dot in re.finditer(r"\.", name)]:
            if parent not in sys.modules:
                package = ModuleType(parent)
                package.__path__ = []
                patch.setitem(sys.modules, parent, package)
        module = ModuleType(name)
        module.__path__ = []
        for one in found:
            setattr(module, one.__name__, one)
        patch.setitem(sys.modules, name, module)
    sys.modules["vllm.model_executor.layers.linear"].LinearBase = LinearBase  # type: ignore[attr-defined]
    ours = "solrl_rollout.engine.backends.vllm_omni"
    for part in ("engine", "pipeline"):
        patch.delitem(sys.modules, f"{ours}.{part}", raising=False)
    others = metadata.version
    patch.setattr(metadata, "version", lambda name: support.VERSIONS.get(name) or others(name))
