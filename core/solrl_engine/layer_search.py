"""The cheapest layers whose return to BF16 restores what a precision loses."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.precision.layer_policy import pattern_of
from solrl_proto.identifiers import Precision

_MOST_KINDS = 4
"""Kinds of layers that are returned, at most."""
_WORTH = 0.1
"""Share of the whole error that a further kind must remove to be returned, and that fewer blocks may leave."""
_REMAINS = 0.5
"""Share of the error that may remain in the end, by the rounding of all other layers."""


@dataclass(frozen=True)
class KeptLayers:
    """Layers that stay in BF16.

    Attributes:
        names: dotted names in the transformer.
        share: share (0 to 1) of the blocks' linear FLOPs that they spend.
        error: latent error that remains.
    """

    names: tuple[str, ...]
    share: float
    error: float


def search_layers(backbone: PipelineBackbone, precision: Precision, error_of: Callable[[], float]) -> KeptLayers | None:
    """Find few layers that restore a precision; None where no few kinds of layers do.

    First whole kinds of layers (all blocks' `attn.to_out.0`, say) are returned to BF16, the kind first that removes
    most error. Then blocks are taken out of these kinds by halves, as long as the error stays removed.

    `error_of` gives the error with what `backbone.kept` names, such as `PrecisionCheck.latent_error`; `kept` is changed
    while this runs, and restored.
    """
    before = backbone.kept
    layers = backbone.policy_at(precision).select(backbone.transformer)

    def error_with(names: Sequence[str]) -> float:
        backbone.kept = {**before, precision: (*before.get(precision, ()), *map(pattern_of, names))}
        try:
            return error_of()
        finally:
            backbone.kept = before

    kinds: dict[str, list[str]] = {}
    for name in layers:
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    worst = error_with(())
    chosen: list[str] = []
    error, left = worst, dict(kinds)
    # One kind must stay: a policy with nothing to quantise is refused.
    while len(left) > 1 and len(kinds) - len(left) < _MOST_KINDS:
        tried = {kind: error_with([*chosen, *names]) for kind, names in left.items()}
        kind = min(tried, key=lambda one: tried[one])
        if tried[kind] > error - _WORTH * worst:
            break
        chosen, error = [*chosen, *left.pop(kind)], tried[kind]
    if error > _REMAINS * worst:
        return None

    def restores(names: Sequence[str]) -> bool:
        return error_with(names) <= error + _WORTH * worst

    names = _fewest(chosen, (), restores)
    return KeptLayers(tuple(names), backbone.share_of(names), error_with(names))


def _fewest(names: Sequence[str], beside: Sequence[str], restores: Callable[[Sequence[str]], bool]) -> list[str]:
    """A part of `names` that restores together with the layers `beside`; no half of it does."""
    if len(names) < 2:
        return list(names)
    first, second = names[: len(names) // 2], names[len(names) // 2 :]
    for half in (first, second):
        if restores([*half, *beside]):
            return _fewest(half, beside, restores)
    from_first = _fewest(first, [*second, *beside], restores)
    return from_first + _fewest(second, [*from_first, *beside], restores)
