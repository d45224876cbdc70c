"""Fairness between a tenant that names a new run in every request and one that does not."""

import tempfile
from itertools import count
from pathlib import Path

from common import GROUP, adapter_file, farthest, race, request
from fault_trials.adapters import MODEL, layout
from solrl_client.rollouts import RolloutClient
from solrl_http.tokens import create_token
from solrl_proto.rollouts import RolloutRequest
from solrl_trainer.commands.demo import rollout_service
from support.targets import Row

NAMES = 260


def starving(groups: int) -> Row:
    """Count both tenants' groups until the modest one has `groups`."""
    names, turn = [f"new-{i}" for i in range(NAMES)], count()

    def asked(tenant: str, root: int) -> RolloutRequest:
        run = names[next(turn) % len(names)] if tenant == "greedy" else "steady"
        return request(run, 4, GROUP, root=root)

    with tempfile.TemporaryDirectory(prefix="solrl-starving-") as folder:
        file = Path(folder, "tokens.json")
        tokens = {name: create_token(file, name, ("rollout", "push"), None)[0] for name in ("greedy", "modest")}
        flags = ("--token-file", str(file))
        with rollout_service(MODEL, Path("runs/load/service.log"), flags=flags) as url:
            clients = {name: RolloutClient(url, token=token, patience=600) for name, token in tokens.items()}
            bodies = [adapter_file(layout(), rank=4, seed=seed) for seed in range(2)]
            for run in names:
                clients["greedy"].push(run, 0, None, MODEL, bodies[0])
            clients["modest"].push("steady", 0, None, MODEL, bodies[1])
            made = race(clients, asked, lambda made, _: made["modest"] >= groups)
            for client in clients.values():
                client.close()
    off = farthest(made)
    return Row(
        f"a tenant with {NAMES} new run names beside another",
        "each tenant within 10 % of equal",
        f"{made['greedy']:,} and {made['modest']:,} groups of {GROUP}: each within {off:.1%}",
        off <= 0.10,
        {"made": made},
    )
