"""Checks of a run before loading: folder, prompts, service, rewards and model.

The fastest checks come first. Without them, errors would appear after loading the models or at the end of the run.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from solrl_client.rollouts import RolloutClient
from solrl_core.suggestions import did_you_mean
from solrl_proto.models import ModelInfo
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.rollouts import PromptItem

from solrl_trainer.prompts.prompt_rewards import check_known, scored_prompts
from solrl_trainer.prompts.prompt_sets import find_prompts, in_both, prompts_of_run, read_split
from solrl_trainer.prompts.stored_files import check_images, stored_files
from solrl_trainer.ranks.rank_info import read_rank_info
from solrl_trainer.records.trackers.registry import require_trackers
from solrl_trainer.records.waits import Waits
from solrl_trainer.run_folder.folder import check_new
from solrl_trainer.settings.config import RunConfig

logger = logging.getLogger(__name__)

FIRST_PATIENCE = 15.0
"""Seconds for a new run to reach the service; a wrong address should be reported soon."""

RewardOptions = Mapping[str, Mapping[str, Any]]
"""Reward → options of its loader."""


def check_run(config: RunConfig, *, resume: bool, dry: bool = False) -> tuple[RunConfig, ModelInfo | None]:
    """Check a run that is about to start; return its settings without evaluation rewards that cannot score its images.

    Beside them, the run's model at its service. With `dry`, a service that does not answer is only a warning.

    Raises:
        ValueError, OSError: folder, prompts, rewards or model cannot be used; says what to do.
        ProblemError: the service cannot be reached, lacks the model, a reward or a precision, or has another run
            with this name.
        MismatchError: the service has a different noise contract.
    """
    _check_here(config, resume=resume)
    hosted = None
    if config.uses_service:
        try:
            patience = 0 if dry else config.patience if resume else min(FIRST_PATIENCE, config.patience)
            with RolloutClient(config.service_url, patience=patience, on_wait=Waits()) as client:
                hosted = _check_service(client, config, resume=resume)
        except ProblemError as error:
            if not dry or error.problem.kind != ProblemKind.SERVICE_UNREACHABLE:
                raise
            logger.warning(f"not checked: the service at {config.service_url} does not answer")
    return _check_models(config), hosted


def is_usable(name: str, prompts: Sequence[PromptItem], options: RewardOptions) -> bool:
    """Whether a reward can judge images of all these prompts, as far as it says; if not, the log says why."""
    fault = unsuitable_prompt(name, prompts, options)
    if fault is not None:
        logger.warning(f"held-out images are not scored with {name}: {fault}")
    return fault is None


def require_usable(name: str, prompts: Sequence[PromptItem], split: str, options: RewardOptions) -> None:
    """Refuse a reward that cannot judge images of all these prompts, by a ValueError with it and such a prompt."""
    fault = unsuitable_prompt(name, prompts, options)
    if fault is not None:
        raise ValueError(
            f"reward {name!r} cannot be used with the {split} prompts: {fault}; omit it, or use prompts with the "
            f"text, or the metadata in {split}_metadata.jsonl, that it needs"
        )


def unsuitable_prompt(name: str, prompts: Sequence[PromptItem], options: RewardOptions) -> str | None:
    """Why a reward cannot judge images of one of the prompts; a server that does not answer is a warning."""
    from solrl_core.errors import RewardUnavailableError
    from solrl_core.reward_registry import REWARDS
    from solrl_core.rewards.reward import AT, first_fault

    texts = [(prompt.text, prompt.metadata) for prompt in prompts]
    loader = options.get(name, {})
    if AT not in loader:
        return first_fault(REWARDS.find(name), texts)
    from solrl_remote.remote_reward import connect_reward

    try:
        return connect_reward(name, loader).first_fault(texts)
    except RewardUnavailableError as error:
        logger.warning(f"prompts are not checked with {name}: {error}")
        return None


def _check_here(config: RunConfig, *, resume: bool) -> None:
    """Check folder, prompts, device, the algorithm, and the rewards' names and options."""
    if not resume:
        check_new(config.output)
    require_trackers(config.track)
    if config.start_lora is not None:
        from solrl_trainer.policy.start_lora import find_start

        find_start(config.start_lora)
    folders = [find_prompts(name) for name in config.prompt_sources]
    train, test = ([read_split(folder, split) for folder in folders] for split in ("train", "test"))
    _check_counts(config, folders)
    check_images(stored_files(config.prompt_sources, config.explore.source))
    from solrl_core.rewards.reward import check_named, check_reward  # imports torch, so it follows the fast checks

    from solrl_trainer.algorithms.trial import try_algorithm
    from solrl_trainer.ranks.communicator import pick_device

    pick_device(config.device, read_rank_info())
    named = sorted({*config.rewards, *config.evaluate.rewards})
    check_named(config.reward_options, named)
    for name in named:
        check_reward(name, config.reward_options.get(name, {}), all_given=False)
    try_algorithm(config.algorithm, config.explore.keep)
    shared = (in_both(a.texts, b.texts, f"{a.path.name} or {b.path.name}") for a in train for b in test)
    for split in (*train, *test):
        check_known(split.prompts, config.rewards, str(split.path))
    for name, source in config.prompt_sources.items():
        if unknown := next((reward for reward in source.rewards or () if reward not in config.rewards), None):
            raise ValueError(
                f"prompts: got the reward {unknown!r} of {name}{did_you_mean(unknown, config.rewards)}; expected some "
                f"of the run's rewards: {', '.join(config.rewards)}"
            )
    for note in filter(None, (*(split.repeated for split in (*train, *test)), *shared)):
        logger.warning(note)


