"""Whether a run ends, and takes its best weights: at its plateau, after a clear fall, or because a guard fell."""

from collections.abc import Mapping, Sequence
from typing import Any

from solrl_trainer.run_folder.figures import (
    TRAINED_SUM,
    gain_text,
    interval_text,
    reward_label,
    reward_text,
    trained_sum,
)
from solrl_trainer.settings.config import RunConfig

Line = Mapping[str, Any]
"""An evaluation of metrics.jsonl: version; rewards, their means; from version 1 on low and high, their intervals."""


def held_out_scores(lines: Sequence[Line], weights: Mapping[str, float]) -> dict[int, float]:
    """Version → weighted sum of the trained rewards, where all of them were evaluated."""
    return {
        line["version"]: trained_sum(line["rewards"], weights)
        for line in lines
        if weights.keys() <= line["rewards"].keys()
    }


def clear_fall(lines: Sequence[Line], weights: Mapping[str, float], version: int, best: int) -> str | None:
    """What to say if the 95 % interval of a version's score lies below the mean of `best`; None if it does not."""
    scores = held_out_scores(lines, weights)
    newest = next((line for line in reversed(lines) if line["version"] == version), {})
    if "high" not in newest or not {version, best} <= scores.keys():
        return None
    (name, weight), *further = weights.items()
    ends = [newest[end].get(TRAINED_SUM) for end in ("low", "high")]
    if ends[1] is None:
        if further:
            return None
        ends = sorted(weight * newest[end][name] for end in ("low", "high"))
    if ends[1] >= scores[best]:
        return None
    return (
        f"the held-out reward fell clearly, from {scores[best]:.4f} at version {best} to {scores[version]:.4f} "
        f"[{ends[0]:.4f}, {ends[1]:.4f}] at version {version}"
    )


def fallen_guards(lines: Sequence[Line], guards: Sequence[str], version: int) -> str | None:
    """What to say if the whole 95 % interval of a guard's change from the base is below 0 at a version; or None."""
    by_version = {line["version"]: line for line in lines}
    base, newest = by_version.get(0, {}).get("rewards", {}), by_version.get(version, {})
    for name in guards:
        if name in base and name in newest.get("high", {}) and newest["high"][name] < base[name]:
            before, after = base[name], newest["rewards"][name]
            change = interval_text(name, newest["low"][name] - before, newest["high"][name] - before)
            return (
                f"{reward_label(name)}, a guard, fell clearly below the base, from {reward_text(name, before)} to "
                f"{reward_text(name, after)} at version {version}: {gain_text(name, after - before)} {change}"
            )
    return None


def reason_to_stop(lines: Sequence[Line], config: RunConfig, version: int) -> str | None:
    """Why the run ends after `version` iterations with the weights of its best version; None if it does not.

    After its last iteration it does so unless that version is the best. If version 0 is the best, which has no weights,
    the reason warns against the weights that are exported. `lines` are the run's evaluations up to that version.
    """
    settings = config.evaluate
    if not settings.every or not (version == config.iterations or settings.is_due(version)):
        return None
    reason = fallen_guards(lines, settings.guards, version) or _end_of_rise(lines, config, version)
    scores = scores_without_fallen_guard(lines, config)
    base_is_best = bool(scores) and _best(scores) == 0
    return f"{reason}; the base, version 0, is the best: do not use the weights" if reason and base_is_best else reason


def _end_of_rise(lines: Sequence[Line], config: RunConfig, version: int) -> str | None:
    settings, scores = config.evaluate, held_out_scores(lines, config.weights)
    if settings.stop_after is None or version not in scores:
        return None
    best = _best(scores)
    if fall := clear_fall(lines, config.weights, version, best):
        return fall
    since = version - best
    if since < (1 if version == config.iterations else settings.stop_after * config.iterations):
        return None
    return f"no new best held-out reward in {since} iterations, since {scores[best]:.4f} at version {best}"


def _best(scores: Mapping[int, float]) -> int:
    return max(scores, key=lambda version: (scores[version], -version))


def scores_without_fallen_guard(lines: Sequence[Line], config: RunConfig) -> dict[int, float]:
    """Version → held-out score, without versions where a guard has fallen clearly below the base."""
    scores, guards = held_out_scores(lines, config.weights), config.evaluate.guards
    return {version: score for version, score in scores.items() if not fallen_guards(lines, guards, version)}
