"""Compares our ImageReward with its package behind a reward service; run by `scripts/reward-server-parity`.

usage: python -m reward_parity.served BIN MODEL RESULT

BIN has the programs of the package's environment. Exits with 1 if the relative difference of a score exceeds 1e-4.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from solrl_core.rewards import RewardSet
from solrl_core.rewards.reward import PlainDefaults
from solrl_http.serving import bind
from solrl_remote.remote_reward import connect_reward

from reward_parity.compare import LIMIT, compared
from reward_parity.reference import PROMPTS, SIZES, photograph

REWARD = "imagereward"
PACKAGES = ("image-reward", "timm", "transformers", "torch", "torchvision", "pillow")


def main(programs: Path, model: Path, result: Path) -> int:
    """Score with both, compare, print and write the result."""
    images = [photograph(height, width, seed) for seed, (height, width) in enumerate(SIZES)]
    options = {
        "checkpoint": str(model / "checkpoint.pt"),
        "med_config": str(model / "med_config.json"),
        "processor": str(model / "tokenizer"),
    }
    defaults = PlainDefaults(torch.device("cpu"))
    with served(programs, options) as address:
        at = {REWARD: {"at": address, "timeout": 600}}
        remote = RewardSet.load([REWARD], defaults, at, connect=connect_reward)
        theirs = scored(remote, images, PROMPTS)
    local = RewardSet.load([REWARD], defaults, {REWARD: options})
    ours = scored(local, images, PROMPTS)
    row = compared(REWARD, "image-reward behind solrl-reward serve", ours, theirs)
    report = {
        "what": "ImageReward of full size with random weights, float32 on a CPU; the package's scores over HTTP",
        "limit": LIMIT,
        "passed": row["max_relative_difference"] <= LIMIT,
        "pairs": theirs.size,
        "image_sizes": [list(image.shape[:2]) for image in images],
        "scores": [row],
        "reference_versions": versions_of(programs),
        "our_versions": {name: version(name) for name in ("torch", "transformers", "pillow")},
    }
    result.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    return 0 if report["passed"] else 1


@contextmanager
def served(programs: Path, options: dict[str, Any]) -> Iterator[str]:
    """The address of a reward service with the package's ImageReward."""
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    command = [str(programs / "solrl-reward"), "serve", "--rewards", f"{REWARD}=reward:PublishedImageReward"]
    command += ["--reward-options", json.dumps({REWARD: options}), "--device", "cpu", "--port", str(port)]
    process = subprocess.Popen(command)
    try:
        address = f"http://127.0.0.1:{port}"
        while not ready(address):
            if process.poll() is not None:
                sys.exit("the reward service ended")
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait()


def ready(address: str) -> bool:
    """Whether the service answers that it is ready."""
    try:
        return httpx.get(f"{address}/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def scored(rewards: RewardSet, images: Sequence[np.ndarray], prompts: Sequence[str]) -> np.ndarray:
    """Scores of all pairs, [images, prompts]."""
    rows = []
    for image in images:
        pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
        batch = pixels.expand(len(prompts), -1, -1, -1)
        rows.append(rewards.score([REWARD], batch, prompts, [{}] * len(prompts))[REWARD])
    return torch.stack(rows).numpy()


def versions_of(programs: Path) -> dict[str, str]:
    """Versions of the packages in the other environment."""
    code = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {PACKAGES}}}))"
    command = [str(programs / "python"), "-c", code]
    found: dict[str, str] = json.loads(subprocess.check_output(command, env=os.environ))
    return found


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:4])))
