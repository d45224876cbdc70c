"""Redis killed at each step of a push: afterwards it holds the old or the new version, and a retry succeeds."""

import asyncio
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from solrl_proto.adapters import AdapterInfo
from solrl_proto.problems import ProblemError
from solrl_rollout.store.errors import StoreUnavailableError
from solrl_rollout.store.redis_store import RedisRunStore
from support.adapters import stored_version
from support.redis_server import RedisServer, dump, running_redis

from fault_trials.findings import Findings, Row
from fault_trials.redis_proxy import PLACES, RedisProxy

TENANT, RUN = "tenant", "run"
_LANES = 3
_FILLER = bytes(range(256)) * 2**15


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


def run(trials: int, findings: Findings) -> None:
    """Run `trials` kills, cycling through each place of each command."""
    asyncio.run(_run(trials, findings))


async def _run(trials: int, findings: Findings) -> None:
    with running_redis() as server:
        findings.counted["Redis"] = server.version()
    commands = await _commands()
    findings.counted["commands of a push"] = " ".join(commands)
    left = itertools.islice(_plans(len(commands)), trials)

    async def lane() -> None:
        for plan in left:
            with tempfile.TemporaryDirectory(prefix="solrl-redis-", ignore_cleanup_errors=True) as folder:
                server = RedisServer(Path(folder), plan.appendfsync)
                try:
                    outcome = await _trial(plan, server, findings)
                finally:
                    await asyncio.to_thread(server.kill)
            findings.add(outcome)
            findings.done(f"{plan}: {outcome}")

    await asyncio.gather(*(lane() for _ in range(_LANES)))


def _plans(steps: int) -> Iterator[Plan]:
    """All places of all steps, with rotating settings; then again with the next settings."""
    settings = [*itertools.product(("always", "everysec"), (False, True))]
    for turn in itertools.count():
        for step, (number, place) in itertools.product(range(steps), enumerate(PLACES)):
            appendfsync, at_once = settings[(step + number + turn) % len(settings)]
            yield Plan(step, place, appendfsync, at_once)


async def _commands() -> list[str]:
    """Redis commands of an undisturbed push."""
    with tempfile.TemporaryDirectory(prefix="solrl-redis-", ignore_cleanup_errors=True) as folder:
        server = RedisServer(Path(folder))
        proxy, store = await _begin(server)
        try:
            await store.put(TENANT, *NEW)
            return list(proxy.commands)
        finally:
            await store.close()
            await proxy.close()
            await asyncio.to_thread(server.kill)


async def _begin(server: RedisServer) -> tuple[RedisProxy, RedisRunStore]:
    """Start a server with the old version, and a store that reaches it through a proxy."""
    await asyncio.to_thread(server.start)
    direct = RedisRunStore(server.url)
    await direct.put(TENANT, *OLD)
    await direct.close()
    await asyncio.to_thread(server.wait_until_written)  # otherwise everysec could lose the old version, too
    proxy = RedisProxy(server.port)
    return proxy, RedisRunStore(await proxy.start())


async def _trial(plan: Plan, server: RedisServer, findings: Findings) -> str:
    proxy, store = await _begin(server)
    proxy.arm(plan.step, plan.place, lambda: asyncio.to_thread(server.restart if plan.at_once else server.kill))
    try:
        await store.put(TENANT, *NEW)
        acknowledged = True
    except ProblemError as error:
        findings.require(isinstance(error, StoreUnavailableError), str(plan), f"refused as {error}")
        acknowledged = False
    finally:
        findings.require(await proxy.killed(), str(plan), "the kill never came")
        await store.close()
        await proxy.close()
    if not plan.at_once:
        await asyncio.to_thread(server.start)
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
    keys = {f"{own}{name}" for name in ("runs", f"run:{RUN}:versions")}
    keys |= {f"{own}run:{RUN}:blob:{info.version}" for info, _ in wanted}
    stay = {key.decode() for key in await asyncio.to_thread(dump, server.url)}
    findings.require(stay == keys, str(plan), f"keys differ by {sorted(stay ^ keys)}")
    return listed.head


ROW = Row(
    "redis-killed",
    "Redis killed mid-push at each step of the protocol: old or new version, never mixed; retry succeeds",
    full=500,
    short=35,
    run=run,
)
