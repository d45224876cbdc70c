"""Comparison of a service with what is loaded here, before a run."""

import logging
from collections.abc import Mapping, Sequence

from solrl_client.rollouts import RolloutClient
from solrl_core.arithmetic import differences
from solrl_core.fingerprint import check_digests
from solrl_core.sampling.noise import check_noise_contract
from solrl_proto.models import ModelInfo
from solrl_proto.printable import printable
from solrl_proto.rollouts import RewardSpec

from solrl_trainer.service.problems import require_rewards

logger = logging.getLogger(__name__)


def check_service(client: RolloutClient, model: str, rewards: Sequence[RewardSpec], digests: Mapping[str, str]) -> None:
    """Compare noise contract, rewards and digests with a service's, before the run starts.

    Args:
        client: client of the service.
        model: name of the model at the service.
        rewards: rewards that the service must score, as requests name them.
        digests: digests of all parts and rewards loaded here.

    Raises:
        ProblemError: the service does not host the model or score a reward.
        MismatchError: noise contract or digests differ; names the part.
    """
    hosted = client.models()
    check_noise_contract(hosted.noise)
    found = client.model(model)
    require_rewards(client.url, hosted, found, rewards)
    # Requests name the digests of the others.
    scored = {f"reward:{spec.name}" for spec in rewards if spec.at is None}
    ours = {name: digest for name, digest in digests.items() if name in scored or not name.startswith("reward:")}
    check_digests(found.digests, ours)


def note_arithmetic(model: ModelInfo, ours: Mapping[str, str]) -> None:
    """Say in what the service's arithmetic differs from this process's: equal seeds then differ by rounding."""
    if model.arithmetic is None:
        logger.info("the service does not say what changes its rounding: equal seeds may differ by it")
    elif differing := differences(model.arithmetic, ours):
        text = f"the service's images differ from this process's by rounding: {', '.join(differing)}"
        logger.info("%s", printable(text, 400))
