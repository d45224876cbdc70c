"""The check of ranks at the first load of a model at a precision, whose result is stored for all later loads."""

import hashlib
import json
import logging
from contextlib import suppress
from pathlib import Path

import torch
from pydantic import ValidationError
from solrl_core.fidelity import RankCorrelation
from solrl_core.reward_registry import REWARDS
from solrl_core.rewards import RewardSet
from solrl_engine.backend import Backend
from solrl_engine.local_backend import LocalBackend
from solrl_engine.precision_check import FLOOR, PROMPTS, SHORTFALL, PrecisionCheck, worst_reward
from solrl_proto.identifiers import Precision
from solrl_proto.models import RankFidelity
from solrl_proto.rollouts import Plan

logger = logging.getLogger(__name__)

_VERSION = 2
"""Version of the check's prompts, plan and counts."""
_CANDIDATES = 16
_PLAN = Plan(steps=6)
_TRUE_STEPS = 10
_AT_ONCE = 4
"""Prompts per round of the check. Rounds follow until the interval excludes `FLOOR`."""


def choose_precision(
    model: str, backend: Backend, rewards: RewardSet, requested: Precision | None, folder: Path | None
) -> tuple[Precision, RankFidelity | None]:
    """The precision that a service uses by default, and how well it ranks.

    Args:
        rewards: rewards of the service. Rewards of other packages and of servers are left out.
        requested: the precision that the settings name; None for the fastest native one that ranks.
        folder: folder of stored results; None checks nothing.

    Returns:
        The precision, and its rank fidelity: None for BF16, and where nothing could be checked.
    """
    precisions = (requested,) if requested else backend.capabilities.native
    if folder is None or not isinstance(backend, LocalBackend):
        return precisions[0], None
    judges = rewards.only(filter(REWARDS.is_built_in, rewards.computed_here))
    for precision in precisions:
        if precision == "bf16":
            return precision, None
        if not judges.names:
            logger.warning("ranks of %s at %s are not checked: no built-in reward is computed here", model, precision)
            return precision, None
        fidelity = _stored_or_measured(model, backend, judges, precision, folder)
        if fidelity.trusted:
            return precision, fidelity
        logger.warning(
            "%s, see `solrl-rollout check`; %s",
            rank_warning(model, precision, fidelity),
            "it is served because --precision asks for it" if requested else "the next precision is tried",
        )
        if requested:
            return precision, fidelity
    raise AssertionError("BF16 is the last precision")


def rank_warning(model: str, precision: Precision, fidelity: RankFidelity) -> str:
    """Text for a precision that does not rank."""
    return (
        f"{model} at {precision} does not rank as in BF16: Spearman {fidelity.spearman:.2f} of {fidelity.reward} over "
        f"{fidelity.prompts} prompts, in [{fidelity.low:.2f}, {fidelity.high:.2f}]; at least {FLOOR:g} is expected"
    )


def _stored_or_measured(
    model: str, backend: LocalBackend, rewards: RewardSet, precision: Precision, folder: Path
) -> RankFidelity:
    path = folder / f"{_key(backend, rewards, precision)}.json"
    with suppress(OSError, ValidationError):
        return RankFidelity.model_validate_json(path.read_bytes())
    logger.info("checking ranks of %s at %s, which is loaded here for the first time", model, precision)
    fidelity = _measured(backend, rewards, precision)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(fidelity.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        logger.warning("the check is repeated at the next start: %s; --checks names another folder", error)
    return fidelity


def _measured(backend: LocalBackend, rewards: RewardSet, precision: Precision) -> RankFidelity:
    """Check a precision: trusted if it surely reaches `FLOOR`, or ranks as BF16 does by the same plan."""
    groups: dict[str, list[float]] = {name: [] for name in rewards.names}
    exact: dict[str, list[float]] = {name: [] for name in rewards.names}
    for first in range(0, len(PROMPTS), _AT_ONCE):
        prompts = PROMPTS[first : first + _AT_ONCE]
        check = PrecisionCheck(
            backend.backbone, rewards, prompts, _CANDIDATES, _PLAN, _TRUE_STEPS, lambda _, one: backend.generator(one)
        )
        for values, at in ((groups, precision), (exact, "bf16")):
            for name, more in check.correlations(at).items():
                values[name] += more
        over = {name: RankCorrelation.over(found) for name, found in groups.items()}
        reward = worst_reward(over)
        lowest = over[reward]
        if not lowest.low <= FLOOR <= lowest.high:
            break
    shortfall = RankCorrelation.over(exact[reward]).mean - lowest.mean
    return RankFidelity(
        reward=reward,
        spearman=lowest.mean,
        low=lowest.low,
        high=lowest.high,
        prompts=len(groups[reward]),
        candidates=_CANDIDATES,
        trusted=lowest.low >= FLOOR or shortfall <= SHORTFALL,
    )


def _key(backend: LocalBackend, rewards: RewardSet, precision: Precision) -> str:
    """Digest of all that decides the result: weights, quantised layers, rewards and the device."""
    backbone = backend.backbone
    device = backbone.device
    facts = {
        "version": _VERSION,
        "digests": dict(backend.identity.digests),
        "layers": backbone.policy_at(precision).select(backbone.transformer),
        "size": [backbone.height, backbone.width, *[backbone.frames] * (backbone.frames > 1)],
        "rewards": rewards.digests(),
        "precision": [one.how for one in backend.capabilities.precisions if one.precision == precision],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
