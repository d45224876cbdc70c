"""Redis killed at each step of a push, or restarted without the end of its file.

A kill leaves the old or the new version, and a retry succeeds. A power failure loses the end of the append-only file.
So may a kill under `appendfsync everysec`, since Redis buffers writes in memory during an fsync: it then holds a whole,
older version, which the trainer notices.
"""

import asyncio
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from redis.asyncio import Connection
from redis.exceptions import ConnectionError as RedisConnectionError
from solrl_client.rollouts import RolloutClient
from solrl_proto.adapters import AdapterInfo
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import PromptItem
from solrl_rollout.store.errors import StoreUnavailableError
from solrl_rollout.store.redis_store import RedisRunStore
from solrl_trainer.records.shown_log import shown_log
from solrl_trainer.service.adapter_supply import AdapterSupply
from solrl_trainer.service.run_requests import RunRequests
from tests.support.adapters import stored_version
from tests.support.redis_server import Keys, RedisServer, dump, running_redis

from fault_trials.adapters import adapter_file, small_config
from fault_trials.findings import Findings, Row
from fault_trials.services import RolloutService, rollout_service

TENANT, RUN = "tenant", "run"
PLACES = ("before", "half", "sent", "executed", "answered")
"""Kill before a command is sent, in its middle, right after it, after its execution, or after its answer."""
_SETUP = ("HELLO", "CLIENT", "SELECT")
_FILLER = bytes(range(256)) * 2**15
_VERSIONS = 6
_RETAIN = 4
_ALL, _NEWEST, _BY_KILL = "the whole file lost", "the newest version lost", "nothing but the kill"
LOSSES = (_ALL, _NEWEST, _BY_KILL)
_PROMPT = PromptItem(id="p", text="a red circle")


