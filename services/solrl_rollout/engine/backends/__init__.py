"""Backends, which generate a model's candidates behind one protocol."""

from solrl_rollout.engine.backends.base import Backend
from solrl_rollout.engine.backends.local import LocalBackend
from solrl_rollout.settings import ModelSpec, Settings

__all__ = ["Backend", "load_backend"]


def load_backend(spec: ModelSpec, settings: Settings) -> Backend:
    """Load the backend of one model: in this process, or in vLLM-Omni's.

    Raises:
        ValueError, OSError, RuntimeError: the model cannot be loaded, or does not fit.
    """
    if settings.engine == "vllm-omni":
        from solrl_rollout.engine.backends.vllm_omni import VllmOmniBackend

        return VllmOmniBackend(spec, settings)
    return LocalBackend(spec, settings)
