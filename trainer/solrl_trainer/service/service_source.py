"""Groups of a rollout service, which explores concurrently with the trainer's own work."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from threading import Thread

import torch
from solrl_client.retries import OnWait
from solrl_client.rollouts import Restore, RolloutClient
from solrl_core.precision.support import PRECISIONS, probe
from solrl_engine.side_stream import Pending, in_thread
from solrl_proto.identifiers import Precision
from solrl_proto.models import ModelInfo
from solrl_proto.problems import Problem
from solrl_proto.rollouts import PromptItem, RolloutGroup

from solrl_trainer.prompts.prompt_sets import PromptSet
from solrl_trainer.ranks.communicator import Communicator, wait_for_rank_zero
from solrl_trainer.rollouts.device_source import DeviceSource
from solrl_trainer.rollouts.exploration import ExplorationSummary, OnSummary, seed_root
from solrl_trainer.rollouts.groups import CandidateGroup
from solrl_trainer.rollouts.loading import load, warn_of_emulation
from solrl_trainer.rollouts.models import Models
from solrl_trainer.service.adapter_supply import LOST, AdapterSupply
from solrl_trainer.service.requirements import check_hosted, check_size, hosted_model, reward_specs
from solrl_trainer.service.run_requests import RunRequests
from solrl_trainer.settings.config import RunConfig

logger = logging.getLogger(__name__)

_LONGEST_PUSH = 60.0
"""Seconds that rank 0 may take to send a version, beyond its patience with the service."""

Arrived = RolloutGroup | ExplorationSummary


@contextmanager
def open_service_source(
    config: RunConfig, train: PromptSet, world: Communicator, on_wait: OnWait, hosted: ModelInfo | None = None
) -> Iterator["ServiceSource"]:
    """Load a run that explores at a service with the same model and rewards; `on_wait` is told of waits for servers.

    `hosted`: the run's model there, if this process has asked for it; requests find out whether it is another now.

    Raises:
        ProblemError: the service cannot be reached, or does not host the model.
        MismatchError: noise contract or digests differ; names the part.
        RewardError: a reward cannot score two grey images.
        ValueError, OSError: the model or rewards cannot be loaded, or the device does not compute in the precision.
    """
    # The other ranks ask again until rank 0 has pushed the versions that the service lost.
    awaited = LOST if world.rank else ()
    with RolloutClient(config.service_url, patience=config.patience, awaited=awaited, on_wait=on_wait) as client:
        # Each other rank asks, too: its machine must reach the service, and may have other libraries.
        served = hosted or hosted_model(client, config.model_name)[1]
        loaded = load(config, world, on_wait)
        digests = loaded.digests
        check_size(served, loaded.backbone)
        check_hosted(served, reward_specs(config.service_rewards(train.all), config, served, digests), digests)
        emulated = [info.precision for info in served.precisions if info.numerics == "emulated"]
        warn_of_emulation(emulated, config.explore.precision)
        if config.explores_here and config.explore.precision == "auto":
            common = common_precision(served, loaded.backbone.device)
            logger.info("the service and this device explore in %s", common)
            config = config.model_copy(update={"explore": config.explore.model_copy(update={"precision": common})})
        device = DeviceSource(config, loaded, Models.build(loaded.backbone, config, world), train)
        supply = None
        if world.rank == 0:
            supply = AdapterSupply(client, run=config.run, model=config.model_name, lag=config.lag, on_wait=on_wait)
        requests = RunRequests(config, client, served, digests, _restore(supply, world), loaded.backbone)
        source = ServiceSource(config, requests, device, supply)
        yield source
        source.wait_for_push()


def common_precision(served: ModelInfo, device: torch.device) -> Precision:
    """The fastest precision that a service and this device support natively; BF16 if there is none."""
    native = [info.precision for info in served.precisions if info.numerics == "native"]
    return next((name for name in PRECISIONS if name in native and probe(name, device).numerics == "native"), "bf16")


def _restore(supply: AdapterSupply | None, world: Communicator) -> Restore:
    """On rank 0, push again the versions that the service lost; other ranks ask rank 0 to, without waiting."""
    if supply is not None:
        world.on_notice(lambda text: supply.restore(Problem.model_validate_json(text)))
        return supply.restore

    def notify(problem: Problem) -> bool:
        if problem.kind in LOST:
            world.notify(problem.model_dump_json())
        return False

    return notify


@dataclass(frozen=True)
class _Prefetch:
    """An exploration that has begun.

    Attributes:
        prompts: this device's share of the rank's prompts, the first ones; the service has the rest.
        arrived: what the service has sent, to the summary, or its error.
        groups: of this device, once it has explored `prompts`.
    """

    prompts: Sequence[PromptItem]
    arrived: SimpleQueue[Arrived | BaseException] = field(default_factory=SimpleQueue)
    groups: list[CandidateGroup] = field(default_factory=list)


class ServiceSource:
    """A source that pushes and explores in threads: each iteration as soon as the required version is pushed.

    Iteration i is explored under version max(0, i − lag), while the iterations before i are trained. Its samples are
    regenerated here under version i, regardless of the lag. The service explores the last prompts of each rank. This
    device explores the first, if `explore.share` leaves it some, while it has the version: before it trains iteration i
    − lag. `wait_for_push` waits until the service has the newest version; `RolloutClient.push` lists its errors.
    """

    def __init__(
        self, config: RunConfig, requests: RunRequests, device: DeviceSource, supply: AdapterSupply | None = None
    ) -> None:
        """`supply` is only on rank 0."""
        self.requests, self.device = requests, device
        self._config, self._supply = config, supply
        self.wait_for_push: Pending[object] = lambda: None
        self._prefetched: dict[int, _Prefetch] = {}
        self._begun = 0
        """The first iteration that has not begun."""

    def start(self, adapters: Mapping[int, bytes], pushed: Collection[str]) -> None:
        """Make sure that the service has these versions, the newest last, and begin to explore; see `AdapterSupply`."""
        if self._supply is not None:
            self._supply.start(adapters, pushed)
        wait_for_rank_zero(self.device.models.world)
        *older, newest = sorted(adapters)
        self._prefetch(newest)
        for version in older if self._config.explores_here else ():
            self.device.models.merge_behaviour(adapters[version], version)
            self._explore_here(version)
        self.device.models.merge_behaviour(adapters[newest], newest)

    def push(self, version: int, adapter: bytes) -> None:
        """Merge the newest version, and begin to push it to the service and to explore under it."""
        self.wait_for_push()
        self.device.models.merge_behaviour(adapter, version)  # first, because sending takes Python's lock, too
        push: Callable[[], object]
        if self._supply is not None:
            push = partial(self._supply.push, version, adapter)
        else:  # another rank pushes
            patience = self._config.patience + _LONGEST_PUSH
            push = partial(self.requests.client.wait_for_version, self._config.run, version, patience)
        self.wait_for_push = in_thread(push, "solrl-push").result
        self._prefetch(version)

    def _prefetch(self, version: int) -> None:
        """Begin all explorations that have not begun, up to iteration `version` + lag."""
        for iteration in range(max(version, self._begun), min(version + self._config.lag + 1, self._config.iterations)):
            prompts = self.device.own_prompts(iteration)
            here = len(prompts) - max(1, round(len(prompts) * self._config.explore.share))
            prefetch = self._prefetched[iteration] = _Prefetch(prompts[:here])
            ask = partial(self._ask, iteration, prompts[here:], self.wait_for_push, prefetch.arrived)
            # A daemon thread, so that a failed run does not wait for candidates.
            Thread(target=ask, name="solrl-explore", daemon=True).start()
            self._begun = iteration + 1

    def _version(self, iteration: int) -> int:
        return max(0, iteration - self._config.lag)

    def _explore_here(self, version: int) -> None:
        """Explore this device's prompts of every prefetched iteration that uses `version`, which is merged."""
        for iteration, prefetch in self._prefetched.items():
            if self._version(iteration) == version and len(prefetch.groups) < len(prefetch.prompts):
                self.device.models.encoders.encode([prompt.text for prompt in prefetch.prompts], self._config.guidance)
                prefetch.groups.extend(self.device.groups(prefetch.prompts, iteration))

    def explore(self, iteration: int, on_summary: OnSummary) -> Iterator[CandidateGroup]:
        """The groups of an iteration, which `_prefetch` has begun; this device then explores what it has to.

        They come in any order, each as soon as it is complete; `on_summary` after the last.
        """
        prompts = {prompt.id: prompt for prompt in self.device.own_prompts(iteration)}
        prefetch, began = self._prefetched[iteration], time.perf_counter()
        self._explore_here(iteration)
        seconds = time.perf_counter() - began
        del self._prefetched[iteration]
        yield from prefetch.groups
        while True:
            arrived = prefetch.arrived.get()
            if isinstance(arrived, BaseException):
                raise arrived
            if isinstance(arrived, ExplorationSummary):
                break
            yield CandidateGroup(prompts[arrived.prompt_id], arrived.seeds, arrived.scores)
        if self._config.explores_here:
            scores = [score for group in prefetch.groups for score in group.scores]
            total, count = arrived.score_sum + sum(scores), arrived.score_count + len(scores)
            arrived = replace(arrived, score_sum=total, score_count=count, seconds_here=seconds)
        on_summary(arrived)

    def _ask(
        self,
        iteration: int,
        prompts: Sequence[PromptItem],
        pushed: Pending[object],
        arrived: SimpleQueue[Arrived | BaseException],
    ) -> None:
        """Ask for an iteration's candidates once `pushed`; `arrived` gets each group, then the summary, or an error."""
        version, root = self._version(iteration), seed_root(self._config.seed, iteration)
        try:
            pushed()
            started = time.perf_counter()
            answer = self.requests.candidates_of(prompts, version, root, iteration=iteration, on_group=arrived.put)
            seconds = time.perf_counter() - started
        except BaseException as error:
            arrived.put(error)
            return
        scores = [score for group in answer.groups for score in group.scores]
        arrived.put(
            ExplorationSummary(
                iteration,
                version,
                answer.precision,
                answer.numerics,
                sum(scores),
                len(scores),
                seconds,
                answer.seconds.rewards,
            )
        )

    def groups_of(self, prompts: Sequence[PromptItem], version: int, root: int, iteration: int) -> list[CandidateGroup]:
        """Explore the groups of these prompts under `version` as for an iteration; their seeds have this `root`."""
        self.wait_for_push()
        answer = self.requests.candidates_of(prompts, version, root, iteration=iteration)
        pairs = zip(prompts, answer.groups, strict=True)
        return [CandidateGroup(prompt, group.seeds, group.scores) for prompt, group in pairs]

    def images_of(
        self, prompts: Sequence[PromptItem], seeds: Sequence[Sequence[int]], version: int, iteration: int
    ) -> tuple[torch.Tensor, float]:
        """Images of candidates explored for an iteration under `version`; as `RunRequests.images_of`."""
        self.wait_for_push()
        return self.requests.images_of(prompts, seeds, version, iteration)
