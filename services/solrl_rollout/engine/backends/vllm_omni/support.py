"""Versions and models that the backend supports; everything else is refused before a model is loaded."""

from importlib import metadata

from solrl_proto.rollouts import RequestedPrecision

VERSIONS = {"vllm": "0.26.0", "vllm-omni": "0.26.0"}
"""The pair of releases that the backend was written against; vllm-omni does not install vllm."""
LOCK = "deploy/vllm-omni.lock"

_INSTEAD = "serve it with --engine solrl"
INSTALL = f"{LOCK} into an environment of their own (docs/scale-out.md, vLLM-Omni), or serve with --engine solrl"
_FAMILIES = {"flux": "FluxPipeline", "sd3": "StableDiffusion3Pipeline"}


def require_packages() -> None:
    """Refuse to start without the tested pair of packages.

    Raises:
        RuntimeError: one is missing, or another version.
    """
    installed = {}
    for name in VERSIONS:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = "no"
    if installed != VERSIONS:
        needed, got = (" and ".join(f"{name} {one}" for name, one in pair.items()) for pair in (VERSIONS, installed))
        raise RuntimeError(f"--engine vllm-omni needs {needed}, and found {got}: install both from {INSTALL}")


def pipeline_class(family: str, precision: RequestedPrecision) -> str:
    """vLLM-Omni's name of a family's pipeline, if it can serve the family at a precision.

    Raises:
        ValueError: vLLM-Omni cannot serve it; the message gives the reason, and the engine that can.
    """
    if family not in _FAMILIES:
        families = " and ".join(_FAMILIES)
        raise ValueError(f"--engine vllm-omni generates images of {families} models, and this is {family}; {_INSTEAD}")
    if precision == "nvfp4":
        raise ValueError(
            "--engine vllm-omni loads NVFP4 only from checkpoints that were quantised before, and this one is BF16; "
            + _INSTEAD
        )
    if precision == "fp8" and family != "flux":
        raise ValueError(
            f"--engine vllm-omni quantises no layer of a {family} model; {_INSTEAD} or at --precision bf16"
        )
    return _FAMILIES[family]
