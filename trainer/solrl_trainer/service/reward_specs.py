"""Rewards as requests to a service name them."""

from collections.abc import Mapping, Sequence

from solrl_core.rewards.reward import AT
from solrl_proto.models import ModelInfo
from solrl_proto.rollouts import RewardSpec

from solrl_trainer.settings.config import RunConfig


def reward_specs(
    rewards: Sequence[RewardSpec], config: RunConfig, hosted: ModelInfo, digests: Mapping[str, str] | None = None
) -> tuple[RewardSpec, ...]:
    """Rewards as the run's requests name them: those that the service has not loaded with the run's own server.

    Args:
        rewards: by name and weight.
        config: the run's settings, whose `reward_options` may have a reward's server.
        hosted: the run's model at the service.
        digests: digests of the rewards as `reward:<name>`, which those of the servers must equal.
    """
    options, known = config.reward_options, digests or {}

    def requested(spec: RewardSpec) -> RewardSpec:
        at = options.get(spec.name, {}).get(AT)
        if at is None or spec.name in hosted.rewards:
            return spec
        return RewardSpec(name=spec.name, weight=spec.weight, at=at, digest=known.get(f"reward:{spec.name}"))

    return tuple(map(requested, rewards))
