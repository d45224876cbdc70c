"""Loading of a run's model and rewards, with their digests, before anything is trained."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from solrl_client.retries import OnWait
from solrl_core.errors import MismatchError
from solrl_core.families import load_backbone
from solrl_core.families.load import describe_model
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.fingerprint import SCHEDULE, model_digest, part_digests, schedule_digest
from solrl_core.model_options import ModelOptions
from solrl_core.precision.fp8 import require_fp8
from solrl_core.precision.support import numerics, supported_precisions
from solrl_core.rewards import Reward, RewardSet
from solrl_core.rewards.reward import PlainDefaults
from solrl_core.rewards.trial import try_rewards
from solrl_proto.identifiers import Precision
from solrl_proto.rollouts import ModelBinding, RequestedPrecision
from solrl_remote.remote_reward import connect_reward

from solrl_trainer.prompts.prompt_rewards import scored_prompts
from solrl_trainer.prompts.prompt_sets import prompts_of_run
from solrl_trainer.ranks.communicator import Communicator, pick_device
from solrl_trainer.run_folder.resuming import parts_when_loaded
from solrl_trainer.settings.config import RunConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """The model and the rewards of a run, trained or only logged.

    Attributes:
        backbone: its transformer is as loaded until a policy is built on it.
        digests: of the model's parts, its schedule and the rewards, as a service has them.
        parts: digests and versions of what the run depends on beside its settings, see `resuming`.
    """

    backbone: PipelineBackbone
    rewards: RewardSet
    digests: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)


def load(config: RunConfig, world: Communicator, on_wait: OnWait) -> Loaded:
    """Load the model and the rewards; `on_wait` is told of waits for reward servers.

    A warning says what a device that explores emulates.

    Raises:
        MismatchError: the plan is of another model.
        RewardError: a reward cannot score two grey images.
        ValueError, OSError: model or rewards cannot be loaded, or this device explores and does not compute in
            the precision.
    """
    device = pick_device(config.device, world)
    if config.explores_here and config.explore.precision == "fp8":
        require_fp8(torch.device(device))
    names = [*config.rewards, *config.evaluate.rewards]
    loaded = load_model(config, device, names, config.reward_options, on_wait, trains=True)
    backbone, rewards = loaded.backbone, loaded.rewards
    if config.explores_here:
        supported = supported_precisions(backbone.device)
        emulated = [precision for precision in supported if numerics(precision, backbone.device) == "emulated"]
        warn_of_emulation(emulated, config.explore.precision)
    # Take digests before the policy modifies the backbone's transformer.
    parts = part_digests(backbone.parts, backbone.device)
    check_bindings(config.bindings, model_digest(parts), config.model)
    digests = parts | {SCHEDULE: schedule_digest(backbone.sigmas)} | rewards.digests()
    parts = parts_when_loaded(config, parts, backbone.options, rewards.digests())
    return replace(loaded, digests=digests, parts=parts)


def load_model(
    config: RunConfig,
    device: str,
    names: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
    on_wait: OnWait,
    *,
    trains: bool = False,
    dtype: torch.dtype | None = None,
) -> Loaded:
    """A run's model, with weights of the `dtype`, and the named rewards with their `options`; without digests.

    With `trains`, rewards are tried on two grey images, before the model is loaded if its options can be read, and
    transformer and text encoders stay in host memory. Raises as `load_backbone`, `RewardSet.load` and `try_rewards`.
    """
    cache: dict[str, Reward] = {}
    connect = partial(connect_reward, patience=config.patience, on_wait=on_wait)

    def load_rewards(of_model: ModelOptions) -> RewardSet:
        before, defaults = len(cache), PlainDefaults(torch.device(device), of_model)
        rewards = RewardSet.load(names, defaults, options, loaded=cache, connect=connect)
        if trains and len(cache) > before:
            try_rewards(rewards, defaults, prompts_of=partial(_prompts_of, config))
        return rewards

    size = config.generate.size
    if trains and (described := describe_model(config.model, config.revision)) is not None:
        load_rewards(described.options.sized(size))
    backbone = load_backbone(
        config.model, device=device, revision=config.revision, dtype=dtype, waiting=trains, size=size
    )
    return Loaded(backbone, load_rewards(backbone.options))


def _prompts_of(config: RunConfig, reward: str) -> list[tuple[str, Mapping[str, Any]]]:
    split = "train" if reward in config.rewards else "test"
    prompts = scored_prompts(reward, prompts_of_run(config.prompt_sources, split).all)
    return [(prompt.text, prompt.metadata) for prompt in prompts]


def check_bindings(bindings: Sequence[ModelBinding], digest: str, model: str) -> None:
    """Refuse a plan or a solver that was made for another model, by a MismatchError with both digests."""
    for bound in bindings:
        if bound.model != digest:
            raise MismatchError(
                "digests",
                f"the exploration plan was calibrated for a different model than {model}",
                where="explore.calibrated_for.model",
                got=digest,
                expected=bound.model,
                action="run `solrl-train calibrate` for this model, or omit the plan",
            )


def warn_of_emulation(emulated: Collection[Precision], precision: RequestedPrecision) -> None:
    """Warn about the cost of NVFP4, if it is requested by name from a device that emulates it."""
    if precision == "nvfp4" and precision in emulated:
        logger.warning(
            "explore.precision=nvfp4: the exploring device has no NVFP4 units and emulates them. That is slower than "
            "BF16 and needs a second copy of the adapted weights; explore.precision=auto uses the fastest native one"
        )
