"""Groups of this device, which explores and regenerates in turns with the trainer's other phases."""

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from solrl_client.retries import OnWait
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.rewards.images import as_floats
from solrl_core.sampling.generator import Generator
from solrl_core.sampling.sampler import SolverSpec
from solrl_engine.batch_size import AdaptiveBatchSize
from solrl_engine.sampler import Sampler
from solrl_engine.scorer import Scorer
from solrl_engine.side_stream import Pending, SideStream
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import Plan, PromptItem, RewardTime
from solrl_proto.status import ScoringTime

from solrl_trainer.algorithms.registry import make_algorithm
from solrl_trainer.prompts.image_reader import read_image
from solrl_trainer.prompts.prompt_sets import PromptSet
from solrl_trainer.prompts.stored_files import stored_files
from solrl_trainer.ranks.communicator import Communicator, shard
from solrl_trainer.rollouts.candidates import GroupSampler
from solrl_trainer.rollouts.exploration import ExplorationSummary, OnSummary, seed_root, training_plan
from solrl_trainer.rollouts.groups import CandidateGroup, ScoredSamples, batched, flattened
from solrl_trainer.rollouts.loading import Loaded, load
from solrl_trainer.rollouts.models import Models
from solrl_trainer.rollouts.sample_scorer import SampleScorer
from solrl_trainer.settings.config import RunConfig

Images = Literal["candidates", "samples"]
"""Explored candidates, or the samples that are trained on."""
By = Literal["service", "trainer"]


