"""Redis killed between pushes, and the end of its file lost: a whole, older version, which the trainer notices.

A power failure loses the end of the append-only file. So may a kill under `appendfsync everysec`, since Redis
buffers writes in memory during an fsync. The row redis-killed has kills that lose nothing.
"""

import asyncio
import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from solrl_client.rollouts import RolloutClient
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import PromptItem
from solrl_rollout.store.redis_store import RedisRunStore
from solrl_trainer.records.shown_log import shown_log
from solrl_trainer.service.adapter_supply import AdapterSupply
from solrl_trainer.service.run_client import run_client
from support.redis_server import Keys, RedisServer, dump, running_redis

from fault_trials.adapters import adapter_file, small_config
from fault_trials.findings import Findings, Row
from fault_trials.processes import RolloutService, rollout_service
from fault_trials.redis_killed import RUN, TENANT, version

_VERSIONS = 6
_RETAIN = 4
_ALL, _NEWEST, _BY_KILL = "the whole file lost", "the newest version lost", "nothing but the kill"
LOSSES = (_ALL, _NEWEST, _BY_KILL)
_PROMPT = PromptItem(id="p", text="a red circle")


def run(trials: int, findings: Findings) -> None:
    """Run `trials` restarts: a third with a real trainer's client, the rest with the store alone."""
    trained = max(len(LOSSES), trials // 3)
    for number in range(trials - trained):
        asyncio.run(_restart(f"store {number}", findings))
        findings.done("the store alone")
    _with_trainer(trained, findings)


async def _restart(trial: str, findings: Findings) -> None:
    """Push versions, kill Redis, cut its file and restart it, and compare its keys with those after each push."""
    chance = random.Random(trial)
    with tempfile.TemporaryDirectory(prefix="solrl-redis-", ignore_cleanup_errors=True) as folder:
        server = RedisServer(Path(folder))
        try:
            server.start()
            snapshots = [dump(server.url)]
            store = RedisRunStore(server.url, retain=_RETAIN)
            for number in range(_VERSIONS):
                await store.put(TENANT, *version(number, chance.randbytes(chance.randrange(1, 2**16))))
                snapshots.append(dump(server.url))
            server.kill()
            _lose_end(Path(folder), chance)
            server.start()
            head = await judge_older(store, dump(server.url), snapshots, trial, findings)
            findings.add(f"the end of the file lost: back at version {head}")
            await store.close()
        finally:
            server.kill()


async def judge_older(
    store: RedisRunStore, after: Keys, snapshots: Sequence[Keys], trial: str, findings: Findings
) -> int | None:
    """Head that Redis recovered. Its keys must be those after that push, and it must accept the next version."""
    head = await store.head(TENANT, RUN)
    newest = -1 if head is None else head
    findings.require(after == snapshots[newest + 1], trial, f"the keys are not those of version {head}")
    try:
        numbers = [] if head is None else [info.version for info in (await store.list(TENANT, RUN)).versions]
        wanted = list(range(max(0, newest - _RETAIN + 1), newest + 1))
        findings.require(numbers == wanted, trial, f"{numbers} are held, not {wanted}")
        for number in numbers:
            await store.get(TENANT, RUN, number)
        await store.put(TENANT, *version(newest + 1, b"pushed again"))
        findings.require(await store.head(TENANT, RUN) == newest + 1, trial, "no version goes on top")
    except ProblemError as error:
        findings.require(False, trial, str(error))
    return head


def _lose_end(folder: Path, chance: random.Random) -> None:
    """Truncate the append-only file at a random byte."""
    (path,) = folder.glob("appendonlydir/*.incr.aof")
    with path.open("r+b") as file:
        file.truncate(chance.randrange(path.stat().st_size))


def _with_trainer(trials: int, findings: Findings) -> None:
    """Test that a trainer's client explores under its newest version, whatever Redis recovered."""
    with ExitStack() as stack:
        server = stack.enter_context(running_redis("everysec"))
        service = stack.enter_context(rollout_service("--redis-url", server.url))
        for number in range(trials):
            _explore(number, LOSSES[number % len(LOSSES)], server, service, findings)
            findings.done("with a trainer's client")


def _explore(number: int, loss: str, server: RedisServer, service: RolloutService, findings: Findings) -> None:
    trial = f"trainer {number}, {loss}"
    notes: list[str] = []
    config = small_config(run=f"trial-{number}", rollout_url=service.url, output=Path("."))
    with RolloutClient(service.url, patience=60, pause=0.05) as client, shown_log(notes.append):
        supply = AdapterSupply(client, run=config.run, model=config.model_name, lag=0)
        source = replace(run_client(config, client), restore=supply.restore)
        supply.start({0: adapter_file(0)})
        supply.push(1, adapter_file(1))
        before = source.candidates_of([_PROMPT], 1, 5, iteration=1)
        if loss != _BY_KILL:
            server.wait_until_written()
        server.kill()
        if loss != _BY_KILL:
            _cut(server, config.run, everything=loss == _ALL)
        server.start()
        held = client.adapters(config.run)
        lost = [number for number in (0, 1) if held is None or number > held.head]
        findings.require(loss == _BY_KILL or lost == ([0, 1] if loss == _ALL else [1]), trial, f"it lost {lost}")
        after = source.candidates_of([_PROMPT], 1, 5, iteration=1)
        findings.require(after.groups == before.groups, trial, "seeds or scores differ")
        said = " and ".join(map(str, lost))
        noticed = any(f" {said}; pushed again" in note for note in notes) if lost else not notes
        findings.require(noticed, trial, f"it lost {lost} and noted {notes}")
        supply.push(2, adapter_file(2))
        held = client.adapters(config.run)
        numbers = [info.version for info in held.versions] if held else []
        findings.require(numbers == [0, 1, 2], trial, f"it holds {numbers}")
        findings.add(f"with a trainer, {loss}: {f'versions {said} pushed again' if lost else 'nothing to push'}")


def _cut(server: RedisServer, run: str, *, everything: bool) -> None:
    """Truncate the append-only file completely, or before the run's version 1."""
    for path in server.folder.glob("appendonlydir/*.incr.aof"):
        with path.open("r+b") as file:
            file.truncate(0 if everything else path.read_bytes().index(f":run:{run}:blob:1\r\n".encode()))


ROW = Row(
    "redis-restarted",
    "Redis restarted without its file's end: it holds a whole, older version; the trainer notices and pushes again",
    full=130,
    short=1 + len(LOSSES),
    run=run,
)
