"""vLLM-Omni's diffusion engine as a backend: its transformer and parallelism, our noise, solvers and decoder."""

from solrl_rollout.engine.backends.vllm_omni.backend import VllmOmniBackend

__all__ = ["VllmOmniBackend"]
