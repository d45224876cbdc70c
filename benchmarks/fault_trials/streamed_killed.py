"""Service, trainer or a push lost while a run trains on samples as they arrive: its result stays the same bit for bit.

The service and the trainer divide exploring and regenerating by their waits, so a kill also changes who makes a seed.
"""

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fault_trials.findings import Findings, Row
from fault_trials.kill_points import KillPoint
from fault_trials.processes import Program, RolloutService, rollout_service
from fault_trials.trainer_killed import Kind, Run, compare

_KILLED = -9
_STREAMED = ("regenerate.at=service", "explore.share=auto", "explore.prompts=4")
"""Every iteration but the first trains on samples as they arrive."""
KINDS = (Kind(3, lag=1, every=1, further=_STREAMED), Kind(3, lag=0, every=2, further=_STREAMED))


def run(trials: int, findings: Findings) -> None:
    """Run `trials` trainings; a third each loses the service, the trainer, and the newest version."""
    with tempfile.TemporaryDirectory(prefix="solrl-streamed-") as name, rollout_service() as service:
        whole: dict[Kind, Run] = {}
        for number in range(trials):
            way, kind = WAYS[number % len(WAYS)], KINDS[number // len(WAYS) % len(KINDS)]
            if kind not in whole:
                whole[kind] = Run(Path(name), f"whole-{len(whole)}", kind, service)
                if code := whole[kind].go():
                    raise RuntimeError(f"the uninterrupted run ended with {code}: {whole[kind].log}")
                assert whole[kind].pushed
            trial = Run(Path(name), f"run-{number}", kind, service)
            text = f"{way.__name__.strip('_')} at lag {kind.lag}"
            end = way(trial, whole[kind], service, random.Random(number), findings)
            findings.done(text)
            findings.require(end == 0, text, f"the run ended with {end}: {trial.log}")
            if end == 0:
                compare(text, trial, whole[kind], findings)
                trial.remove()


def _service_killed(trial: Run, whole: Run, service: RolloutService, chance: random.Random, found: Findings) -> int:
    """Kill the service after its sixth to seventeenth chunk of the run, and start it again."""
    since = service.event_log.size
    program = trial.begin()
    first = chance.randrange(6, 6 * trial.kind.iterations)

    def reached() -> bool:
        made = [one for one in service.event_log.events(since) if one["event"] == "made" and one["run"] == trial.name]
        return len(made) >= first

    if _waited(reached, program):
        found.add("service killed with samples on their way")
        _restart(service)
    return program.wait()


def _trainer_killed(trial: Run, whole: Run, service: RolloutService, chance: random.Random, found: Findings) -> int:
    """Kill the trainer in a phase of a streamed iteration, and resume it."""
    point = chance.choice(("explore", "regenerate", "train", "train", "push"))
    kill_point = KillPoint(
        point, chance.randrange(1, trial.kind.iterations), chance.uniform(0, 0.9) * whole.seconds[point]
    )
    found.add(f"trainer killed in {point}", trial.go(kill_point) == _KILLED)
    return trial.go(resume=True)


def _push_lost(trial: Run, whole: Run, service: RolloutService, chance: random.Random, found: Findings) -> int:
    """Kill the service, which holds adapters in memory, as soon as it has a version that a streamed iteration needs."""
    program, version = trial.begin(), chance.randrange(1, trial.kind.iterations)

    def pushed() -> bool:
        held = service.http.get(f"/v1/runs/{trial.name}/adapters")
        return held.status_code == 200 and any(one["version"] >= version for one in held.json()["versions"])

    if _waited(pushed, program):
        found.add("version lost that had been acknowledged")
        _restart(service)
    return program.wait()


WAYS = (_service_killed, _trainer_killed, _push_lost)


def _waited(reached: Callable[[], bool], program: Program) -> bool:
    """Wait until something is reached; False if the program ends before."""
    while program.alive:
        if reached():
            return True
        time.sleep(0.02)
    return False


def _restart(service: RolloutService) -> None:
    service.kill()
    service.start()


ROW = Row(
    "streamed-killed",
    "a run that trains on samples as they arrive: service killed meanwhile, trainer killed and resumed, newest version "
    "lost: result equal to the uninterrupted run bit for bit",
    full=60,
    short=3,
    run=run,
)
