"""Loading of all hosted models and their rewards onto one device, and the warm-up that shows whether they fit."""

import errno
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from solrl_core.families.load import describe_model, locate
from solrl_core.model_options import ImageSize, ModelOptions
from solrl_core.rewards import RewardSet
from solrl_core.rewards.reward import PlainDefaults, Reward, check_named, check_reward
from solrl_core.rewards.trial import try_rewards
from solrl_remote.remote_reward import connect_reward

from solrl_rollout.engine.backends import BackendLoader
from solrl_rollout.engine.chunk_scorer import ChunkScorer
from solrl_rollout.engine.model_runner import ModelRunner
from solrl_rollout.settings import ModelSpec, RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics


def load_models(
    settings: RolloutSettings, metrics: RolloutMetrics, load_backend: BackendLoader, lock: str | None = None
) -> dict[str, ModelRunner]:
    """Load all models of the settings, by name, then warm them up; equal rewards are loaded once.

    Args:
        settings: models, rewards, and their device.
        lock: name of a lock, so that the processes of this host read weights one after another; None to read at once.

    Raises:
        ValueError, OSError, RuntimeError: a model or a reward cannot be loaded or does not fit.
        RewardError: `try_rewards` refuses a reward, or one fails in the warm-up.
    """
    _check_names(settings)
    rewards: dict[str, Reward] = {}
    runners: dict[str, ModelRunner] = {}
    try:
        with _alone(lock):
            for spec in settings.models:
                with _fitting(spec, settings, runners):
                    runners[spec.name] = _load_model(spec, settings, metrics, load_backend, rewards)
        for spec in settings.models:
            with _fitting(spec, settings, runners):
                runners[spec.name].warm_up()
    except BaseException:
        for runner in runners.values():
            runner.backend.close()
        raise
    return runners


@contextmanager
def _alone(lock: str | None) -> Iterator[None]:
    """Wait until no other process of this host is within a block of this name: each reads through the host's memory.

    The name is a socket's in the abstract namespace, which ends with its process and leaves no file.
    """
    with socket.socket(socket.AF_UNIX) as named:
        while lock is not None:
            try:
                named.bind(f"\0{lock}")
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                time.sleep(0.1)
        yield


@contextmanager
def _fitting(spec: ModelSpec, settings: RolloutSettings, runners: Mapping[str, ModelRunner]) -> Iterator[None]:
    """If memory runs out within the block, name the model that does not fit, and the models loaded before it."""
    other_models = [name for name in runners if name != spec.name]
    try:
        yield
    except torch.OutOfMemoryError as error:
        beside = f" with {', '.join(other_models)} loaded" if other_models else ""
        raise RuntimeError(
            f"{spec.location} does not fit on {settings.device}{beside}: {error}; `solrl-rollout memory --model "
            f"{spec.location}` plans what fits; serve fewer models, at a lower precision, or on a larger GPU"
        ) from error


def _load_model(
    spec: ModelSpec,
    settings: RolloutSettings,
    metrics: RolloutMetrics,
    load_backend: BackendLoader,
    rewards: dict[str, Reward],
) -> ModelRunner:
    described = describe_model(spec.location, spec.revision)
    if described is not None:  # before the model, which may take long
        size = ImageSize(settings.height, settings.width, settings.frames)
        _tried_rewards(settings, described.options.sized(size), rewards)
    backend = load_backend(spec, settings)
    try:
        identity = backend.identity
        options = ModelOptions(height=identity.height, width=identity.width, rewards=identity.reward_options)
        loaded = _tried_rewards(settings, options, rewards)
        default = backend.capabilities.fastest if settings.precision == "auto" else settings.precision
        return ModelRunner(spec.name, backend, ChunkScorer(loaded), default, metrics)
    except BaseException:
        backend.close()
        raise


def _tried_rewards(settings: RolloutSettings, options: ModelOptions, loaded: dict[str, Reward]) -> RewardSet:
    """The rewards of the settings with a model's options. Rewards in `loaded` are shared, and have been tried."""
    defaults, before = PlainDefaults(torch.device(settings.torch_device), options), len(loaded)
    rewards = RewardSet.load(
        settings.reward_names,
        defaults,
        settings.options_of_rewards,
        loaded=loaded,
        connect=connect_reward,
        dtype=settings.dtype_of_rewards,
    )
    if len(loaded) > before:
        try_rewards(rewards, defaults)
    return rewards


def _check_names(settings: RolloutSettings) -> None:
    for spec in settings.models:
        locate(spec.location)
    options = settings.options_of_rewards
    check_named(options, settings.reward_names)
    for name in settings.reward_names:
        check_reward(name, options.get(name, {}), all_given=False)
