"""Session: the parts of a run, loaded once, checked, and connected to a service if there is one."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from solrl_client.retries import OnWait, ignore
from solrl_core.families import load_backbone
from solrl_core.fingerprint import SCHEDULE, model_digest, part_digests, schedule_digest
from solrl_core.precision import numerics, supported_tiers
from solrl_core.precision.fp8 import require_fp8
from solrl_core.rewards import RewardSet
from solrl_engine.sampler import Sampler
from solrl_engine.scorer import Scorer
from solrl_proto.rollouts import PromptItem
from solrl_remote.remote_reward import connect_reward

from solrl_trainer.algorithms.base import Algorithm
from solrl_trainer.algorithms.registry import ALGORITHMS
from solrl_trainer.policy.models import Models
from solrl_trainer.policy.sharding import LockstepCommunicator
from solrl_trainer.policy.update import Updater
from solrl_trainer.ranks.communicator import Communicator, pick_device, share, wait_for_rank_zero
from solrl_trainer.records import checkpoints
from solrl_trainer.records.reward_clock import RewardClock
from solrl_trainer.report.pairs import SHOWN_PROMPTS
from solrl_trainer.rollouts.exploration import Explorer
from solrl_trainer.rollouts.local import LocalExplorer
from solrl_trainer.rollouts.on_device import DeviceSampling
from solrl_trainer.rollouts.regenerate import Regenerator
from solrl_trainer.rollouts.scoring import SampleScorer
from solrl_trainer.service.adapter_supply import AdapterSupply
from solrl_trainer.service.agreement import (
    check_bindings,
    check_decoder_precision,
    note_emulation,
)
from solrl_trainer.service.connection import (
    FIRST_PATIENCE,
    ServiceConnection,
    connect_service,
    rollout_client,
)
from solrl_trainer.service.explorer import ServiceExplorer
from solrl_trainer.service.regenerator import ServiceRegenerator
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.long_prompts import note_long_prompts
from solrl_trainer.settings.prompts import find_prompts, prompts_of_iteration, read_prompts
from solrl_trainer.settings.resuming import parts_when_loaded


@dataclass
class Session:
    """The parts of a run.

    Attributes:
        config: all settings.
        world: ranks that train together.
        models: backbone, generators and policies.
        rewards: loaded rewards, trained or only logged.
        algorithm: computes advantages and loss.
        supply: pushes adapters to the service; only on rank 0, and if a service explores.
        explorer, regenerator: produce an iteration's samples.
        images: scores images with every reward.
        scorer: scores samples on this device.
        clock: times of the rewards in this iteration, of this rank's share.
        sampler: draws samples as regeneration does, on this device.
        optimizer: optimiser of the current policy.
        updater: takes the optimiser steps.
        train_prompts, test_prompts: training and held-out prompts.
        adapters: adapter files of the behaviour policy by version: the newest, and older ones needed at the lag.
        parts: digests and versions of what the run depends on beside its settings, see `resuming`.
    """

    config: RunConfig
    world: Communicator
    models: Models
    rewards: RewardSet
    algorithm: Algorithm[Any, Any]
    supply: AdapterSupply | None
    explorer: Explorer
    regenerator: Regenerator
    images: Scorer
    scorer: SampleScorer
    clock: RewardClock
    sampler: Sampler
    optimizer: torch.optim.Optimizer
    updater: Updater
    train_prompts: list[PromptItem]
    test_prompts: list[PromptItem]
    adapters: dict[int, bytes] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)

    def prompts(self, iteration: int) -> list[PromptItem]:
        """Prompts of an iteration, for all ranks together."""
        config = self.config
        return prompts_of_iteration(self.train_prompts, config.explore.prompts, config.seed, iteration)

    def start(self, adapters: Mapping[int, bytes], pushed: Collection[str]) -> None:
        """Start from these versions of the behaviour policy, and begin to explore under them.

        Args:
            adapters: files by version, the newest last.
            pushed: digests of all versions that this run has pushed so far.
        """
        self.adapters = dict(adapters)
        if self.supply is not None:
            self.supply.start(adapters, pushed)
        newest = max(adapters)
        self._serve(newest, adapters[newest])

    def checkpoint(self, version: int, adapter: bytes, held_out: Mapping[int, float]) -> None:
        """Record `adapter` as the newest version, and write a checkpoint if one is due; see `checkpoints.save`."""
        config = self.config
        self.adapters[version] = adapter
        for older in sorted(self.adapters)[: -(config.explore.lag + 1)]:
            del self.adapters[older]
        due = version % config.checkpoint_every == 0 or version == config.iterations
        if due and self.world.rank == 0:
            folder = config.output / "checkpoints"
            policy, adapters = self.models.policy, self.adapters
            checkpoints.save(folder, version, adapters, policy, self.optimizer, config, held_out, self.parts)

    def push(self, version: int, adapter: bytes) -> None:
        """Push the newest version to the service if there is one, and begin to explore under it."""
        if self.supply is not None:
            self.supply.push(version, adapter)
        self._serve(version, adapter)

    def _serve(self, version: int, adapter: bytes) -> None:
        # No rank may explore under a version before rank 0 has pushed it.
        wait_for_rank_zero(self.world)
        self.models.merge_behaviour(adapter, version)
        self.explorer.prefetch(version, beyond=self.config.regenerate.at != "service")


@contextmanager
def open_session(
    config: RunConfig, note: Callable[[str], None], world: Communicator, on_wait: OnWait = ignore
) -> Iterator[Session]:
    """Load everything, and refuse a service or an exploration plan that differs from what is loaded here.

    Args:
        config: the run's settings.
        note: shows a line of text to the user.
        world: ranks that train together.
        on_wait: told of waits for servers.

    Raises:
        ProblemError: the service cannot be reached, or does not host the model.
        MismatchError: the service differs, or the plan is of another model; names the part.
        ValueError, OSError: model, reward or prompts cannot be loaded, or the device does not explore at the precision.
    """
    if config.explore.prompts < world.size:
        raise ValueError(
            f"explore.prompts is {config.explore.prompts}; expected at least one for each of {world.size} ranks"
        )
    least = world.size * math.ceil(1 / config.regenerate.share)
    if config.explore.prompts < least:
        raise ValueError(
            f"explore.prompts is {config.explore.prompts} for {world.size} ranks; expected at least {least}, so that a "
            f"service regenerates some of each rank's prompts at regenerate.share={config.regenerate.share:g}"
        )
    folder = find_prompts(config.prompts)
    train, test = read_prompts(folder, "train"), read_prompts(folder, "test")
    with rollout_client(config, world, on_wait) as client:
        note(f"loading {config.model}" + (f" and comparing digests with {client.url}" if client else ""))
        if client is not None:
            client.with_patience(FIRST_PATIENCE).model(config.model_name)  # before anything large is loaded
        device = pick_device(config.device, world)
        if client is None and config.explore.precision == "fp8":
            require_fp8(torch.device(device))
        backbone = load_backbone(config.model, device=device, revision=config.revision, waiting=True)
        check_decoder_precision(config.explore.decoder_precision, backbone, note if client is None else None)
        note_long_prompts(backbone, {"training": train, "held-out": test[: config.evaluate.prompts]}, note)
        rewards = RewardSet.load(
            [*config.rewards, *config.evaluate.rewards],
            backbone,
            config.reward_options,
            connect=partial(connect_reward, patience=config.patience, on_wait=on_wait),
        )
        # Take digests before the policy modifies the backbone's transformer.
        parts = part_digests(backbone.parts, backbone.device)
        check_bindings(config.bindings, model_digest(parts), config.model)
        digests = parts | {SCHEDULE: schedule_digest(backbone.sigmas)} | rewards.digests()
        service = None
        if client is not None:
            service = connect_service(config, client, backbone, digests, world, note)
        else:
            tiers = supported_tiers(backbone.device)
            emulated = [tier for tier in tiers if numerics(tier, backbone.device) == "emulated"]
            note_emulation(emulated, config.explore.precision, note)
        models = Models.build(backbone, config, note, world)
        session = connect(config, models, rewards, service, train, test, note)
        session.parts = parts_when_loaded(config, parts, backbone.options, rewards.digests())
        yield session


def connect(
    config: RunConfig,
    models: Models,
    rewards: RewardSet,
    service: ServiceConnection | None,
    train: list[PromptItem],
    test: list[PromptItem],
    note: Callable[[str], None],
) -> Session:
    """Connect loaded parts to a session. Sessions may share models, one after the other; each has its own optimiser.

    Args:
        config: the run's settings.
        models: built with these settings.
        rewards: all rewards of the settings.
        service: the run's service; None if this device explores.
        train, test: training and held-out prompts.
        note: shows a line of text to the user.
    """
    world, optimizer, backbone = models.world, config.optimizer, models.backbone
    adamw = torch.optim.AdamW(
        models.policy.parameters,
        lr=optimizer.learning_rate,
        betas=optimizer.betas,
        weight_decay=optimizer.weight_decay,
        eps=optimizer.eps,
    )
    algorithm = ALGORITHMS.find(config.algorithm.name)(config.algorithm)
    here = DeviceSampling(config, models, rewards, algorithm.trains_on, note)
    local = here.regenerator()

    def own_prompts(iteration: int) -> Sequence[PromptItem]:
        return share(prompts_of_iteration(train, config.explore.prompts, config.seed, iteration), world)

    explorer: Explorer
    regenerator: Regenerator = local
    if service is None:
        explorer = LocalExplorer(here.candidates(), own_prompts, candidates=config.explore.candidates, seed=config.seed)
    else:
        explorer = ServiceExplorer(
            service.source, own_prompts, seed=config.seed, lag=config.explore.lag, iterations=config.iterations
        )
        if service.regeneration is not None:
            regenerator = ServiceRegenerator(
                service.regeneration,
                local,
                models,
                own_prompts,
                seed=config.seed,
                share=config.regenerate.share,
                weights=config.weights,
                shown=0 if world.rank else SHOWN_PROMPTS,
                note=note,
                on_times=partial(here.clock.add, "samples", "service"),
            )
    return Session(
        config=config,
        world=world,
        models=models,
        rewards=rewards,
        algorithm=algorithm,
        supply=service.supply if service else None,
        explorer=explorer,
        regenerator=regenerator,
        images=here.images,
        scorer=here.scorer,
        clock=here.clock,
        sampler=local.sampler,
        optimizer=adamw,
        updater=Updater(
            backbone=backbone,
            policy=models.policy,
            optimizer=adamw,
            algorithm=algorithm,
            settings=optimizer,
            sigmas=backbone.sigmas(config.regenerate.steps),
            guidance=config.guidance,
            seed=config.seed,
            world=world,
            in_step=isinstance(world, LockstepCommunicator),
            after_step=partial(models.policy.average_step, settings=config.policy),
        ),
        train_prompts=train,
        test_prompts=test[: config.evaluate.prompts],
    )
