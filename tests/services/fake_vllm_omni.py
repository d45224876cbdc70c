"""vLLM-Omni's call surface with a small engine behind it, in this process, on a CPU.

Names, parameters and the order of calls are those of vllm 0.30.0 and vllm-omni 0.30.0: `test_vllm_omni_wheel.py`
compares them with the wheel. The engine computes with diffusers' transformer, its projections fused as vLLM-Omni fuses
them, adds adapters to their outputs, and passes every request through pickle as between vLLM-Omni's processes.
"""

import json
import pickle
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from enum import IntEnum, auto
from importlib import metadata
from pathlib import Path
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
        by_child: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in weights:
            child, _, rest = name.partition(".")
            by_child.setdefault(child, {})[rest] = tensor
        return {
            f"{child}.{name}"
            for child, own in by_child.items()
            for name in self._module.get_submodule(child).load_weights(own.items())
        }


@dataclass
class OmniDiffusionConfig:
    model: str = ""
    model_class_name: str | None = None
    dtype: torch.dtype = torch.bfloat16
    parallel_config: Any = None
    quantization_config: Any = None
    output_type: str = "pil"
    step_execution: bool = False
    max_num_seqs: int = 1
    max_cpu_loras: int | None = None
    custom_pipeline_args: dict[str, Any] | None = None
    worker_extension_cls: str | None = None
    distributed_executor_backend: str | None = None
    tf_model_config: Any = None

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "OmniDiffusionConfig":
        return cls(**{name: value for name, value in kwargs.items() if name in {one.name for one in fields(cls)}})

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

    def close(self) -> None:
        self.requests.clear()


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


class LoraLinear(nn.Module):
    """A linear layer whose output's slices each have an adapter added."""

    def __init__(self, base: nn.Linear, slices: int) -> None:
        super().__init__()
        self.base_layer = base
        self.n_slices = slices
        self.reset_lora()

    def reset_lora(self) -> None:
        outs, ins = self.base_layer.weight.shape
        self.loras = [(torch.zeros(1, ins), torch.zeros(outs // self.n_slices, 1))] * self.n_slices

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + torch.cat([x @ a.T @ b.T for a, b in self.loras], -1)


class LoraManager:
    """Like vLLM-Omni's, it keeps an adapter that it could not bind to its layers."""

    def __init__(self, pipeline: nn.Module, cached: int) -> None:
        self._pipeline = pipeline
        self._cached = cached
        self._adapters: dict[int, dict[str, torch.Tensor]] = {}
        self._active: int | None = None
        self._lora_modules: dict[str, LoraLinear] = {}
        self._packed: dict[str, list[str]] = {}
        for module in pipeline.modules():
            for fused, part, *_ in getattr(module, "stacked_params_mapping", ()):
                self._packed.setdefault(fused.strip("."), []).append(part.strip("."))

    def set_active_adapter(self, lora_request: LoRARequest | None) -> None:
        number = None if lora_request is None else lora_request.lora_int_id
        if number == self._active:
            return
        if lora_request is not None and number not in self._adapters:
            self._load(lora_request)
        self._active = None
        for layer in self._lora_modules.values():
            layer.reset_lora()
        if number is None:
            return
        adapter = self._adapters[number] = self._adapters.pop(number)  # the newest
        unbound = {key.rpartition(".lora_")[0] for key in adapter}
        for name, layer in self._lora_modules.items():
            for place, part in enumerate(self._parts(name)):
                if (module := f"base_model.model.{part}") in unbound:
                    unbound.remove(module)
                    layer.loras[place] = adapter[f"{module}.lora_A.weight"], adapter[f"{module}.lora_B.weight"]
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
        self._adapters[request.lora_int_id] = load_file(folder / "adapter_model.safetensors")
        transformer = self._pipeline.get_submodule("transformer")
        for name, module in list(transformer.named_modules()):
            if not isinstance(module, nn.Linear) or "base_layer" in name:
                continue
            parts = self._parts(f"transformer.{name}")
            if any(re.match(rf".*\.{target}$", part) for part in parts for target in config["target_modules"]):
                layer = LoraLinear(module, len(parts))
                transformer.set_submodule(name, layer)
                self._lora_modules[f"transformer.{name}"] = layer

    def _parts(self, name: str) -> list[str]:
        parent, _, last = name.partition(".")[2].rpartition(".")
        return [f"{parent}.{part}" for part in self._packed.get(last, [last])]


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

    def __init__(self, od_config: OmniDiffusionConfig, scheduler: StepScheduler | None = None) -> None:
        assert od_config.step_execution
        assert od_config.distributed_executor_backend == "mp"
        assert od_config.custom_pipeline_args is not None
        od_config.dtype = torch.float32  # this processor's
        self.executor = self
        self.scheduler = scheduler or StepScheduler()
        self.scheduler.initialize(od_config)
        self.closed = False
        self.fail: Exception | None = None
        self.states: dict[str, StepRequestState] = {}
        self.pipeline = _named(od_config.custom_pipeline_args["pipeline_class"])(od_config=od_config).to("cpu")
        expected = {name for name, _ in self.pipeline.named_parameters()}
        assert self.pipeline.load_weights(self._weights()) == expected
        self.worker = _named(str(od_config.worker_extension_cls))()
        self.worker.lora_manager = LoraManager(self.pipeline, od_config.max_cpu_loras or 1)
        self.worker.model_runner = self
        DiffusionEngine.last = self

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for source in self.pipeline.weights_sources:
            for file in sorted((Path(source.model_or_path) / source.subfolder).glob("*.safetensors")):
                for name, tensor in load_file(file).items():
                    yield source.prefix + name, tensor

    @torch.inference_mode()
    def add_req_and_wait_for_response(self, request: OmniDiffusionRequest) -> DiffusionOutput:
        assert not self.closed
        self.scheduler.add_request(request)
        while True:
            try:
                scheduled, finished = self.scheduler.schedule()
            except Exception:
                self.closed = True
                raise
            assert scheduled is request
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


def _named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(__import__(module, fromlist=[attribute]), attribute)


SURFACE: dict[str, tuple[Any, ...]] = {
    "vllm.lora.request": (LoRARequest,),
    "vllm.model_executor.layers.linear": (UnquantizedLinearMethod,),
    "vllm.model_executor.models.utils": (AutoWeightsLoader,),
    "vllm_omni.diffusion.attention.layer": (Attention,),
    "vllm_omni.diffusion.data": (DiffusionOutput, OmniDiffusionConfig),
    "vllm_omni.diffusion.diffusion_engine": (DiffusionEngine,),
    "vllm_omni.diffusion.distributed.utils": (get_local_device,),
    "vllm_omni.diffusion.model_loader.diffusers_loader": (DiffusersPipelineLoader,),
    "vllm_omni.diffusion.models.flux.flux_transformer": (FluxTransformer2DModel,),
    "vllm_omni.diffusion.request": (OmniDiffusionRequest,),
    "vllm_omni.diffusion.sched": (StepScheduler,),
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