@dataclass
class Death:
    """Kills the server at `place` of the command number `step` of a store, whose commands it records."""

    kill: Callable[[], None] = lambda: None
    step: int = -1
    place: str = ""
    commands: list[str] = field(default_factory=list)

    def plant(self, store: RedisRunStore) -> None:
        """Have the store's connections die; nothing must have been asked of it before."""
        death = self

        class Dying(Connection):
            _last = ""

            async def send_packed_command(self, command: Iterable[bytes], check_health: bool = True) -> None:
                sent = b"".join(command)
                place = death.reached(sent.split(b"\r\n", 3)[2].decode().upper())
                if place == "before":
                    death.end()
                await super().send_packed_command([sent[: len(sent) // 2] if place == "half" else sent], check_health)
                if place in ("half", "sent"):
                    death.end()
                self._last = place

            async def read_response(self, *args: Any, **options: Any) -> Any:
                reply = await super().read_response(*args, **options)
                place, self._last = self._last, ""
                if place == "executed":
                    death.end()
                elif place == "answered":
                    death.kill()
                return reply

        store._redis.connection_pool.connection_class = Dying

    def reached(self, command: str) -> str:
        """The place of this command at which to kill, if any."""
        if command in _SETUP:
            return ""
        self.commands.append(command)
        return self.place if len(self.commands) - 1 == self.step else ""

    def end(self) -> None:
        """Kill the server; the client's connection is lost."""
        self.kill()
        raise RedisConnectionError


@dataclass(frozen=True)
class Plan:
    """A trial: the point at which Redis dies, its fsync policy, and when it restarts."""

    step: int
    place: str
    appendfsync: str
    at_once: bool

    def __str__(self) -> str:
        back = "at once" if self.at_once else "after the push failed"
        return f"{self.place} command {self.step}, appendfsync {self.appendfsync}, back {back}"


def version(number: int, body: bytes) -> tuple[AdapterInfo, bytes]:
    """Adapter version `number`, whose parent is the previous one."""
    return stored_version(body, run=RUN, version=number, parent=number - 1 if number else None)


OLD, NEW, NEXT = version(0, b"old"), version(1, _FILLER + b"!"), version(2, b"next")


def redis_killed(trials: int, findings: Findings) -> None:
    """Run `trials` kills, cycling through each place of each command."""
    with running_redis() as server:
        findings.counted["Redis"] = server.version()
        commands = asyncio.run(_commands(server))
    findings.counted["commands of a push"] = " ".join(commands)
    for plan in itertools.islice(_plans(len(commands)), trials):
        with running_redis(plan.appendfsync) as server:
            outcome = asyncio.run(_kill(plan, server, findings))
        findings.add(outcome)
        findings.done(f"{plan}: {outcome}")


def _plans(steps: int) -> Iterator[Plan]:
    """All places of all steps, with rotating settings; then again with the next settings."""
    settings = [*itertools.product(("always", "everysec"), (False, True))]
    for turn in itertools.count():
        for step, (number, place) in itertools.product(range(steps), enumerate(PLACES)):
            appendfsync, at_once = settings[(step + number + turn) % len(settings)]
            yield Plan(step, place, appendfsync, at_once)


async def _push_old(server: RedisServer) -> None:
    store = RedisRunStore(server.url)
    await store.put(TENANT, *OLD)
    await store.close()
    server.wait_until_written()  # otherwise everysec could lose the old version, too


async def _commands(server: RedisServer) -> list[str]:
    await _push_old(server)
    store, death = RedisRunStore(server.url), Death()
    death.plant(store)
    await store.put(TENANT, *NEW)
    await store.close()
    return death.commands


async def _kill(plan: Plan, server: RedisServer, findings: Findings) -> str:
    kills = []

    def kill() -> None:
        kills.append(plan)
        server.restart() if plan.at_once else server.kill()

    await _push_old(server)
    store = RedisRunStore(server.url)
    Death(kill, plan.step, plan.place).plant(store)
    try:
        await store.put(TENANT, *NEW)
        acknowledged = True
    except ProblemError as error:
        findings.require(isinstance(error, StoreUnavailableError), str(plan), f"refused as {error}")
        acknowledged = False
    await store.close()
    findings.require(len(kills) == 1, str(plan), "the kill never came")
    if not plan.at_once:
        server.start()
    store = RedisRunStore(server.url)
    try:
        head = await _held(store, server, plan, findings)
        # With everysec, Redis may lose writes that it has acknowledged but not yet written.
        kept = head == 1 or not acknowledged or plan.appendfsync == "everysec"
        findings.require(kept, str(plan), "acknowledged, and lost")
        again, _ = await store.put(TENANT, *NEW)
        findings.require(again == NEW[0], str(plan), "the retry was answered with another version")
        findings.require(await _held(store, server, plan, findings) == 1, str(plan), "the retry stored nothing")
        await store.put(TENANT, *NEXT)
        findings.require(await _held(store, server, plan, findings) == 2, str(plan), "no version goes on top")
    except ProblemError as error:
        findings.require(False, str(plan), str(error))
        return "broken"
    finally:
        await store.close()
    return f"{'acknowledged' if acknowledged else 'refused'}, {('old', 'new')[head]} version held"


async def _held(store: RedisRunStore, server: RedisServer, plan: Plan, findings: Findings) -> int:
    """Head of the run. All versions up to it must be intact, with no other keys."""
    listed = await store.list(TENANT, RUN)
    wanted = (OLD, NEW, NEXT)[: listed.head + 1]
    findings.require(listed.versions == tuple(info for info, _ in wanted), str(plan), "versions are mixed")
    for number, one in enumerate(wanted):
        findings.require(await store.get(TENANT, RUN, number) == one, str(plan), f"version {number} is another")
    own = f"solrl:{{{TENANT}}}:"
    keys = {f"{own}{name}" for name in ("runs", "bytes", f"run:{RUN}:versions")}
    keys |= {f"{own}run:{RUN}:blob:{info.version}" for info, _ in wanted}
    stay = {key.decode() for key in _lasting(server)}
    findings.require(stay == keys, str(plan), f"keys differ by {sorted(stay ^ keys)}")
    return listed.head


def _lasting(server: RedisServer) -> Keys:
    """The keys but those of an upload that was cut off, which expire."""
    return {key: one for key, one in dump(server.url).items() if b":upload:" not in key or not one[0]}


def redis_restarted(trials: int, findings: Findings) -> None:
    """Run `trials` restarts: a third with a real trainer's client, the rest with the store alone."""
    trained = max(len(LOSSES), trials // 3)
    for number in range(trials - trained):
        with running_redis() as server:
            asyncio.run(_restart(f"store {number}", server, findings))
        findings.done("the store alone")
    with running_redis("everysec") as server, rollout_service("--redis-url", server.url) as service:
        for number in range(trained):
            _explore(number, LOSSES[number % len(LOSSES)], server, service, findings)
            findings.done("with a trainer's client")


async def _restart(trial: str, server: RedisServer, findings: Findings) -> None:
    """Push versions, kill Redis, cut its file and restart it, and compare its keys with those after each push."""
    chance = random.Random(trial)
    snapshots = [_lasting(server)]
    store = RedisRunStore(server.url, retain=_RETAIN)
    for number in range(_VERSIONS):
        await store.put(TENANT, *version(number, chance.randbytes(chance.randrange(1, 2**16))))
        snapshots.append(_lasting(server))
    with _cut(server) as path:
        path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])
    head = await _judge_older(store, _lasting(server), snapshots, trial, findings)
    findings.add(f"the end of the file lost: back at version {head}")
    await store.close()


@contextmanager
def _cut(server: RedisServer) -> Iterator[Path]:
    """Kill the server, yield its append-only file, and start it again."""
    server.kill()
    (path,) = server.folder.glob("appendonlydir/*.incr.aof")
    yield path
    server.start()


async def _judge_older(
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


def _explore(number: int, loss: str, server: RedisServer, service: RolloutService, findings: Findings) -> None:
    """Require that a trainer's client explores under its newest version, whatever Redis recovered."""
    trial = f"trainer {number}, {loss}"
    notes: list[str] = []
    config = small_config(run=f"trial-{number}", rollout_url=service.url, output=Path("."))
    with RolloutClient(service.url, patience=60, pause=0.05) as client, shown_log(notes.append):
        supply = AdapterSupply(client, run=config.run, model=config.model_name, lag=0)
        source = replace(RunRequests(config, client), restore=supply.restore)
        supply.start({0: adapter_file(0)})
        supply.push(1, adapter_file(1))
        before = source.candidates_of([_PROMPT], 1, 5, iteration=1)
        if loss != _BY_KILL:
            server.wait_until_written()
        with _cut(server) as path:
            file = path.read_bytes()
            if loss != _BY_KILL:
                path.write_bytes(b"" if loss == _ALL else file[: file.index(f":run:{config.run}:blob:1\r\n".encode())])
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


ROWS = (
    Row(
        "redis-killed",
        "Redis killed mid-push at each step of the protocol: old or new version, never mixed; retry succeeds",
        full=500,
        short=35,
        run=redis_killed,
    ),
    Row(
        "redis-restarted",
        "Redis restarted without its file's end: it holds a whole, older version; the trainer notices and pushes again",
        full=130,
        short=1 + len(LOSSES),
        run=redis_restarted,
    ),
)
