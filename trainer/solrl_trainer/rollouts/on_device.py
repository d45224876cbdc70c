"""The samplers and scorers of a run on this device."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from solrl_core.rewards import RewardSet
from solrl_core.sampling.generator import Generator
from solrl_core.sampling.solver_specs import SolverSpec
from solrl_engine.batch_size import AdaptiveBatchSize
from solrl_engine.sampler import Sampler
from solrl_engine.scorer import Scorer
from solrl_engine.side_stream import SideStream
from solrl_proto.rollouts import Plan

from solrl_trainer.algorithms.training_data import TrainingData
from solrl_trainer.policy.models import Models
from solrl_trainer.policy.sharding import LockstepCommunicator
from solrl_trainer.records.reward_clock import Images, RewardClock
from solrl_trainer.rollouts.candidates import CandidateMaker
from solrl_trainer.rollouts.plans import exploration_plan, training_plan
from solrl_trainer.rollouts.regenerate import LocalRegenerator
from solrl_trainer.rollouts.scoring import SampleScorer
from solrl_trainer.settings.config import RunConfig


class DeviceSampling:
    """Samplers and scorers, which share the device's memory, its side stream and the clock of the rewards.

    Attributes:
        images: scores images with every reward.
        scorer: scores samples.
        clock: times of the rewards in this iteration, of this rank's share.
    """

    def __init__(
        self,
        config: RunConfig,
        models: Models,
        rewards: RewardSet,
        data: TrainingData[Any],
        note: Callable[[str], None],
    ) -> None:
        """Set up the scorers.

        Args:
            config: the run's settings.
            models: built with these settings.
            rewards: all rewards of the settings.
            data: training data of the algorithm, which chooses the steps of samples.
            note: shows a line of text to the user.
        """
        self.images = Scorer(rewards, AdaptiveBatchSize(config.batch, doing="scoring", on_exhausted=note))
        self.clock = RewardClock()
        self._config, self._models, self._data, self._note = config, models, data, note
        self._side = SideStream(models.backbone.device)
        self.scorer = self._scorer("samples", tuple(config.rewards))

    def regenerator(self) -> LocalRegenerator:
        """Regenerates selected seeds in BF16."""
        return LocalRegenerator(
            self._training_sampler(self._models.generator, self._config.regenerate.steps), self.scorer
        )

    def candidates(self) -> CandidateMaker:
        """Explores by the plan; without a second stage, the candidates are the training samples."""
        config, models = self._config, self._models
        if not config.two_stage:
            sampler = self._training_sampler(models.explorer, config.explore.steps)
            return CandidateMaker(sampler, self.scorer, keep=True)
        batch = self._batch(models.explorer)
        sampler = Sampler(models.explorer, lambda: exploration_plan(config, models.version), batch=batch)
        return CandidateMaker(sampler, self._scorer("candidates", [spec.name for spec in config.trained]))

    def _scorer(self, of: Images, names: Sequence[str]) -> SampleScorer:
        on_times = partial(self.clock.add, of, "trainer")
        return SampleScorer(self.images, names, self._config.trained, self._side, on_times)

    def _training_sampler(self, generator: Generator, steps: int) -> Sampler:
        config, data = self._config, self._data

        def plan() -> Plan:
            return training_plan(config, steps)

        def solver() -> SolverSpec:
            return data.solver(config.solver, steps, self._models.version, config.seed)

        return Sampler(generator, plan, solver, data.recorded, self._batch(generator))

    def _batch(self, generator: Generator) -> AdaptiveBatchSize:
        sharded = isinstance(self._models.world, LockstepCommunicator) and generator is self._models.generator
        return AdaptiveBatchSize(self._config.batch, on_exhausted=self._note, retries=not sharded)
