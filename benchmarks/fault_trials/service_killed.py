"""The service killed during an exploration: nothing is lost or duplicated, and at most one batch is repeated.

A batch is a prompt group, the unit in which answers stream, with one or two chunks of the engine.
"""

import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from solrl_client import rollouts
from solrl_client.retries import Retries
from solrl_client.rollouts import RolloutClient
from solrl_proto.problems import Problem
from solrl_proto.rollouts import PromptItem, RolloutAnswer, RolloutGroup
from solrl_trainer.service.adapter_supply import AdapterSupply
from solrl_trainer.service.run_client import run_client
from support.redis_server import running_redis

from fault_trials.adapters import adapter_file, layout, small_config
from fault_trials.findings import Findings, Row
from fault_trials.processes import RolloutService

_ROOT = 11
_CHUNK = 24
_PATIENCE = 300.0
_JUDGING = threading.Lock()
Made = tuple[str, tuple[int, ...]]
"""Prompt and seeds of a chunk."""


@dataclass(frozen=True)
class Shape:
    """Shape of a request: number of groups, and candidates per group."""

    groups: int
    candidates: int

    @property
    def prompts(self) -> list[PromptItem]:
        """Prompts of the groups."""
        return [PromptItem(id=f"p{i}", text=f"{i + 2} red circles") for i in range(self.groups)]

    @property
    def chunks(self) -> int:
        """Number of chunks to generate."""
        return self.groups * -(-self.candidates // _CHUNK)


SHAPES = (Shape(4, 24), Shape(3, 48))


@dataclass
class Asked:
    """An exploration by a trainer's client, in its own thread."""

    service: RolloutService
    shape: Shape
    run: str

    def __post_init__(self) -> None:
        self.groups: list[RolloutGroup] = []
        self.pushed_again = False
        self.answer: RolloutAnswer | None = None
        self.error: BaseException | None = None
        self._client = RolloutClient(self.service.url, patience=_PATIENCE, pause=0.05)
        config = small_config(
            f"explore.candidates={self.shape.candidates}", run=self.run, rollout_url=self.service.url, output=Path(".")
        )
        supply = AdapterSupply(self._client, run=config.run, model=config.model_name, lag=0)

        def restore(problem: Problem) -> bool:
            pushed = supply.restore(problem)
            self.pushed_again |= pushed
            return pushed

        self._source = replace(run_client(config, self._client), restore=restore)
        supply.start({0: adapter_file(0)})
        supply.push(1, adapter_file(1))
        self._thread = threading.Thread(target=self._explore, daemon=True)
        self._thread.start()

    def _explore(self) -> None:
        try:
            self.answer = self._source.candidates_of(
                self.shape.prompts, 1, _ROOT, iteration=1, on_group=self.groups.append
            )
        except BaseException as error:
            self.error = error

    @property
    def done(self) -> bool:
        """Whether the exploration has ended."""
        return not self._thread.is_alive()

    def finish(self) -> Sequence[RolloutGroup]:
        """Wait for the end of the exploration; returns the groups of the answer."""
        self._thread.join(_PATIENCE)
        self._client.close()
        if self.error is not None:
            raise self.error
        assert self.answer is not None, "the exploration hangs"
        return self.answer.groups


def run(trials: int, findings: Findings) -> None:
    """Run `trials` kills, half with adapters in the service's memory, half in Redis."""
    layout()  # fill the cache before threads start
    with ExitStack() as stack:
        # Keep the client's pauses short, which otherwise grow with every retry.
        stack.enter_context(patch.object(rollouts, "Retries", partial(Retries, longest=0.3)))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="solrl-service-")))
        server = stack.enter_context(running_redis("everysec"))
        lanes = (("memory", (), trials // 2), ("Redis", ("--redis-url", server.url), trials - trials // 2))
        pool = stack.enter_context(ThreadPoolExecutor(len(lanes)))
        running, stop = [], threading.Event()
        for where, flags, count in lanes:
            service = RolloutService(folder, *flags)
            stack.callback(service.kill)
            running.append(pool.submit(_trials, count, where, service, stop, findings))
        stack.callback(stop.set)
        for lane in running:
            lane.result()


def _trials(count: int, where: str, service: RolloutService, stop: threading.Event, findings: Findings) -> None:
    if not count:
        return
    service.start()
    chance = random.Random(where)
    whole, events = {}, {}
    shapes = SHAPES if where == "memory" else SHAPES[::-1]
    for shape in shapes[:count]:
        since = service.event_log.size
        whole[shape] = Asked(service, shape, f"{where.lower()}-whole-{shape.candidates}").finish()
        events[shape] = len(service.event_log.events(since))
    done = number = 0
    while done < count and not stop.is_set():
        shape, number = shapes[done % 2], number + 1
        name = f"{where.lower()}-{number}"
        since = service.event_log.size
        asked = Asked(service, shape, name)
        _wait_for(service, since, chance.randrange(1, events[shape]))
        time.sleep(chance.uniform(0, 0.02))
        came = len(asked.groups)
        service.kill()
        late = asked.done
        service.start()
        groups = asked.finish()
        if late:
            findings.add("killed too late, not counted")
            continue
        done += 1
        with _JUDGING:
            _judge(name, shape, whole[shape], groups, asked, service.event_log.events(since), findings)
            findings.add(f"adapters in {where}")
            findings.done(f"{name}: {came} of {shape.groups} groups had come")


def _wait_for(service: RolloutService, since: int, count: int) -> None:
    """Wait until the service has recorded this many events."""
    while len(service.event_log.events(since)) < count:
        time.sleep(0.002)


def require_whole(
    trial: str,
    shape: Shape,
    whole: Sequence[RolloutGroup],
    groups: Sequence[RolloutGroup],
    asked: Asked,
    events: Sequence[dict[str, Any]],
    findings: Findings,
) -> tuple[Counter[Made], Counter[Made]]:
    """Require the undisturbed answer, with every seed once; returns how often each chunk was begun, and made."""
    findings.require(tuple(groups) == tuple(whole), trial, "seeds or scores differ from the undisturbed answer's")
    seeds = [(group.prompt_id, seed) for group in asked.groups for seed in group.seeds]
    findings.require(len(set(seeds)) == len(seeds) == shape.groups * shape.candidates, trial, "seeds lost or doubled")
    begun, made = (
        Counter((one["prompt"], tuple(one["seeds"])) for one in events if one["event"] == kind)
        for kind in ("begun", "made")
    )
    findings.require(len(made) == shape.chunks, trial, f"{len(made)} chunks were made of {shape.chunks}")
    return begun, made


def _judge(
    trial: str,
    shape: Shape,
    whole: Sequence[RolloutGroup],
    groups: Sequence[RolloutGroup],
    asked: Asked,
    events: list[dict[str, Any]],
    findings: Findings,
) -> None:
    begun, made = require_whole(trial, shape, whole, groups, asked, events, findings)
    came = [group.prompt_id for group in asked.groups]
    findings.require(sorted(came) == [prompt.id for prompt in shape.prompts], trial, f"the trainer got groups {came}")
    twice = {prompt for (prompt, _), times in made.items() if times > 1}
    findings.require(len(twice) <= 1 and max(made.values()) <= 2, trial, f"groups {sorted(twice)} were made twice")
    redone = made.total() - shape.chunks
    findings.most("most groups with chunks made twice", len(twice))
    findings.most(f"most chunks made twice, of groups of {shape.candidates}", redone)
    findings.most("most chunks begun in vain or twice", begun.total() - shape.chunks)
    findings.add("adapters pushed again", asked.pushed_again)


ROW = Row(
    "service-killed",
    "service killed mid-batch: the trainer's exploration finishes, no seed lost or doubled, at most one batch redone",
    full=200,
    short=2,
    run=run,
)
