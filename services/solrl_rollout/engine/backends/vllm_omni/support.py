"""Versions and models that the backend supports; everything else is refused before a model is loaded."""

from importlib import metadata
from typing import NamedTuple

from solrl_proto.rollouts import RequestedPrecision

VERSIONS = {"vllm": "0.30.0", "vllm-omni": "0.30.0"}
"""The pair of releases that the backend was written against; vllm-omni does not install vllm."""
LOCK = "deploy/vllm-omni.lock"

_INSTEAD = "serve it with --engine solrl"
INSTALL = f"{LOCK} (docs/scale-out.md, vLLM-Omni), or serve with --engine solrl"


class Family(NamedTuple):
    """A family's names in vLLM-Omni: of its pipeline, of its transformer's class, of attention's output projection."""

    pipeline: str
    transformer: str
    output: str


FAMILIES = {
    "flux": Family("FluxPipeline", "flux.flux_transformer:FluxTransformer2DModel", "to_out.0"),
    "sd3": Family("StableDiffusion3Pipeline", "sd3.sd3_transformer:SD3Transformer2DModel", "to_out.0"),
    "flux2-klein": Family(
        "Flux2KleinPipeline", "flux2_klein.flux2_klein_transformer:Flux2Transformer2DModel", "to_out.0"
    ),
    "wan": Family("WanPipeline", "wan2_2.wan2_2_transformer:WanTransformer3DModel", "to_out"),
}
"""Families whose transformers take the arguments of diffusers'."""


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
        expected, got = (" and ".join(map(" ".join, pair.items())) for pair in (VERSIONS, installed))
        raise RuntimeError(f"--engine vllm-omni needs {expected}, and found {got}: install both from {INSTALL}")


def served_family(family: str, precision: RequestedPrecision) -> Family:
    """A family's names in vLLM-Omni, if it can serve the family at a precision.

    Raises:
        ValueError: vLLM-Omni cannot serve it; the message gives the reason, and the engine that can.
    """
    if family not in FAMILIES:
        raise ValueError(f"--engine vllm-omni serves {', '.join(FAMILIES)} models, and this is {family}; {_INSTEAD}")
    if precision == "nvfp4":
        raise ValueError(
            "--engine vllm-omni loads NVFP4 only from checkpoints that were quantised before, and this one is BF16; "
            + _INSTEAD
        )
    if precision == "fp8" and family != "flux":
        raise ValueError(f"--engine vllm-omni serves {family} models only in BF16; {_INSTEAD} or at --precision bf16")
    return FAMILIES[family]
