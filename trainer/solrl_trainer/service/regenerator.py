"""Regeneration at a rollout service, which also scores the samples; this process repeats one of each iteration."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from solrl_core.rewards.base import weighted_sum
from solrl_engine.side_stream import Pending, in_background
from solrl_proto.noise import expand_seeds
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.rollouts import PromptItem, RewardTime

from solrl_trainer.policy.models import Models
from solrl_trainer.rollouts.exploration import PromptsOf
from solrl_trainer.rollouts.groups import GroupSelection, ScoredSamples
from solrl_trainer.rollouts.regenerate import LocalRegenerator
from solrl_trainer.rollouts.scoring import OnTimes
from solrl_trainer.service.latents import from_base64
from solrl_trainer.service.source import RolloutSource

TOLERANCE = 0.05
"""Largest difference of repeated latents, relative to their root mean square, if the arithmetic may differ: BF16 rounds
differently in a batch of another size, and later steps amplify that. About nine times the largest that was measured:
0.0056, FLUX.1 at 10 steps with random weights, on two H200s. Latents of different seeds differ by about 1.4."""
_AT_ONCE = 4
"""Requests in progress, each for one group, so that the service always has a next one."""


@dataclass(frozen=True)
class ServedSamples:
    """Samples of a group as a service answered them.

    Attributes:
        latents: clean latents x0, float32 [n, ...].
        rewards: reward → values [n].
        times: time of each reward at the service.
    """

    latents: torch.Tensor
    rewards: dict[str, torch.Tensor]
    times: Mapping[str, RewardTime]


@dataclass(frozen=True)
class RegenerationSource:
    """The service as a source of a run's training samples.

    Attributes:
        source: requests with the plan of regeneration and all rewards of the run.
        latent_shape: shape of one candidate's latents.
        exact: whether the service computes with the same arithmetic on a CPU, so that latents have the same bits.
    """

    source: RolloutSource
    latent_shape: Sequence[int]
    exact: bool

    @property
    def url(self) -> str:
        """URL of the service."""
        return self.source.client.url

    def samples_of(self, prompt: PromptItem, seeds: Sequence[int], version: int, adapter: str) -> ServedSamples:
        """Samples of a prompt under `version`, whose adapter's file has the digest `adapter`.

        Raises:
            ProblemError: refused or unreachable; 409 `served-differently`: the answer does not match the request.
        """
        answer = self.source.group_of(prompt, seeds, version)
        (group,) = answer.groups
        rewards = {spec.name: torch.tensor(group.rewards[spec.name]) for spec in self.source.rewards}
        latents = from_base64(group, self.latent_shape, adapter=adapter, url=self.url)
        return ServedSamples(latents, rewards, answer.seconds.rewards)


class ServiceRegenerator:
    """Has the service regenerate and score the selections of a share of the prompts; this device does the others.

    The version is always that of the iteration, which was pushed before it began. Of each iteration, one latent of the
    service, drawn from the run's seed, is generated here, too. If it differs, the run stops.
    """

    def __init__(
        self,
        source: RegenerationSource,
        local: LocalRegenerator,
        models: Models,
        prompts_of: PromptsOf,
        *,
        seed: int,
        share: float,
        weights: Mapping[str, float],
        shown: int,
        note: Callable[[str], None],
        on_times: OnTimes = lambda times: None,
    ) -> None:
        """Set up a regenerator.

        Args:
            source: the service.
            local: regenerates the others on this device.
            models: with the behaviour policy merged.
            prompts_of: this rank's prompts of an iteration.
            seed: seed of the run.
            share: share of the prompts that the service regenerates.
            weights: trained reward → its weight in the score.
            shown: number of each iteration's first prompts whose images are decoded, for the report.
            note: shows a line of text to the user.
            on_times: called with the times of the rewards of each arrived group.
        """
        self._source = source
        self._local = local
        self._models = models
        self._prompts_of = prompts_of
        self._seed = seed
        self._share = share
        self._weights = weights
        self._shown = shown
        self._note = note
        self._on_times = on_times
        self._largest = 0.0
        self._slots = threading.BoundedSemaphore(_AT_ONCE)

    def groups_per_batch(self, kept: int) -> int:
        """A selection at a time: each is this device's or the service's."""
        return 1

    def regenerate(self, selections: Sequence[GroupSelection], iteration: int) -> Pending[ScoredSamples]:
        """Samples of the selected seeds under the behaviour policy; those of the service arrive later."""
        (selection,) = selections
        prompts = [prompt.id for prompt in self._prompts_of(iteration)]
        served = spread(prompts, self._share)
        prompt, seeds = selection.prompt, selection.seeds
        if prompt.id not in served:
            return self._local.regenerate(selections, iteration)
        arriving = self._request(selection, iteration)
        which, place = expand_seeds(self._seed, f"repeat/{iteration}", 2)
        repeats, place = prompt.id == served[which % len(served)], place % len(seeds)
        repeated = None
        if repeats:
            repeated = self._local.sampler.sample([prompt], [seeds[place]], decode=None).latents
        decoded = prompt.id in prompts[: self._shown]

        def arrived() -> ScoredSamples:
            samples = arriving()
            self._on_times(samples.times)
            if repeated is not None:
                self._compare(samples.latents[place], repeated[0].cpu(), selection, place)
            latents = samples.latents.to(self._models.backbone.device)
            images = self._models.generator.decode(latents).cpu() if decoded else torch.empty(0)
            return ScoredSamples(latents, images, None, weighted_sum(samples.rewards, self._weights), samples.rewards)

        return arrived

    def _request(self, selection: GroupSelection, version: int) -> Pending[ServedSamples]:
        adapter = self._models.behaviour_digest

        def samples() -> ServedSamples:
            with self._slots:
                return self._source.samples_of(selection.prompt, selection.seeds, version, adapter)

        return in_background(samples, "solrl-regenerate")

    def _compare(self, served: torch.Tensor, repeated: torch.Tensor, selection: GroupSelection, place: int) -> None:
        if torch.equal(served, repeated):
            return
        difference = relative_difference(served, repeated)
        if not self._source.exact and difference <= TOLERANCE:
            if difference > 2 * self._largest:
                self._note(f"latents of the service differ by rounding: {difference:.2g} of their root mean square")
                self._largest = difference
            return
        raise ProblemError(
            ProblemKind.SERVED_DIFFERENTLY,
            f"the service at {self._source.url} regenerated other latents than this process does from the same seed",
            where=f"group {selection.prompt.id!r}: latents of seed {selection.seeds[place]}",
            got=f"latents that differ by {difference:.2g} of their root mean square",
            expected="the same bits, as on any CPU of this kind" if self._source.exact else f"at most {TOLERANCE}",
            action="look for other software or a faulty device on either machine; regenerate.at=trainer does without",
        )


def spread(prompts: Sequence[str], share: float) -> list[str]:
    """A share of the prompts, evenly spread from the first on, so that the service begins before this device."""
    served = [int((i + 1) * share) > int(i * share) for i in range(len(prompts))]
    return list(compress(prompts, reversed(served)))


def relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Root mean square of the difference, relative to that of `other`."""
    return float((one - other).norm() / other.norm())