def _check_counts(config: RunConfig, folders: Sequence[Path]) -> None:
    """Refuse more prompts per iteration than a source has, and a share of less than one."""
    per_iteration, train = config.explore.prompts, prompts_of_run(config.prompt_sources, "train")
    several = len(folders) > 1
    for folder, prompts, count in zip(folders, train.sources, train.counts(per_iteration), strict=True):
        available = len(prompts)
        share = f", of which its share is {count}" if several else ""
        if not count:
            raise ValueError(
                f"explore.prompts is {per_iteration}{share}: no prompt of {folder}; expected more prompts per "
                "iteration, or a larger share in prompts"
            )
        if count > available:
            cure = "expected more prompts, or a smaller share in prompts"
            raise ValueError(
                f"explore.prompts is {per_iteration}{share}, but {folder} has {available} train prompts; "
                + (cure if several else f"expected at most {available}: --set explore.prompts={available}")
            )


def _check_service(client: RolloutClient, config: RunConfig, *, resume: bool) -> ModelInfo:
    """Check that the service can serve the run; return the run's model there."""
    from solrl_trainer.service.requirements import (
        hosted_model,
        require_precision,
        require_rewards,
        require_scopes,
        reward_specs,
        run_taken,
    )

    service, hosted = hosted_model(client, config.model_name)
    require_scopes(client.url, service)
    train = prompts_of_run(config.prompt_sources, "train").all
    require_rewards(client.url, service, hosted, reward_specs(config.service_rewards(train), config, hosted))
    if (explored := config.explore.precision) != "auto":
        require_precision(client.url, hosted, explored)
    # Version 0 may be from an attempt of this run that ended before its first checkpoint.
    if not resume and (pushed := client.adapters(config.run)) is not None and pushed.head > 0:
        raise run_taken(client.url, config.run, pushed.head)
    return hosted


def _check_models(config: RunConfig) -> RunConfig:
    """Check that the rewards can score the prompts, and that the model exists."""
    from solrl_core.families.load import locate

    train, test = (prompts_of_run(config.prompt_sources, split) for split in ("train", "test"))
    for name in config.rewards:
        for split, prompts in (("train", train.all), ("test", test.all)):
            require_usable(name, scored_prompts(name, prompts), split, config.reward_options)
    judged, options = test.sample(config.evaluate.prompts), config.reward_options
    usable = tuple(name for name in dict.fromkeys(config.evaluate.rewards) if is_usable(name, judged, options))
    locate(config.model)
    left_out = set(config.evaluate.rewards) - set(usable) - config.rewards.keys()
    options = {name: value for name, value in options.items() if name not in left_out}
    guards = tuple(name for name in config.evaluate.guards if name in usable or name in config.rewards)
    if unguarded := sorted(set(config.evaluate.guards) - set(guards)):
        logger.warning(f"the run does not end when {' or '.join(unguarded)} falls (evaluate.guards)")
    evaluate = config.evaluate.model_copy(update={"rewards": usable, "guards": guards})
    return config.model_copy(update={"evaluate": evaluate, "reward_options": options})
