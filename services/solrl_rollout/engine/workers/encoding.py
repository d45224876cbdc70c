"""Chunks, their results and the hosted models as messages, whatever carries them: a JSON header and safetensors bytes.

Nothing is pickled. Times cross as durations, so that the two sides need no common clock.
"""

import json
import struct
import time
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import load, save
from solrl_proto.problems import Problem, ProblemError
from solrl_proto.rollouts import Plan, PromptItem, RewardTime

from solrl_rollout.engine.scored_group import image_file
from solrl_rollout.engine.work import Chunk, ExternalReward, HostedModel, Job, ScoredChunk

Header = dict[str, Any]

_SIZE = struct.Struct("!Q")
_JOB = ("tenant", "run", "model", "precision", "rewards", "external_rewards", "images")
_SCORED = ("switched", "switch", "generate", "reward", "server_seconds")
"""Fields that cross as they are, of a job and of a finished chunk."""
HOSTED: TypeAdapter[list[HostedModel]] = TypeAdapter(list[HostedModel])


def encode_message(header: Header, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return b"".join((_SIZE.pack(len(text)), text, body))


def decode_message(message: bytes) -> tuple[Header, bytes]:
    (size,) = _SIZE.unpack_from(message)
    end = _SIZE.size + size
    return json.loads(message[_SIZE.size : end]), message[end:]


def encode_chunk(chunk: Chunk) -> Header:
    """A chunk without its adapter's weights; the header has their digest."""
    job = chunk.job
    return _plain(job, _JOB) | {
        "adapter": job.adapter.digest if job.adapter else None,
        "plan": job.plan.model_dump(mode="json"),
        "prompt": chunk.prompt.model_dump(mode="json"),
        "seeds": list(chunk.seeds),
    }


def decode_chunk(header: Header) -> Chunk:
    """The chunk, in a job of its own that has no adapter yet."""
    plan = Plan.model_validate(header["plan"])
    job = Job(**{name: header[name] for name in _JOB}, adapter=None, plan=plan)
    job.rewards = tuple(job.rewards)
    job.external_rewards = {name: ExternalReward(*reward) for name, reward in job.external_rewards.items()}
    prompt = PromptItem.model_validate(header["prompt"])
    return Chunk(job, prompt, header["seeds"])


def encode_scored(scored: ScoredChunk) -> tuple[Header, bytes]:
    """A finished chunk, its images compressed."""
    # Cloned, because safetensors refuses tensors that share memory.
    tensors = {f"reward.{name}": values.clone().contiguous() for name, values in scored.rewards.items()}
    images = None if scored.images is None else [image_file(image) for image in scored.images]
    for i, image in enumerate(images or ()):
        tensors[f"image.{i}"] = torch.frombuffer(bytearray(image), dtype=torch.uint8)
    header = _plain(scored, _SCORED) | {
        "rewards": list(scored.rewards),
        "images": None if images is None else len(images),
        "elapsed": time.monotonic() - scored.started_at,
        "times": {name: spent.model_dump() for name, spent in scored.times.items()},
    }
    return header, save(tensors)


def decode_scored(header: Header, body: bytes) -> ScoredChunk:
    tensors = load(body)
    images = header["images"]
    return ScoredChunk(
        **{name: header[name] for name in _SCORED},
        rewards={name: tensors[f"reward.{name}"] for name in header["rewards"]},
        images=None if images is None else [tensors[f"image.{i}"].numpy().tobytes() for i in range(images)],
        started_at=time.monotonic() - header["elapsed"],
        times={name: RewardTime.model_validate(spent) for name, spent in header["times"].items()},
    )


def encode_error(error: ProblemError) -> Header:
    return {"problem": error.problem.model_dump(mode="json"), "retry_after": error.retry_after}


def decode_error(problem: Header, retry_after: float | None) -> ProblemError:
    return ProblemError(Problem.model_validate(problem), retry_after=retry_after)


def _plain(record: object, fields: Sequence[str]) -> Header:
    return {name: getattr(record, name) for name in fields}
