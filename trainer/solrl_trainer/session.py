"""Session: the parts of a run, loaded once and checked."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from solrl_client.retries import OnWait, ignore
from solrl_proto.models import ModelInfo
from solrl_proto.rollouts import PromptItem

from solrl_trainer.policy.update import Updater
from solrl_trainer.prompts.prompt_sets import PromptSet, log_covered, prompts_of_run
from solrl_trainer.ranks.communicator import Communicator, pick_device
from solrl_trainer.rollouts.device_source import DeviceSource, open_device_source
from solrl_trainer.rollouts.models import Models
from solrl_trainer.rollouts.truncation_warnings import warn_of_long_prompts, warn_of_unread_prompts
from solrl_trainer.run_folder import checkpoints
from solrl_trainer.service.service_source import ServiceSource, open_service_source
from solrl_trainer.settings.config import RunConfig

logger = logging.getLogger(__name__)

Source = DeviceSource | ServiceSource
"""Explores the groups of a run, under the version of `explore.lag` iterations before."""


@dataclass
class Session:
    """The parts of a run.

    Attributes:
        source: where the samples of an iteration come from.
        device: this device: its samplers and scorers.
        models: backbone, generators and policies.
        world: ranks that train together.
        adapters: adapter files of the behaviour policy by version: the newest, and older ones needed at the lag.
    """

    config: RunConfig
    source: Source
    device: DeviceSource
    models: Models
    world: Communicator
    updater: Updater
    train_prompts: PromptSet
    held_out: PromptSet
    adapters: dict[int, bytes] = field(default_factory=dict)

    @cached_property
    def test_prompts(self) -> list[PromptItem]:
        """Held-out prompts that are evaluated."""
        return self.held_out.sample(self.config.evaluate.prompts)

    @cached_property
    def fidelity_prompts(self) -> list[PromptItem]:
        """Held-out prompts to measure rank fidelity on."""
        return self.held_out.sample(self.config.evaluate.fidelity_prompts)

    @property
    def measures_fidelity(self) -> bool:
        """Whether exploration differs from regeneration and there are prompts to compare them on."""
        quantised = self.models.explorer is not self.models.generator
        return (self.config.two_stage or quantised) and bool(self.fidelity_prompts)

    def checkpoint(self, version: int, adapter: bytes, held_out: Mapping[int, float]) -> None:
        """Record `adapter` as the newest version, and write a checkpoint if one is due; see `checkpoints.save`.

        A version that will be evaluated has one, because it may turn out to be the best.
        """
        config = self.config
        self.adapters[version] = adapter
        for older in sorted(self.adapters)[: -(config.lag + 1)]:
            del self.adapters[older]
        due = not version % config.checkpoint_every or version == config.iterations or config.evaluate.is_due(version)
        if due and self.world.rank == 0:
            folder = config.output / "checkpoints"
            policy, optimizer, parts = self.models.policy, self.updater.optimizer, self.device.loaded.parts
            checkpoints.save(folder, version, self.adapters, policy, optimizer, config, held_out, parts)


@contextmanager
def open_session(
    config: RunConfig, world: Communicator, on_wait: OnWait = ignore, hosted: ModelInfo | None = None
) -> Iterator[Session]:
    """Load everything, and refuse a service or an exploration plan that differs from what is loaded here.

    `hosted`: the run's model at its service, if this process has asked for it.

    Raises:
        ProblemError: the service cannot be reached, or does not host the model.
        MismatchError: the service differs, or the plan is of another model; names the part.
        ValueError, OSError: fewer prompts than ranks; model, reward or prompts cannot be loaded, or the device does not
            explore at the precision.
    """
    if (prompts := config.explore.prompts) < world.size:
        raise ValueError(f"explore.prompts is {prompts}; expected at least one for each of {world.size} ranks")
    train, held_out = (prompts_of_run(config.prompt_sources, split) for split in ("train", "test"))
    layout = running_text(config, world.size, pick_device(config.device, world))
    logger.info("loading %s; layout: %s", config.model, layout)
    if len(train.sources) > 1:
        counts = zip(config.prompt_sources, train.counts(config.explore.prompts), train.sources, strict=True)
        parts = ", ".join(f"{name} {count} of {len(prompts):,}" for name, count, prompts in counts)
        logger.info(f"prompts of an iteration: {parts}")
    opened: AbstractContextManager[Source]
    if config.uses_service:
        opened = open_service_source(config, train, world, on_wait, hosted)
    else:
        opened = open_device_source(config, train, world, on_wait)
    with opened as source:
        session = connect(config, source, train, held_out)
        log_covered(held_out, config.evaluate.prompts, "evaluated")
        if session.measures_fidelity:
            log_covered(held_out, config.evaluate.fidelity_prompts, "of rank fidelity")
        read = {"training": train.all, "held-out": session.test_prompts}
        warn_of_long_prompts(session.models.backbone, read)
        warn_of_unread_prompts(session.device.image_scorer.rewards, read)
        yield session


def running_text(config: RunConfig, ranks: int, device: str) -> str:
    """The sides that explore, regenerate and train, in words; `device` is each rank's, as torch names it."""
    verbs = ["explore" if config.explore.source == "model" else "encode"] if config.explores_here else []
    verbs += ["regenerate"] if config.two_stage else []
    *first, last = (verb if ranks > 1 else f"{verb}s" for verb in (*verbs, "train"))
    units = ("GPU", "GPUs") if device.startswith("cuda") else ("CPU process", "CPU processes")
    text = f"{ranks} {units[ranks > 1]} {', '.join(first)} and {last}"
    return text + (f"; {config.service_url} explores (lag {config.lag})" if config.uses_service else "")


def connect(config: RunConfig, source: Source, train: PromptSet, held_out: PromptSet) -> Session:
    """Make a session of a source. Sessions may share models, one after the other; each has its own optimiser."""
    device = source if isinstance(source, DeviceSource) else source.device
    models, optimizer = device.models, config.optimizer
    adamw = torch.optim.AdamW(
        models.policy.parameters,
        lr=optimizer.learning_rate,
        betas=(0.9, optimizer.beta2),
        weight_decay=optimizer.weight_decay,
    )
    updater = Updater(models.backbone, models.policy, adamw, device.algorithm, config, models.world)
    return Session(config, source, device, models, models.world, updater, train, held_out)
