"""Settings that are gone, and what to do instead."""

from collections.abc import Collection, Mapping
from typing import Any

_HERE = "the trainer's device regenerates every sample"
_AS_PUBLISHED = "AWM has its authors' value; omit it"
REMOVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "regenerate.share": (("auto",), f"{_HERE}; omit it"),
    "optimizer.streamed": ((True, False), "every iteration waits for all its samples; omit it"),
    "optimizer.reference": (("bf16",), "the reference's velocities are computed in BF16; omit it"),
    "optimizer.betas": (((0.9, 0.999), [0.9, 0.999]), "AdamW's moments decay by 0.9 and 0.999; omit it"),
    "optimizer.eps": ((1e-8,), "AdamW's denominator has 1e-8; omit it"),
    "optimizer.epochs": (
        (1,),
        "an iteration trains on its samples once; raise algorithm.timestep_fraction, or optimizer.updates",
    ),
    "explore.frames": ((None,), "candidates that are cut short rank by chance; omit it"),
    "explore.refill": ((0,), "expected harder or easier prompts, or a graded reward, and no explore.refill"),
    "explore.selection": (("best_worst",), "the best and the worst candidates are selected; omit it"),
    "policy.counter": (("iterations",), "policies move once per iteration; omit it"),
    "evaluate.fidelity_wanted": ((0.75,), "the note comes below 0.75, and evaluate.fidelity_floor ends a run; omit it"),
    "algorithm.advantage_mode": (("all",), "advantages of both signs are trained; omit it"),
    "algorithm.power": ((0.25,), _AS_PUBLISHED),
    "algorithm.ratio_clip": ((1.0,), _AS_PUBLISHED),
    "algorithm.adv_max": ((1.0,), _AS_PUBLISHED),
    "algorithm.old_kl_weight": ((1.0,), _AS_PUBLISHED),
    "algorithm.kl_weighting": (("uniform",), _AS_PUBLISHED),
    "algorithm.noise_range": ((0.9,), _AS_PUBLISHED),
    "algorithm.initial_noise": ((True,), _AS_PUBLISHED),
}
"""Setting → the values without an effect, which settings of earlier runs have, and what to do instead of others."""
_VALUES = {
    ("regenerate.at", "service"): f"{_HERE}; expected regenerate.at=trainer, and the service explores",
    (
        "explore.share",
        "auto",
    ): "expected a number; `solrl-train layout` computes one that leaves neither side waiting",
}
"""Settings that remain, with a value that is gone."""


def removal(key: str, value: Any, known: Collection[str] = ()) -> str | None:
    """What to do instead of a setting or value that is gone; None if it is not, or had no effect.

    `known`: dotted names that exist. An algorithm of your own may have a setting of a name that is gone here.
    """
    if key in REMOVED and key not in known:
        neutral, advice = REMOVED[key]
        return None if value in neutral else advice
    return _VALUES.get((key, value)) if isinstance(value, str) else None


def without_removed(settings: Any) -> Any:
    """Settings in sections without those that are gone; an algorithm's section stays as it is.

    Raises:
        ValueError: one of them had an effect, or a value is gone; says what to do instead.
    """
    if not isinstance(settings, Mapping):
        return settings
    return {
        section: remaining(section, values) if isinstance(values, Mapping) and section != "algorithm" else values
        for section, values in settings.items()
    }


def remaining(section: str, values: Mapping[str, Any], known: Collection[str] = ()) -> dict[str, Any]:
    """Settings of a section without those that are gone; `known` as for `removal`.

    Raises:
        ValueError: as `without_removed`.
    """
    for key, value in ((f"{section}.{name}", value) for name, value in values.items()):
        if advice := removal(key, value, known):
            raise ValueError(f"{key} is {value}, which is gone: {advice}")
    gone = REMOVED.keys() - set(known)
    return {name: value for name, value in values.items() if f"{section}.{name}" not in gone}