class RewardClock:
    """Sums the seconds of each reward by its images and its place."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[Images, By, str, str | None], float] = {}

    def restart(self) -> None:
        """Forget all seconds, at the beginning of an iteration."""
        self._seconds.clear()

    def add(self, of: Images, by: By, times: Mapping[str, RewardTime]) -> None:
        """Add the times of rewards by name; `by`: the program that computed them, or asked their servers."""
        for name, reward_time in times.items():
            place = of, by, name, reward_time.server
            self._seconds[place] = self._seconds.get(place, 0.0) + reward_time.seconds

    @property
    def times(self) -> tuple[ScoringTime, ...]:
        """The sums, first of candidates, then of samples."""
        sums = sorted(self._seconds.items(), key=lambda item: item[0][0])
        return tuple(
            ScoringTime(of=of, by=by, reward=name, server=server, seconds=round(seconds, 4))
            for (of, by, name, server), seconds in sums
        )


logger = logging.getLogger(__name__)


@contextmanager
def open_device_source(
    config: RunConfig, train: PromptSet, world: Communicator, on_wait: OnWait
) -> Iterator["DeviceSource"]:
    """Load a run that explores on this device; `on_wait` is told of waits for reward servers.

    Raises:
        MismatchError: the plan is of another model.
        RewardError: a reward cannot score two grey images.
        ValueError, OSError: the model or rewards cannot be loaded, or the device does not compute in the precision.
    """
    loaded = load(config, world, on_wait)
    yield DeviceSource(config, loaded, Models.build(loaded.backbone, config, world), train)


class DeviceSource:
    """A source whose samplers and scorers share the device's memory, its side stream and the clock of the rewards.

    Attributes:
        algorithm: whose training data choose the steps of samples.
        clock: times of the rewards in this iteration, of this rank's share.
        image_scorer: scores images with every reward.
        sampler: draws training samples in BF16, as regeneration does.
    """

    def __init__(self, config: RunConfig, loaded: Loaded, models: Models, train: PromptSet) -> None:
        """Set up samplers and scorers; `models` are built on the model of `loaded` with these settings."""
        self._config, self._train = config, train
        self.loaded, self.models = loaded, models
        self.algorithm = make_algorithm(config.algorithm)
        self.clock = RewardClock()
        scored_at_once = AdaptiveBatchSize(config.batch, doing="scoring", on_exhausted=logger.warning)
        self.image_scorer = Scorer(loaded.rewards, scored_at_once)
        self._side = SideStream(models.backbone.device)
        self.scorer = self._scorer("samples", tuple(config.rewards))
        self.sampler = self._training_sampler(models.generator, config.sample_steps)
        stored = stored_files(config.prompt_sources, config.explore.source)
        self._stored = StoredImages(stored, models.backbone, list(config.rewards), config.batch) if stored else None
        self._planned = 0
        """Iteration whose plan the candidates follow."""
        self._group_sampler = self._make_group_sampler()

    def own_prompts(self, iteration: int) -> Sequence[PromptItem]:
        """This rank's prompts of an iteration."""
        config = self._config
        return shard(self._train.of_iteration(config.explore.prompts, config.seed, iteration), self.models.world)

    def start(self, adapters: Mapping[int, bytes], pushed: Collection[str]) -> None:
        """Merge the newest of these versions."""
        newest = max(adapters)
        self.push(newest, adapters[newest])

    def push(self, version: int, adapter: bytes) -> None:
        """Merge this version."""
        self.models.merge_behaviour(adapter, version)

    def explore(self, iteration: int, on_summary: OnSummary) -> Iterator[CandidateGroup]:
        """The groups of an iteration, under the newest version, generated on demand; `on_summary` after the last."""
        score_sum, score_count, seconds = 0.0, 0, 0.0
        groups = self.groups(self.own_prompts(iteration), iteration)
        while True:
            started = time.perf_counter()
            group = next(groups, None)
            seconds += time.perf_counter() - started
            if group is None:
                break
            # Scores without samples are summed in float64, like a service's; samples in float32.
            score_sum += sum(group.scores) if group.samples is None else float(group.samples.scores.sum())
            score_count += len(group.scores)
            yield group
        generator = self._group_sampler.sampler.generator
        # Without lag, the version has the number of the iteration.
        numerics = generator.precision, generator.numerics
        on_summary(ExplorationSummary(iteration, iteration, *numerics, score_sum, score_count, seconds))

    def groups(self, prompts: Sequence[PromptItem], iteration: int) -> Iterator[CandidateGroup]:
        """Explore these prompts of an iteration, under the newest version, or read their stored images."""
        if self._stored is not None:
            return self._stored.groups(prompts)
        return self._groups(prompts, iteration, seed_root(self._config.seed, iteration))

    def groups_per_batch(self, kept: int) -> int:
        """Number of groups of `kept` samples that fill a batch."""
        return self.sampler.batch.groups(kept, self.models.backbone.device)

    def regenerate(self, selections: Sequence[CandidateGroup]) -> Pending[ScoredSamples]:
        """Samples of the selected seeds; candidates that were kept for training are returned unchanged."""
        kept_samples = [selection.samples for selection in selections if selection.samples is not None]
        if kept_samples:
            samples = ScoredSamples.join(kept_samples)
            return lambda: samples
        prompts, seeds = flattened([group.prompt for group in selections], [group.seeds for group in selections])
        return self.scorer.score_samples(prompts, self.sampler.sample(prompts, seeds))

    def groups_of(self, prompts: Sequence[PromptItem], version: int, root: int, iteration: int) -> list[CandidateGroup]:
        """Explore the groups of these prompts as for an iteration; `root` is the root of their seeds."""
        return list(self._groups(prompts, iteration, root))

    def images_of(
        self, prompts: Sequence[PromptItem], seeds: Sequence[Sequence[int]], version: int, iteration: int
    ) -> tuple[torch.Tensor, float]:
        """Images `for_showing` of the given candidates of each prompt, and the seconds they took."""
        self._planned, started = iteration, time.perf_counter()
        parts = [self._group_sampler.images(prompt, row) for prompt, row in zip(prompts, seeds, strict=True)]
        return torch.cat(parts), time.perf_counter() - started

    def _groups(self, prompts: Sequence[PromptItem], iteration: int, root: int) -> Iterator[CandidateGroup]:
        candidates = self._config.explore.candidates
        per_batch = self._group_sampler.sampler.batch.groups(candidates, self.models.backbone.device)
        for part in batched(prompts, per_batch):
            seeds = [expand_seeds(root, prompt.id, candidates) for prompt in part]
            self._planned = iteration
            yield from self._group_sampler.groups(part, seeds)

    def _make_group_sampler(self) -> GroupSampler:
        """Explores by the plan; without a second stage, the candidates are the training samples."""
        config, models = self._config, self.models
        if not config.two_stage:
            return GroupSampler(self._training_sampler(models.explorer, config.sample_steps), self.scorer, keep=True)
        batch = self._batch(models.explorer)
        sampler = Sampler(models.explorer, lambda: config.exploration_plan(self._planned), batch=batch)
        return GroupSampler(sampler, self._scorer("candidates", [spec.name for spec in config.trained]))

    def _scorer(self, of: Images, names: Sequence[str]) -> SampleScorer:
        on_times = partial(self.clock.add, of, "trainer")
        return SampleScorer(self.image_scorer, names, self._config.trained, self._side, on_times)

    def _training_sampler(self, generator: Generator, steps: int) -> Sampler:
        config, data = self._config, self.algorithm.trains_on

        def plan() -> Plan:
            return training_plan(config, steps)

        def solver() -> SolverSpec:
            return data.solver(config.solver, steps, self.models.version, config.seed)

        return Sampler(generator, plan, solver, data.recorded, self._batch(generator))

    def _batch(self, generator: Generator) -> AdaptiveBatchSize:
        sharded = self.models.world.in_step and generator is self.models.generator
        return AdaptiveBatchSize(self._config.batch, on_exhausted=logger.warning, retries=not sharded)


