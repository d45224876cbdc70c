"""Redis is killed between pushes and comes back with all, a part or nothing of what it held.

By its append-only file alone, what comes back is exactly what was there. Where the end of the file is lost (as with
the machine's power) it is an earlier version, whole; the trainer notices the pointer that went back and pushes again.
"""

import asyncio
import random
import tempfile
from contextlib import ExitStack
from pathlib import Path

from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import PromptItem
from solrl_rollout.store.redis import RedisAdapterStore
from solrl_trainer.client import RolloutClient
from solrl_trainer.explore import Explorer

from fault_trials.adapters import adapter_file, small_config
from fault_trials.findings import Findings, Row, Tell
from fault_trials.processes import RolloutService, rollout_service
from fault_trials.redis_killed import RUN, TENANT, version
from fault_trials.redis_server import RedisServer, dump, redis_server

_VERSIONS = 6
_RETAIN = 4
_PROMPT = PromptItem(id="p", text="a red circle")


def run(trials: int, tell: Tell, findings: Findings) -> None:
    """`trials` restarts: a tenth with a real trainer's client, the rest with the store alone."""
    trained = max(2, trials // 10)
    for number in range(trials - trained):
        appendfsync = ("always", "everysec", "never")[number % 4 % 3]
        loses = number % 4 == 3
        asyncio.run(_keys(f"store {number}", appendfsync, loses, findings))
        findings.trials += 1
        tell(f"appendfsync {appendfsync}{', the end of the file lost' if loses else ''}")
    _with_trainer(trained, findings, tell)


async def _keys(trial: str, appendfsync: str, loses: bool, findings: Findings) -> None:
    """What survives, to the key and to the byte."""
    chance = random.Random(trial)
    with tempfile.TemporaryDirectory(prefix="solrl-redis-", ignore_cleanup_errors=True) as folder:
        server = RedisServer(Path(folder), appendfsync)
        try:
            server.start()
            snapshots = [dump(server.url)]
            store = RedisAdapterStore(server.url, retain=_RETAIN)
            for number in range(_VERSIONS):
                await store.put(TENANT, *version(number, chance.randbytes(chance.randrange(1, 2**16))))
                snapshots.append(dump(server.url))
            server.kill()
            if loses:
                _lose_end(Path(folder), chance)
            server.start()
            after = dump(server.url)
            if loses:
                head = await _whole(store, trial, findings)
                findings.add(f"end of the file lost, back at version {head}")
            elif appendfsync == "never":
                findings.require(after == {}, trial, "keys from nowhere")
                findings.add("no file: nothing came back")
            else:
                findings.require(after == snapshots[-1], trial, "keys or values differ")
                findings.add(f"{appendfsync}: every key came back, and no other")
            await store.close()
        finally:
            server.kill()


async def _whole(store: RedisAdapterStore, trial: str, findings: Findings) -> int | None:
    """The head; everything that is listed up to it must be readable."""
    try:
        listed = await store.list(TENANT, RUN)
        for info in listed.versions:
            await store.get(TENANT, RUN, info.version)
        numbers = [info.version for info in listed.versions]
        wanted = list(range(max(0, listed.head - _RETAIN + 1), listed.head + 1))
        findings.require(numbers == wanted, trial, f"{numbers} are held, not {wanted}")
        return listed.head
    except ProblemError as error:
        findings.require(error.problem.kind == "run-not-found", trial, f"{error.problem.kind}: {error.problem.detail}")
        return None


def _lose_end(folder: Path, chance: random.Random) -> None:
    """Cut the append-only file off at any byte."""
    (path,) = folder.glob("appendonlydir/*.incr.aof")
    with path.open("r+b") as file:
        file.truncate(chance.randrange(path.stat().st_size))


def _with_trainer(trials: int, findings: Findings, tell: Tell) -> None:
    """A trainer's client explores under its newest version, whatever Redis came back with."""
    with ExitStack() as stack:
        server = stack.enter_context(redis_server("everysec"))
        service = stack.enter_context(rollout_service("--redis-url", server.url))
        for number in range(trials):
            _explore(number, server, service, findings)
            findings.trials += 1
            tell("with a trainer's client")


def _explore(number: int, server: RedisServer, service: RolloutService, findings: Findings) -> None:
    trial = f"trainer {number}"
    notes: list[str] = []
    config = small_config(run=f"trial-{number}", rollout_url=service.url, output=Path("."))
    with RolloutClient(service.url, patience=60, pause=0.05) as client:
        explorer = Explorer(client, config, note=notes.append)
        explorer.start({0: adapter_file(0)})
        explorer.push(1, adapter_file(1))
        before = explorer.explore([_PROMPT], 1, 5)
        server.kill()
        lost = number % 2 == 1
        for path in server.folder.glob("appendonlydir/*.incr.aof"):
            with path.open("r+b") as file:
                file.truncate(_end_of_version_0(path.read_bytes(), config.run) if lost else 0)
        server.start()
        after = explorer.explore([_PROMPT], 1, 5)
        findings.require(after.groups == before.groups, trial, "seeds or scores differ")
        lines = "version 1" if lost else "versions 0 and 1"
        findings.require(any(lines in note for note in notes), trial, f"noted {notes}")
        explorer.push(2, adapter_file(2))
        held = client.adapters(config.run)
        numbers = [info.version for info in held.versions] if held else []
        findings.require(numbers == [0, 1, 2], trial, f"it holds {numbers}")
        findings.add(f"noticed that {lines} was gone, and pushed again" if lost else "noticed that all was gone")


def _end_of_version_0(file: bytes, run: str) -> int:
    """Where the file stands before the run's version 1."""
    return file.index(f":run:{run}:blob:1:".encode())


ROW = Row(
    "redis-restarted",
    "Redis restarted: exactly the keys that its file holds survive; a pointer that went back is noticed and the "
    "trainer pushes again",
    full=400,
    short=12,
    run=run,
)
