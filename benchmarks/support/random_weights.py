"""Random weights for models that are built from their configurations alone."""

import torch
from solrl_core.families.pipeline import PipelineBackbone


def materialize(skeleton: PipelineBackbone, device: str) -> PipelineBackbone:
    """Give a skeleton random weights on a device, to measure time and memory, which do not depend on the values."""
    for part in skeleton.parts.values():
        if isinstance(part, torch.nn.Module):
            randomize(part, device)
    return type(skeleton)(skeleton.pipeline, skeleton.name, skeleton.options)


@torch.no_grad()
def randomize(module: torch.nn.Module, device: str) -> torch.nn.Module:
    """Move a module from the meta device to another, in place: small random matrices, norm weights 1, biases 0."""
    module.requires_grad_(False).to_empty(device=device)
    getattr(module, "tie_weights", lambda: None)()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not tensor.is_floating_point():
            tensor.zero_()
        elif tensor.ndim > 1:
            tensor.normal_(std=0.02)
        else:
            tensor.fill_(name.endswith("weight"))
    return module
