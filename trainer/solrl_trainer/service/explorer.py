"""Exploration at a rollout service, concurrent with the trainer's own work."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue

from solrl_proto.rollouts import PromptItem, RolloutAnswer, RolloutGroup

from solrl_trainer.rollouts.exploration import ExplorationSummary, ExploredImages, PromptsOf, seed_root
from solrl_trainer.rollouts.groups import CandidateGroup
from solrl_trainer.service.source import RolloutSource

Request = Callable[[Callable[[RolloutGroup], None]], RolloutAnswer]
"""Calls its argument with each group, and returns the whole answer."""


class ServiceExplorer:
    """Explores each iteration in a thread, as soon as the required version is pushed.

    Iteration i is explored under version max(0, i − lag), while the iterations before i are trained. Its samples are
    regenerated under version i, regardless of the lag.
    """

    def __init__(self, source: RolloutSource, prompts_of: PromptsOf, *, seed: int, lag: int, iterations: int) -> None:
        """Set up an explorer.

        Args:
            source: source of the candidates.
            prompts_of: prompts of an iteration.
            seed: seed of the run.
            lag: number of versions by which exploration is behind the newest.
            iterations: number of iterations of the whole run.
        """
        self.source = source
        self._prompts_of = prompts_of
        self._seed = seed
        self._lag = lag
        self._iterations = iterations
        self._ahead: dict[int, ServiceExploration] = {}
        self._begun = 0
        """The first iteration that has not begun."""

    def prefetch(self, version: int, *, beyond: bool = True) -> None:
        """Begin all explorations that have not begun, up to `version` + lag, or to `version` without `beyond`."""
        last = version + self._lag if beyond else version
        for iteration in range(max(version, self._begun), min(last + 1, self._iterations)):
            prompts = self._prompts_of(iteration)
            explored, root = max(0, iteration - self._lag), seed_root(self._seed, iteration)
            request = partial(self._request, iteration, prompts, explored, root)
            self._ahead[iteration] = ServiceExploration(iteration, prompts, explored, request)
            self._begun = iteration + 1

    def explore(self, iteration: int) -> "ServiceExploration":
        """The exploration of an iteration, which `prefetch` has begun."""
        return self._ahead.pop(iteration)

    def unpruned_groups(
        self, prompts: Sequence[PromptItem], version: int, root: int, iteration: int
    ) -> list[CandidateGroup]:
        """Explore the groups of these prompts under `version` as for an iteration, but without pruning."""
        answer = self.source.candidates_of(prompts, version, root, iteration=iteration, whole=True)
        return [CandidateGroup(p, g.seeds, g.scores) for p, g in zip(prompts, answer.groups, strict=True)]

    def images_of(
        self, prompts: Sequence[PromptItem], seeds: Sequence[Sequence[int]], version: int, iteration: int
    ) -> ExploredImages:
        """Images of candidates explored for an iteration under `version`; raises as `RolloutSource`."""
        return self.source.images_of(prompts, seeds, version, iteration)

    def _request(
        self,
        iteration: int,
        prompts: Sequence[PromptItem],
        version: int,
        root: int,
        on_group: Callable[[RolloutGroup], None],
    ) -> RolloutAnswer:
        return self.source.candidates_of(prompts, version, root, iteration=iteration, on_group=on_group)


class ServiceExploration:
    """A request in progress, in its own thread; see `Exploration`."""

    def __init__(self, iteration: int, prompts: Sequence[PromptItem], version: int, request: Request) -> None:
        """Send the request."""
        self._prompts = {prompt.id: prompt for prompt in prompts}
        self._iteration = iteration
        self._version = version
        self._request = request
        self._arrived: SimpleQueue[RolloutGroup | ExplorationSummary | BaseException] = SimpleQueue()
        self._summary: ExplorationSummary | None = None
        # A daemon thread, so that a failed run does not wait for candidates.
        threading.Thread(target=self._run, name="solrl-explore", daemon=True).start()

    def __iter__(self) -> Iterator[CandidateGroup]:
        """Yield each group as it arrives; raise the request's error."""
        while not isinstance(arrived := self._arrived.get(), ExplorationSummary):
            if isinstance(arrived, BaseException):
                raise arrived
            yield CandidateGroup(self._prompts[arrived.prompt_id], arrived.seeds, arrived.scores)
        self._summary = arrived

    @property
    def summary(self) -> ExplorationSummary:
        """Available after the last group."""
        assert self._summary is not None
        return self._summary

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            answer = self._request(self._arrived.put)
            scores = [score for group in answer.groups for score in group.scores if score is not None]
            seconds = time.perf_counter() - started
            self._arrived.put(
                ExplorationSummary(
                    self._iteration,
                    self._version,
                    answer.precision,
                    answer.numerics,
                    sum(scores),
                    len(scores),
                    seconds,
                    answer.seconds.rewards,
                )
            )
        except BaseException as error:
            self._arrived.put(error)
