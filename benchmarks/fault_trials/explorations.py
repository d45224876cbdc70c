"""The service, one of its workers or a Ray actor killed during an exploration, right after a random event of a chunk.

Nothing is lost or duplicated, and little is made again. A batch is a prompt group, the unit in which answers stream,
with one or two chunks of the engine. Where a worker is killed, another run asks for a few candidates right afterwards,
and in every fourth trial the process that replaces the worker is killed, too, while it loads.
"""

import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families
from solrl_client import rollouts
from solrl_client.retries import Retries
from solrl_client.rollouts import RolloutClient
from solrl_proto.problems import Problem
from solrl_proto.rollouts import PromptItem, RolloutAnswer, RolloutGroup
from solrl_trainer.service.adapter_supply import AdapterSupply
from solrl_trainer.service.run_requests import RunRequests
from tests.support.ray_nodes import ray_nodes
from tests.support.redis_server import running_redis

from fault_trials.adapters import adapter_file, rollout_body, small_config
from fault_trials.findings import Findings, Row
from fault_trials.services import RolloutService, rollout_service

_ROOT = 11
_CHUNK = 24
_WORKERS = 2
_AT_ONCE = 2
"""Chunks that a worker holds."""
_LOADING = 4
"""Every this many trials, the process that replaces the killed one is killed, too."""
_PATIENCE = 600.0
_BESIDE = "beside"
"""Prompt of the other run."""
EVENTS = ("begun", "step", "made")

Event = dict[str, Any]
Made = tuple[str, tuple[int, ...]]
"""Prompt and seeds of a chunk."""


