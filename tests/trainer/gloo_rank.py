"""One rank of a run that two processes train together: `python gloo_rank.py RANK SIZE STORE URL FOLDER`.

It writes what it did into FOLDER/rank-RANK.json: requests to the service, files written, and a digest of its weights.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from solrl_trainer import loop
from solrl_trainer.policy import CURRENT, OLD
from solrl_trainer.records import IterationRecord
from solrl_trainer.session import Session
from training_helpers import TINY, resolve

SETTINGS = (
    *TINY,
    *("explore.prompts=3", "explore.candidates=8", "explore.keep=4", "explore.steps=2", "regenerate.steps=2"),
    *("evaluate.prompts=3", "evaluate.seeds=1", "evaluate.steps=1", "evaluate.fidelity_prompts=1", "iterations=2"),
    *("optimizer.updates=1", "optimizer.batch=2", "explore.lag=1", "checkpoint_every=1"),
)


class GlooWorld:
    """Ranks that meet in a file and talk through gloo."""

    def __init__(self, rank: int, size: int, store: Path) -> None:
        self.rank = rank
        self.size = size
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        length = torch.tensor([len(tensor)])
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length)
        longest = max(int(one) for one in lengths)
        padded = torch.zeros(longest, *tensor.shape[1:], dtype=tensor.dtype)
        padded[: len(tensor)] = tensor
        parts = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return [part[: int(one)].clone() for part, one in zip(parts, lengths, strict=True)]

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.broadcast(tensor, 0)
        return tensor


class Silent:
    """A reporter that counts what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def phase(self, iteration: int, name: str) -> None:
        self.told.append(name)

    def finished(self, record: IterationRecord) -> None:
        self.told.append("finished")

    def note(self, text: str) -> None:
        self.told.append(text)


def digest(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


def main(rank: int, size: int, store: Path, url: str, folder: Path) -> None:
    requests: list[str] = []
    send = httpx.Client.send

    def noted(client: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
        requests.append(f"{request.method} {request.url.path}")
        return send(client, request, **options)

    httpx.Client.send = noted  # type: ignore[method-assign]
    sessions: list[Session] = []
    iterate = loop.train_iteration

    def watched(session: Session, *rest: Any) -> Any:
        sessions.append(session)
        return iterate(session, *rest)

    loop.train_iteration = watched
    os.chdir(folder)
    output = Path(f"rank-{rank}")  # a folder of its own shows who writes
    arguments = {"output": output, "run": "together", "rollout_url": url}
    config = resolve("mini-sana/sol_rl/clipscore", overrides=SETTINGS, arguments=arguments).config
    reporter = Silent()
    result = loop.train(config, reporter, world=GlooWorld(rank, size, store))
    session = sessions[-1]
    assert result.samples is not None
    facts = {
        "requests": requests,
        "told": reporter.told,
        "files": sorted(str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()),
        "weights": {name: digest(session.models.policy.tensors(name)) for name in (CURRENT, OLD)},
        "average": digest(session.models.policy.averaged),
        "groups": [group.selection.prompt.id for group in result.samples.groups],
        "prompts": [prompt.id for prompt in result.samples.prompts],
        "scores": result.samples.scores.tolist(),
        "before": {name: values.tolist() for name, values in result.before.scores.items()},
        "after": {name: values.tolist() for name, values in result.after.scores.items()},
    }
    Path(f"rank-{rank}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
