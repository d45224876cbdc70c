"""Comparison of a service's model with the one that is loaded here, before a run."""

import logging
from collections.abc import Mapping, Sequence

from solrl_core.arithmetic import differences
from solrl_core.errors import MismatchError
from solrl_core.families import Backbone
from solrl_core.fingerprint import check_digests
from solrl_core.model_options import size_text
from solrl_proto.models import ModelInfo
from solrl_proto.printable import printable
from solrl_proto.rollouts import RewardSpec

logger = logging.getLogger(__name__)


def check_size(hosted: ModelInfo, backbone: Backbone) -> None:
    """Refuse a service whose model makes images of another size.

    Raises:
        MismatchError: the size differs; names both.
    """
    theirs, ours = map(size_text, (hosted, backbone))
    if theirs != ours:
        own = f"--height {backbone.height} --width {backbone.width}"
        own += f" --frames {backbone.frames}" if backbone.frames > 1 else ""
        raise MismatchError(
            "size",
            "the service makes images of another size: it would rank images that are never trained on",
            where="generate",
            got=theirs,
            expected=ours,
            action=f"serve with {own}, or change the section generate",
        )


def check_hosted(hosted: ModelInfo, rewards: Sequence[RewardSpec], digests: Mapping[str, str]) -> None:
    """Compare the digests of a service's model and of its rewards with those of what is loaded here.

    Args:
        hosted: the run's model at the service.
        rewards: rewards that the service must score, as requests name them.
        digests: digests of all parts and rewards loaded here.

    Raises:
        MismatchError: a part or a reward differs or is missing there; names it.
    """
    # Requests name the digests of rewards that the service has not loaded.
    scored = {f"reward:{spec.name}" for spec in rewards if spec.at is None}
    ours = {name: digest for name, digest in digests.items() if name in scored or not name.startswith("reward:")}
    check_digests(hosted.digests, ours)


def note_arithmetic(model: ModelInfo, ours: Mapping[str, str]) -> None:
    """Say in what the service's arithmetic differs from this process's: equal seeds then differ by rounding."""
    if model.arithmetic is None:
        logger.info("the service does not say what changes its rounding: equal seeds may differ by it")
    elif differing := differences(model.arithmetic, ours):
        text = f"the service's images differ from this process's by rounding: {', '.join(differing)}"
        logger.info("%s", printable(text, 400))
