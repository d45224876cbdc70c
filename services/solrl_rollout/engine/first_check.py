"""The check of ranks at the first load of a model at a precision, whose result is stored for all later loads."""

import hashlib
import json
import logging
from contextlib import suppress
from pathlib import Path

import torch
from pydantic import ValidationError
from solrl_core.rewards import RewardSet
from solrl_core.rewards.reward import REWARDS
from solrl_engine.backend import Backend
from solrl_engine.local_backend import LocalBackend
from solrl_engine.precision_check import FLOOR, PROMPTS, SHORTFALL, PrecisionCheck, RankCorrelation, suffering
from solrl_proto.identifiers import Precision
from solrl_proto.models import RankFidelity
from solrl_proto.rollouts import Plan

logger = logging.getLogger(__name__)

_VERSION = 2
"""Of the check: of its prompts, plan and counts."""
_CANDIDATES = 16
_PLAN = Plan(steps=6)
_TRUE_STEPS = 10
_AT_ONCE = 4
"""Prompts by which the check grows until its interval excludes `FLOOR`."""


def checked_default(
    model: str, backend: Backend, rewards: RewardSet, precision: Precision | None, folder: Path | None
) -> tuple[Precision, RankFidelity | None]:
    """The precision that a service uses by default, and how well it ranks.

    Args:
        model: its name.
        backend: of the model.
        rewards: rewards of the service. Those of others and of servers are left out.
        precision: the precision that was asked for; None for the fastest native one that ranks.
        folder: of stored results; None checks nothing.

    Returns:
        The precision, and its rank fidelity: None for BF16, and where nothing could be checked.
    """
    wanted = (precision,) if precision else backend.capabilities.native
    if folder is None or not isinstance(backend, LocalBackend):
        return wanted[0], None
    judges = rewards.only(filter(REWARDS.is_built_in, rewards.computed_here))
    for one in wanted:
        if one == "bf16":
            return one, None
        if not judges.names:
            logger.warning("ranks of %s at %s are not checked: no built-in reward is computed here", model, one)
            return one, None
        found = _stored_or_measured(model, backend, judges, one, folder)
        if found.trusted:
            return one, found
        logger.warning(
            "%s, see `solrl-rollout check`; %s",
            distrust(model, one, found),
            "it is served because --precision asks for it" if precision else "the next precision is tried",
        )
        if precision:
            return one, found
    raise AssertionError("BF16 is the last precision")


def distrust(model: str, precision: Precision, found: RankFidelity) -> str:
    """Text for a precision that does not rank."""
    return (
        f"{model} at {precision} does not rank as in BF16: Spearman {found.spearman:.2f} of {found.reward} over "
        f"{found.prompts} prompts, in [{found.low:.2f}, {found.high:.2f}]; at least {FLOOR:g} is expected"
    )


def _stored_or_measured(
    model: str, backend: LocalBackend, rewards: RewardSet, precision: Precision, folder: Path
) -> RankFidelity:
    path = folder / f"{_key(backend, rewards, precision)}.json"
    with suppress(OSError, ValidationError):
        return RankFidelity.model_validate_json(path.read_bytes())
    logger.info("checking ranks of %s at %s, which is loaded here for the first time", model, precision)
    found = _measured(backend, rewards, precision)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(found.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        logger.warning("the check is repeated at the next start: %s; --checks names another folder", error)
    return found


def _measured(backend: LocalBackend, rewards: RewardSet, precision: Precision) -> RankFidelity:
    """Check a precision: trusted if it surely reaches `FLOOR`, or ranks as BF16 does by the same plan."""
    groups: dict[str, list[float]] = {name: [] for name in rewards.names}
    exact: dict[str, list[float]] = {name: [] for name in rewards.names}
    for first in range(0, len(PROMPTS), _AT_ONCE):
        prompts = PROMPTS[first : first + _AT_ONCE]
        check = PrecisionCheck(
            backend.backbone, rewards, prompts, _CANDIDATES, _PLAN, _TRUE_STEPS, lambda _, one: backend.generator(one)
        )
        for found, one in ((groups, precision), (exact, "bf16")):
            for name, more in check.correlations(one).items():
                found[name] += more
        over = {name: RankCorrelation.over(found) for name, found in groups.items()}
        reward = suffering(over)
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