class StoredImages:
    """Groups of stored images, encoded by the model's autoencoder: the chosen one scores 1, a rejected one 0."""

    def __init__(
        self, files: Mapping[str, Sequence[Path]], backbone: PipelineBackbone, rewards: Sequence[str], batch: int
    ) -> None:
        """`files`: the result of `stored_files`. `rewards`: of the run; none is computed. `batch`: read at once."""
        if backbone.frames > 1:
            raise ValueError(
                f"got clips of {backbone.frames} frames to train on stored images; expected generate.frames=1, which "
                f"makes images of {backbone.name}"
            )
        self._files, self._backbone, self._rewards, self._batch = files, backbone, rewards, batch

    def groups(self, prompts: Sequence[PromptItem]) -> Iterator[CandidateGroup]:
        """The groups of these prompts; a ValueError names an image that cannot be read."""
        for part in batched(prompts, max(1, self._batch // len(self._files[prompts[0].id]))):
            paths = [path for prompt in part for path in self._files[prompt.id]]
            images = torch.stack([self._read(path) for path in paths])
            count = len(paths) // len(part)
            scores = torch.tensor([1.0, 0.0][:count]).repeat(len(part))
            rewards = {name: torch.full((len(paths),), torch.nan) for name in self._rewards}
            # One by one: in float32, a batch of large images takes gigabytes.
            device = self._backbone.device
            latents = torch.cat([self._backbone.encode_images(image.to(device)) for image in images[:, None]])
            samples = ScoredSamples(latents, images, None, scores, rewards).split(len(part))
            for prompt, stored in zip(part, samples, strict=True):
                yield CandidateGroup(prompt, range(count), stored.scores.tolist(), stored)

    def _read(self, path: Path) -> torch.Tensor:
        """An image float32 [3, H, W] in [0, 1], scaled and cropped at its centre to the model's size."""
        fitted = ImageOps.fit(read_image(path), (self._backbone.width, self._backbone.height), Image.Resampling.LANCZOS)
        return as_floats(torch.from_numpy(np.array(fitted)).permute(2, 0, 1))
