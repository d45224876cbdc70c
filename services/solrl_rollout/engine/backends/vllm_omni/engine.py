"""vLLM-Omni's engine as the service's process calls it: step by step, from one thread.

Only vLLM-Omni's environment can import this module.
"""

import multiprocessing
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from solrl_core.sampling.sampler import Trajectory
from vllm.lora.request import LoRARequest
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.diffusion_engine import DiffusionEngine
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.sched import StepScheduler
from vllm_omni.diffusion.sched.interface import DiffusionRequestStatus
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from solrl_rollout.engine.backends.vllm_omni.orders import ORDER, Order, from_packed

_PARTS = "solrl_rollout.engine.backends.vllm_omni.pipeline"


class _Stopped(BaseException):
    """Carries another exception through vLLM-Omni, which ends its engine if its scheduler raises an `Exception`."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class CancellingScheduler(StepScheduler):  # type: ignore[misc]
    """vLLM-Omni's step scheduler, which calls a function before each step.

    Attributes:
        between: the function. If it raises, the request is aborted and `schedule` raises `_Stopped` with that error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.between: Callable[[], None] = lambda: None
        self.request_id = ""

    def schedule(self) -> Any:
        """Schedule the next step."""
        try:
            self.between()
        except BaseException as error:
            # Not an empty step: the engine would not pass it on to its processes, and they would keep the latents.
            self.finish_requests(self.request_id, DiffusionRequestStatus.FINISHED_ABORTED)
            self.pop_request_state(self.request_id)
            raise _Stopped(error) from None
        return super().schedule()


class OmniEngine:
    """A `DiffusionEngine` with our pipeline."""

    def __init__(
        self, folder: Path, pipeline: str, device: torch.device, *, quantise: bool, options: Mapping[str, Any]
    ) -> None:
        """Load the model.

        Args:
            folder: the model in diffusers format.
            pipeline: vLLM-Omni's name of the model's pipeline.
            device: the (first) GPU.
            quantise: whether linear layers run at fp8.
            options: further fields of `OmniDiffusionConfig`.

        Raises:
            ValueError: an option is unknown, or is the backend's.
            RuntimeError: the model cannot be loaded.
        """
        fixed: dict[str, Any] = {
            "model": str(folder),
            "model_class_name": pipeline,
            "dtype": torch.bfloat16,
            "quantization_config": "fp8" if quantise else None,
            "output_type": "latent",
            "step_execution": True,
            "max_num_seqs": 1,
            "max_cpu_loras": 2,  # the served adapter stays loaded until the next one is
            "custom_pipeline_args": {"pipeline_class": f"{_PARTS}.RolloutPipeline"},
            "worker_extension_cls": f"{_PARTS}.RolloutWorker",
            "distributed_executor_backend": "mp",  # else one GPU's worker runs here, on the first GPU that is visible
        }
        allowed = {field.name for field in fields(OmniDiffusionConfig)} - fixed.keys()
        if odd := sorted(options.keys() - allowed):
            raise ValueError(
                f"got engine option {odd[0]!r}; expected fields of OmniDiffusionConfig other than {', '.join(fixed)}"
            )
        config = OmniDiffusionConfig.from_kwargs(**options, **fixed)
        config.enrich_config()
        self._scheduler = CancellingScheduler()
        # vLLM-Omni makes its events before it chooses this method, and cannot share them with such processes otherwise.
        multiprocessing.set_start_method("spawn", force=True)
        with _first_visible(device):
            # Not `make_engine`, whose warm-up request is not ours; the service warms up by itself.
            self._engine = DiffusionEngine(config, scheduler=self._scheduler)

    def generate(self, order: Order, adapter: tuple[str, int] | None, between: Callable[[], None]) -> Trajectory:
        """Generate the candidates of an order.

        Args:
            adapter: name and number of a loaded adapter; None for the base model.
            between: called before each step; raises to stop.

        Raises:
            torch.OutOfMemoryError: the batch does not fit.
            RuntimeError: the engine failed.
        """
        request = OmniDiffusionRequest(
            prompt="",
            request_id=uuid.uuid4().hex,
            sampling_params=OmniDiffusionSamplingParams(
                num_inference_steps=order.steps,
                num_outputs_per_prompt=len(order.seeds),
                seed=0,
                # Loaded already: the path is never read.
                lora_request=adapter and LoRARequest(*adapter, "loaded"),
                extra_args={ORDER: order},
            ),
        )
        self._scheduler.between, self._scheduler.request_id = between, request.request_id
        try:
            output = self._engine.add_req_and_wait_for_response(request)
        except _Stopped as stopped:
            raise stopped.error from None
        if output.error:
            raise _failure(output.error)
        return from_packed(output.output, order.solver)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of `RolloutWorker` in every process of the engine; returns the first one's answer.

        Raises:
            torch.OutOfMemoryError: memory ran out there.
            RuntimeError: the call failed there.
        """
        try:
            return self._engine.collective_rpc(method, args=args)[0]
        except RuntimeError as error:
            raise _failure(str(error)) from error

    def check(self) -> None:
        """Raise if a process of the engine is dead."""
        self._engine.executor.check_health()

    def close(self) -> None:
        """End the engine's processes."""
        self._engine.close()


def _failure(text: str) -> RuntimeError:
    """The exception for an error of another process; only the error's text arrives."""
    return torch.OutOfMemoryError(text) if "out of memory" in text else RuntimeError(f"vLLM-Omni: {text}")


@contextmanager
def _first_visible(device: torch.device) -> Iterator[None]:
    """Make a GPU the first one that new processes see: vLLM-Omni always begins with the first."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    if device.index:
        visible = before.split(",") if before else [str(index) for index in range(torch.cuda.device_count())]
        os.environ[name] = ",".join(visible[device.index :])
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
