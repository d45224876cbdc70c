"""Reports of iterations, as a trainer sends them."""

import base64
import io
import zlib
from typing import Any

import httpx
from PIL import Image
from solrl_proto.status import IterationReport, Samples
from tests.support.service_helpers import RunningService

SCORING = [
    {"of": "candidates", "by": "service", "reward": "clipscore", "seconds": 0.41},
    {"of": "candidates", "by": "service", "reward": "vlm_judge", "server": "judges.example:8200", "seconds": 12.0},
    {"of": "samples", "by": "trainer", "reward": "clipscore", "seconds": 0.052},
]
"""Times of rewards in an iteration."""


def thumbnail(colour: str = "teal", side: int = 16, kind: str = "WEBP") -> str:
    """Base64 of a small image in one colour."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def huge_png(side: int = 60_000) -> str:
    """Base64 of a PNG whose header says `side`², in few bytes."""
    data = bytearray(base64.b64decode(thumbnail(kind="PNG")))
    data[16:24] = side.to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return base64.b64encode(data).decode()


def samples(iteration: int, prompt: str = "a red circle") -> Samples:
    """Samples with one best and one worst candidate."""
    pair = {"prompt": prompt, "seed": 2**53 - 1, "explored": thumbnail(), "regenerated": thumbnail("navy")}
    pairs = [pair | {"place": "best", "proxy": 0.6, "true": 0.7}, pair | {"place": "worst", "proxy": 0.3, "true": 0.2}]
    found = {"iteration": iteration, "version": iteration, "precision": "nvfp4", "numerics": "emulated", "pairs": pairs}
    return Samples.model_validate(found)


def held_out(version: int, mean: float, reward: str = "clipscore", images: int = 128) -> dict[str, Any]:
    """A held-out evaluation whose gain has an interval of 0.1, and the share of right images."""
    half = 0.05 if version else 0.0
    rewards = {reward: {"mean": mean, "low": mean - half, "high": mean + half}}
    return {
        "version": version,
        "images": images,
        "rewards": rewards | {"verifier": {"mean": 0.5, "low": 0.4, "high": 0.6}},
    }


def run_settings(**values: Any) -> dict[str, Any]:
    """Settings of a run that trains on a sum."""
    shown = {"explore.prompts": 4, "explore.candidates": 96, "optimizer.learning_rate": 1e-3, **values}
    return {"trained": {"clipscore": 1, "hpsv2": 0.5}, "values": {name: str(value) for name, value in shown.items()}}


def report(iteration: int, mean: float = 0.5, **more: Any) -> IterationReport:
    """A report of an iteration with this mean score."""
    spread = {"mean": mean, "best": mean + 0.1, "worst": mean - 0.1}
    return IterationReport.model_validate(
        {
            **{"iteration": iteration, "version": iteration + 1, "explored_version": iteration, "planned": 10},
            **{"score": spread, "proxy_mean": mean - 0.05, "loss": 0.9, "rewards": {"clipscore": spread}},
            "seconds": {"explore": 2.0, "wait": 0.5, "regenerate": 1.0, "train": 3.0, "push": 0.1},
            "scoring": SCORING,
            **more,
        }
    )


def tell(service: RunningService, run: str, told: IterationReport) -> httpx.Response:
    """The answer to a report."""
    return service.client.post(f"/v1/runs/{run}/iterations", json=told.model_dump(mode="json"))
