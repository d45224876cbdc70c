"""The hosted models of several workers, which must be equal, as one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from solrl_rollout.engine.work import HostedModel

_SHOWN = 3


def require_equal_models(name: str, hosted: Sequence[HostedModel], first: str, expected: Sequence[HostedModel]) -> None:
    """Check that a worker's models are those of the first worker.

    Raises:
        RuntimeError: names what differs.
    """
    for ours, theirs in zip(hosted, expected, strict=True):
        found, wanted = _identity(ours), _identity(theirs)
        differing = [part for part in {**wanted, **found} if found.get(part) != wanted.get(part)]
        if differing:
            texts = [f"{part}: {found.get(part)} (there {wanted.get(part)})" for part in differing[:_SHOWN]]
            raise RuntimeError(
                f"worker {name} and worker {first} loaded {ours.info.name} differently, in {'; '.join(texts)}; all "
                "workers must have equal weights, rewards, devices and libraries: pin the model's revision, and use "
                "equal devices"
            )


def describe(workers: Mapping[str, Sequence[HostedModel]]) -> list[HostedModel]:
    """The models of workers, by their names, as the rest of the service sees them: with the lowest batch limits."""
    return [_joined(models, ", ".join(workers)) for models in zip(*workers.values(), strict=True)]


def _joined(models: Sequence[HostedModel], device: str) -> HostedModel:
    if len(models) == 1:
        return models[0]

    def batch_limits() -> dict[str, int]:
        lowest: dict[str, int] = {}
        for model in models:
            for part, limit in model.batch_limits().items():
                lowest[part] = min(limit, lowest.get(part, limit))
        return lowest

    return replace(models[0], device=device, batch_limits=batch_limits)


def _identity(model: HostedModel) -> dict[str, Any]:
    info = model.info.model_dump(mode="json")
    for one in info["precisions"]:
        one.pop("rank_fidelity")  # measured by each worker
    parts = {f"digest of {part}": digest for part, digest in info.pop("digests").items()}
    layout = {module: tuple(shape) for module, shape in model.adapter_layout.items()}
    own = {"default precision": model.default_precision, "prunes": model.prunes, "adapter layout": layout}
    return parts | info | own
