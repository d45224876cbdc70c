"""Fairness between a tenant that names a new run in every request and one that does not."""

import tempfile
import threading
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

from common import MODEL, Row, layout, random_adapter, request
from solrl_rollout.http.tokens import create_token
from solrl_trainer.client import RolloutClient
from solrl_trainer.demo import rollout_service

NAMES = 260
IN_FLIGHT = 3
_GROUP = 24
_WARM = 4
"""Groups that each tenant has before counting begins."""


def starving(groups: int) -> Row:
    """Count both tenants' groups until the modest one has `groups`."""
    made = {"greedy": 0, "modest": 0}
    with tempfile.TemporaryDirectory(prefix="solrl-starving-") as folder:
        file = Path(folder, "tokens.json")
        tokens = {name: create_token(file, name, ("rollout", "push"), None)[0] for name in made}
        flags = ("--token-file", str(file))
        with rollout_service(MODEL, Path("runs/load/service.log"), flags=flags) as url:
            clients = {name: RolloutClient(url, token=token, patience=600) for name, token in tokens.items()}
            bodies = [random_adapter(layout(), rank=4, seed=seed) for seed in range(2)]
            names = [f"new-{i}" for i in range(NAMES)]
            for run in names:
                clients["greedy"].push(run, 0, None, MODEL, bodies[0])
            clients["modest"].push("steady", 0, None, MODEL, bodies[1])
            _race(clients, names, made, groups)
            for client in clients.values():
                client.close()
    mean = sum(made.values()) / len(made)
    off = max(abs(of_one - mean) / mean for of_one in made.values())
    return Row(
        f"a tenant with {NAMES} new run names beside another",
        "each tenant within 10 % of equal",
        f"{made['greedy']:,} and {made['modest']:,} groups of {_GROUP}: each within {off:.1%}",
        off <= 0.10,
        {"made": made},
    )


def _race(clients: dict[str, RolloutClient], names: list[str], made: dict[str, int], groups: int) -> None:
    """Let both tenants always have work queued; fill `made` from when both are served until the modest has `groups`."""
    begun = dict.fromkeys(made, 0)
    counting, stop = threading.Event(), threading.Event()
    lock, turn = threading.Lock(), count()

    def ask(tenant: str, root: int) -> None:
        def on_group(_: object) -> None:
            with lock:
                if stop.is_set():
                    raise _Over
                begun[tenant] += 1
                if counting.is_set():
                    made[tenant] += 1
                elif min(begun.values()) >= _WARM:
                    counting.set()
                if made["modest"] >= groups:
                    stop.set()

        with suppress(_Over):
            while not stop.is_set():
                run = names[next(turn) % len(names)] if tenant == "greedy" else "steady"
                clients[tenant].rollouts(request(run, 4, _GROUP, root=root), on_group=on_group)
                root += IN_FLIGHT

    threads = [threading.Thread(target=ask, args=(tenant, i)) for i in range(IN_FLIGHT) for tenant in made]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()


class _Over(Exception):  # noqa: N818
    """Ends a client's stream once enough was counted."""