@dataclass(frozen=True)
class Shape:
    """Shape of a request: number of groups, and candidates per group."""

    groups: int
    candidates: int

    @property
    def prompts(self) -> list[PromptItem]:
        return [PromptItem(id=f"p{i}", text=f"{i + 2} red circles") for i in range(self.groups)]

    @property
    def chunks(self) -> int:
        return self.groups * -(-self.candidates // _CHUNK)


SHAPES = (Shape(4, 24), Shape(3, 48))


class Asked:
    """An exploration by a trainer's client, in its own thread."""

    def __init__(self, service: RolloutService, shape: Shape, run: str) -> None:
        self.service, self.shape, self.run = service, shape, run
        self.groups: list[RolloutGroup] = []
        self.pushed_again = False
        self.since = service.event_log.size
        self._client = RolloutClient(service.url, patience=_PATIENCE, pause=0.05)
        candidates = f"explore.candidates={shape.candidates}"
        config = small_config(candidates, run=run, rollout_url=service.url, output=Path("."))
        supply = AdapterSupply(self._client, run=config.run, model=config.model_name, lag=0)

        def restore(problem: Problem) -> bool:
            pushed = supply.restore(problem)
            self.pushed_again |= pushed
            return pushed

        source = replace(RunRequests(config, self._client), restore=restore)
        supply.start({0: adapter_file(0)})
        supply.push(1, adapter_file(1))
        pool = ThreadPoolExecutor(1)
        self._answer = pool.submit(
            source.candidates_of, shape.prompts, 1, _ROOT, iteration=1, on_group=self.groups.append
        )
        pool.shutdown(wait=False)

    @property
    def done(self) -> bool:
        return self._answer.done()

    def finish(self) -> Sequence[RolloutGroup]:
        """Wait for the end of the exploration; returns the groups of the answer."""
        answer: RolloutAnswer = self._answer.result(_PATIENCE)
        self._client.close()
        return answer.groups

    def events(self) -> list[Event]:
        return self.service.event_log.events(self.since)

    def wait(self, kind: str, count: int) -> Event:
        """Wait for so many events of a kind; returns the last of them."""
        while True:
            events = [one for one in self.events() if one["event"] == kind]
            if len(events) >= count:
                return events[-1]
            time.sleep(0.002)


Hurt = Callable[[Asked, int, int, random.Random], Sequence[RolloutGroup]]
"""Kills a process during an exploration, and returns its answer's groups. Of the exploration, the process whose event
came last, the number of trials before, and chances."""


def kills(
    service: RolloutService, name: str, trials: int, hurt: Hurt, findings: Findings, turn: int = 0
) -> Iterator[tuple[str, tuple[Asked, Counter[Made], Counter[Made]]]]:
    """Yield trials, which begin with the shape of number `turn`, and in each of which `hurt` kills something.

    All must have the undisturbed answer, with every seed once.

    Yields:
        A trial's name, its exploration, and how often each chunk was begun, and made.
    """
    chance, done, number = random.Random(name), 0, 0
    whole: dict[Shape, tuple[Sequence[RolloutGroup], Mapping[str, int]]] = {}
    while done < trials:
        shape, kind, number = SHAPES[(done + turn) % len(SHAPES)], EVENTS[done % len(EVENTS)], number + 1
        if shape not in whole:
            asked = Asked(service, shape, f"{name}-whole-{shape.candidates}")
            whole[shape] = asked.finish(), Counter(one["event"] for one in asked.events())
        expected, events = whole[shape]
        trial = f"{name}-{number}"
        asked = Asked(service, shape, trial)
        last = asked.wait(kind, chance.randrange(1, events[kind]))
        time.sleep(chance.uniform(0, 0.02))
        came, late = len(asked.groups), asked.done
        groups = hurt(asked, last["pid"], done, chance)
        if late:
            findings.add("killed too late, not counted")
            continue
        done += 1
        findings.require(tuple(groups) == tuple(expected), trial, "seeds or scores differ from the undisturbed ones")
        seeds = [(group.prompt_id, seed) for group in asked.groups for seed in group.seeds]
        once = len(set(seeds)) == len(seeds) == shape.groups * shape.candidates
        findings.require(once, trial, "seeds lost or doubled")
        own = [one for one in asked.events() if one.get("prompt") != _BESIDE]
        begun, made = (
            Counter((one["prompt"], tuple(one["seeds"])) for one in own if one["event"] == event)
            for event in ("begun", "made")
        )
        findings.require(len(made) == shape.chunks, trial, f"{len(made)} chunks were made of {shape.chunks}")
        findings.add(f"killed after {kind}")
        yield trial, (asked, begun, made)
        findings.done(f"{trial}: {kind} of {last['prompt']}, {came} of {shape.groups} groups had come")


def service_killed(trials: int, findings: Findings) -> None:
    """Run `trials` kills of the service, half with adapters in its memory, half in Redis."""

    def hurt(asked: Asked, *_: object) -> Sequence[RolloutGroup]:
        asked.service.kill()
        asked.service.start()
        return asked.finish()

    # The client's pauses otherwise grow with every retry.
    with running_redis("everysec") as server, patch.object(rollouts, "Retries", partial(Retries, longest=0.3)):
        for turn, (where, flags) in enumerate({"memory": (), "Redis": ("--redis-url", server.url)}.items()):
            with rollout_service(*flags) as service:
                every = kills(service, where.lower(), (trials + turn) // 2, hurt, findings, turn)
                for trial, (asked, begun, made) in every:
                    twice, shape = {prompt for (prompt, _), times in made.items() if times > 1}, asked.shape
                    few = len(twice) <= 1 and max(made.values()) <= 2
                    findings.require(few, trial, f"groups {sorted(twice)} were made twice")
                    again = made.total() - shape.chunks
                    findings.most("most groups with chunks made twice", len(twice))
                    findings.most(f"most chunks made twice, of groups of {shape.candidates}", again)
                    findings.most("most chunks begun in vain or twice", begun.total() - shape.chunks)
                    findings.add("adapters pushed again", asked.pushed_again)
                    findings.add(f"adapters in {where}")


def worker_killed(trials: int, findings: Findings) -> None:
    """Run `trials` kills of one of two worker processes."""
    one_thread = patch.dict(os.environ, OMP_NUM_THREADS="1")  # in every worker, as scores depend on it
    with one_thread, rollout_service("--workers", str(_WORKERS)) as service:
        kill_workers(service, lambda: children_of(service.pid), trials, findings)


def ray_worker_killed(trials: int, findings: Findings) -> None:
    """Run `trials` kills of one of two Ray actors, on two simulated nodes."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="solrl-service-")))
        service = RolloutService(folder, "--workers", "ray:2", "--device", "cpu")
        event_log = str(service.event_log.path)
        # The watched backend in every worker, on one thread, as scores depend on it.
        modules = str(Path(__file__).parents[1])
        watched = {"FAULTS_EVENT_LOG": event_log, "PYTHONPATH": modules, "OMP_NUM_THREADS": "1"}
        service.environment = stack.enter_context(ray_nodes(_WORKERS, **watched))
        stack.callback(service.kill)
        service.start()
        kill_workers(service, partial(_actors, event_log), trials, findings)


def kill_workers(service: RolloutService, processes: Callable[[], set[int]], trials: int, findings: Findings) -> None:
    """Kill workers of a running service.

    Args:
        service: a service with two workers.
        processes: returns the process ids of its workers.
        trials: number of kills.
        findings: takes counts and violated guarantees.
    """
    beside = 0

    def hurt(asked: Asked, pid: int, done: int, chance: random.Random) -> Sequence[RolloutGroup]:
        nonlocal beside
        restarts = restarts_of(service)
        os.kill(pid, signal.SIGKILL)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(_ask_beside, service, chance.uniform(0, 0.1))
            if done % _LOADING == _LOADING - 1:
                _kill_loading(processes, pid, chance)
                findings.add("killed again while it loaded")
            groups = asked.finish()
        beside = other.result()
        if not all_serve(service, restarts + 1):
            raise RuntimeError("the worker does not serve again")
        findings.require(restarts_of(service) == restarts + 1, asked.run, "more workers were loaded again than killed")
        return groups

    failures = _failures(service)
    for trial, (asked, begun, made) in kills(service, "worker", trials, hurt, findings):
        findings.require(beside == 200, trial, f"the other run got {beside}")
        findings.require(_failures(service) == failures, trial, "a request failed")
        again = begun.total() - asked.shape.chunks
        findings.require(0 <= again <= _AT_ONCE and max(begun.values()) <= 2, trial, f"{again} chunks were begun again")
        findings.most("most chunks begun again", again)
        findings.most("most chunks made twice", made.total() - asked.shape.chunks)
        _judge_beside(trial, asked.events(), findings)
        _let_all_make(service)


def _ask_beside(service: RolloutService, delay: float) -> int:
    """Ask for a few candidates of the base model; returns the status."""
    time.sleep(delay)
    return service.http.post("/v1/rollouts", json=rollout_body(prompt=_BESIDE)).status_code


def children_of(pid: int) -> set[int]:
    """The processes that a process has started."""
    return {child.pid for child in psutil.Process(pid).children()}


def _actors(event_log: str) -> set[int]:
    """The processes of actors that write to an event log."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            named = (process / "cmdline").read_bytes().startswith(b"ray::WorkerActor")
            if named and event_log.encode() in (process / "environ").read_bytes():
                found.add(int(process.name))
        except OSError:
            continue  # it has ended
    return found


def _kill_loading(processes: Callable[[], set[int]], dead: int, chance: random.Random) -> None:
    """Kill the process that replaces the dead one, at a random moment of its loading."""
    before = processes() - {dead}
    while not (fresh := processes() - before - {dead}):
        time.sleep(0.002)
    time.sleep(chance.uniform(0, 1))
    os.kill(fresh.pop(), signal.SIGKILL)


def all_serve(service: RolloutService, restarts: int) -> bool:
    """Whether all workers serve within some time, after at least this many restarts."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        ready = service.http.get("/health/ready")
        if ready.status_code == 200 and ready.json()["serving"] == _WORKERS and restarts_of(service) >= restarts:
            return True
        time.sleep(0.2)
    return False


def _let_all_make(service: RolloutService) -> None:
    """Have each worker finish a chunk: the service gives up one that dies five times without."""
    since = service.event_log.size
    while len({one["pid"] for one in service.event_log.events(since) if one["event"] == "made"}) < _WORKERS:
        service.http.post("/v1/rollouts", json=rollout_body(count=96, steps=1)).raise_for_status()


def restarts_of(service: RolloutService) -> int:
    return int(_sum(service, "solrl_worker_restarts_total"))


def _failures(service: RolloutService) -> int:
    return int(_sum(service, "solrl_http_requests_total", "status", "5"))


def _sum(service: RolloutService, name: str, label: str = "worker", begin: str = "") -> float:
    families = text_string_to_metric_families(service.http.get("/metrics").text)
    samples = [one for family in families for one in family.samples if one.name == name]
    return sum(one.value for one in samples if one.labels[label].startswith(begin))


def _judge_beside(trial: str, events: Sequence[Event], findings: Findings) -> None:
    """Require that the other run waited for the chunk that its worker was making and at most one more."""
    own = [one for one in events if one.get("prompt") == _BESIDE]
    if any(one["event"] == "lost" for one in own):
        findings.add("another run's own chunk lost")
        return
    (queued,) = [one for one in own if one["event"] == "queued"]
    (begun,) = [one for one in own if one["event"] == "begun"]
    made = [one for one in events if one["event"] == "made" and one["pid"] == begun["pid"]]
    waited = sum(queued["at"] < one["at"] < begun["at"] for one in made)
    findings.require(waited <= 2, trial, f"another run waited for {waited} chunks")
    findings.most("most chunks that another run waited for", waited)


ROWS = (
    Row(
        "service-killed",
        "service killed mid-batch: the trainer's exploration finishes, no seed lost or doubled, at most one batch "
        "redone",
        full=200,
        short=2,
        run=service_killed,
    ),
    Row(
        "worker-killed",
        "one of two workers killed: the request finishes with the same bits, no seed lost or doubled, at most the two "
        "chunks it held made again; another run waits for the running chunk and at most one more; it serves again",
        full=200,
        short=1,
        run=worker_killed,
    ),
    Row(
        "ray-worker-killed",
        "one of two Ray actors killed, on two simulated nodes: as worker-killed",
        full=20,
        short=1,
        run=ray_worker_killed,
    ),
)
