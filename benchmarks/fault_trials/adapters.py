"""Random adapters of the miniature, and HTTP requests that push them or ask for candidates."""

from functools import cache
from typing import Any

import httpx
from solrl_core.adapter import encode_adapter
from solrl_core.families import load_backbone
from solrl_core.lora import adapter_layout
from solrl_proto.adapters import ADAPTER_MEDIA_TYPE
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import resolve
from tests.support.adapters import content_digest, random_adapter

MODEL = "mini-sana"
SMALL = (
    *("explore.prompts=2", "explore.candidates=24", "explore.keep=8", "explore.steps=2", "lora.rank=2", "lora.alpha=4"),
    *("regenerate.steps=4", "optimizer.updates=1", "optimizer.batch=16", "algorithm.timestep_fraction=0.5"),
    *("evaluate.prompts=2", "evaluate.seeds=1", "evaluate.steps=1", "evaluate.fidelity_prompts=0"),
    "evaluate.rewards=[]",
)
"""Settings of a run so small that a hundred take minutes."""


@cache
def layout() -> dict[str, tuple[int, int]]:
    """LoRA targets of the miniature and their sizes."""
    backbone = load_backbone(MODEL)
    return adapter_layout(backbone.transformer, backbone.lora_targets)


def adapter_file(seed: int) -> bytes:
    """Encode the random adapter with this seed."""
    return encode_adapter(random_adapter(layout(), seed))


def put(
    http: httpx.Client, run: str, version: int, body: bytes, parent: int | None = None, digest: str | None = None
) -> httpx.Response:
    """Push a body, with its own digest unless another is given."""
    query = {"model": MODEL} | ({} if parent is None else {"parent": parent})
    headers = {"Content-Digest": digest or content_digest(body), "Content-Type": ADAPTER_MEDIA_TYPE}
    return http.put(f"/v1/runs/{run}/adapters/{version}", content=body, params=query, headers=headers)


def kind(answer: httpx.Response) -> str:
    name: str = answer.json()["type"].removeprefix("urn:solrl:problem:")
    return name


def rollout_body(
    *, prompt: str = "p", run: tuple[str, int] | None = None, count: int = 4, steps: int = 2, images: str = "none"
) -> dict[str, Any]:
    """Body of a rollout request for one prompt."""
    return {
        "model": MODEL,
        "adapter": run and {"run": run[0], "version": run[1]},
        "prompts": [{"id": prompt, "text": "a red circle"}],
        "candidates": {"count": count, "seed_root": 7},
        "plan": {"steps": steps, "precision": "nvfp4"},
        "rewards": [{"name": "clipscore"}],
        "images": images,
    }


def small_config(*overrides: str, **arguments: Any) -> RunConfig:
    return resolve("mini-sana/sol_rl/clipscore", overrides=[*SMALL, *overrides], arguments=arguments).config
