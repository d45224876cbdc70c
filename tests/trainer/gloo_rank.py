"""One rank of a run that two processes train together.

It writes facts to FOLDER/rank-RANK.json: its requests to the service, its files, and a digest of its weights.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import httpx
import torch
from solrl_client.retries import Wait
from solrl_trainer import loop
from solrl_trainer.policy.policy import CURRENT, OLD
from solrl_trainer.ranks.rank_info import read_rank_info
from solrl_trainer.ranks.rank_runtime import process_group
from solrl_trainer.records.records import IterationRecord
from solrl_trainer.session import Session
from training_helpers import TINY, resolve

SETTINGS = (
    *TINY,
    *("explore.prompts=3", "explore.candidates=8", "explore.keep=4", "explore.steps=2", "regenerate.steps=2"),
    *("evaluate.prompts=3", "evaluate.seeds=1", "evaluate.steps=1", "evaluate.fidelity_prompts=1", "iterations=2"),
    *("optimizer.updates=1", "optimizer.batch=2", "explore.lag=1", "checkpoint_every=1"),
)


class Silent:
    """A reporter that counts its calls."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def phase(self, iteration: int, name: str) -> None:
        self.told.append(name)

    def progress(self, done: float, total: float) -> None:
        pass

    def counted(self, iteration: int, part: str, done: int, total: int) -> None:
        pass

    def waiting(self, server: str, wait: Wait | None) -> None:
        pass

    def finished(self, record: IterationRecord) -> None:
        self.told.append("finished")


def digest(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


def main(url: str, folder: str) -> None:
    rank = int(os.environ["RANK"])
    requests: list[str] = []
    send = httpx.Client.send

    def noted(client: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
        requests.append(f"{request.method} {request.url.path}")
        return send(client, request, **options)

    httpx.Client.send = noted  # type: ignore[method-assign]
    sessions: list[Session] = []
    iterate = loop.train_step

    def watched(session: Session, *rest: Any) -> Any:
        sessions.append(session)
        return iterate(session, *rest)

    loop.train_step = watched
    os.chdir(folder)
    output = Path(f"rank-{rank}")  # separate folders show which rank writes
    arguments = {"output": output, "run": "together", "rollout_url": url}
    config = resolve("mini-sana/sol_rl/clipscore", overrides=SETTINGS, arguments=arguments).config
    reporter = Silent()
    with process_group(read_rank_info()) as processes:
        result = loop.train(config, reporter, world=processes.world(config.device, config.patience))
    session = sessions[-1]
    assert result.samples is not None
    facts = {
        "requests": requests,
        "told": reporter.told,
        "files": sorted(str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()),
        "weights": {name: digest(session.models.policy.tensors(name)) for name in (CURRENT, OLD)},
        "average": digest(session.models.policy.averaged),
        "groups": [group.prompt.id for group in result.samples.groups],
        "prompts": [prompt.id for prompt in result.samples.prompts],
        "scores": result.samples.scores.tolist(),
        "before": {name: values.tolist() for name, values in result.before.scores.items()},
        "after": {name: values.tolist() for name, values in result.after.scores.items()},
    }
    Path(f"rank-{rank}.json").write_text(json.dumps(facts))
