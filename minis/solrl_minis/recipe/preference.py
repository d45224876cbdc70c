"""Preference groups of the shapes world, and the training of any reward on them.

A group is a prompt with a few images: some rendered (right, altered, worn), some made by the miniature backbones. The
verifier stands in for the people whose choices the real rewards were tuned on; it sees training prompts alone.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from solrl_core.rewards import Reward

from solrl_minis.recipe import measure
from solrl_minis.recipe.data import Source
from solrl_minis.recipe.loop import Budget, Rates, fit
from solrl_minis.verifier import verify_batch

SIZE = 4
"""Images of a group."""
_WORN = 0.02
"""What a blurred or noisy image is worth less than one that shows the same, sharp."""


@dataclass(frozen=True)
class Groups:
    """G prompts with 4 images each.

    Attributes:
        prompts: the texts.
        metadata: what each asks for.
        images: uint8 [G, 4, 3, 64, 64].
        grades: what the verifier says of each, [G, 4].
        worn: whether an image was blurred or made noisy, [G, 4].
    """

    prompts: list[str]
    metadata: list[dict[str, Any]]
    images: torch.Tensor
    grades: torch.Tensor
    worn: torch.Tensor


def rendered(source: Source, count: int) -> Groups:
    """The right picture, two with one attribute changed each, and the right or a changed one worn."""
    combinations = source.draw(count)
    changed = [source.change(c) for c in combinations]
    fourth = [c if source.rng.random() < 0.5 else source.change(c) for c in combinations]
    sets = (combinations, changed, [source.change(c) for c in combinations], fourth)
    images = torch.stack([source.images(each, "cpu") for each in sets], 1)
    worn = torch.zeros(count, SIZE, dtype=torch.bool)
    worn[:, 3] = True
    images[:, 3] = _wear(images[:, 3], source.rng)
    return _graded([source.caption(c) for c in combinations], [c.metadata for c in combinations], images, worn)


def generated(source: Source, folder: Path, count: int, device: str) -> Groups:
    """Four images of each prompt by a miniature backbone."""
    combinations = source.draw(count)
    prompts = [source.caption(c) for c in combinations]
    images = made(prompts, source, folder, device)
    worn = torch.zeros(count, SIZE, dtype=torch.bool)
    return _graded(prompts, [c.metadata for c in combinations], images, worn)


def made(prompts: Sequence[str], source: Source, folder: Path, device: str) -> torch.Tensor:
    """Four images of each prompt by a miniature backbone, from seeds that the source draws: [G, 4, 3, 64, 64]."""
    seeds = source.rng.integers(2**31, size=len(prompts) * SIZE).tolist()
    texts = [prompt for prompt in prompts for _ in range(SIZE)]
    images = measure.sample(measure.load(folder, device), texts, seeds, measure.STEPS)
    return images.view(len(prompts), SIZE, *images.shape[1:])


def join(parts: Sequence[Groups]) -> Groups:
    """One after the other."""
    return Groups(
        [prompt for part in parts for prompt in part.prompts],
        [item for part in parts for item in part.metadata],
        *(torch.cat([getattr(part, name) for part in parts]) for name in ("images", "grades", "worn")),
    )


def backbones(out: Path) -> list[Path]:
    """The pipelines that lie in a folder."""
    return sorted(path.parent for path in out.glob("*/model_index.json"))


def train(
    name: str,
    parameters: Sequence[torch.nn.Parameter],
    score: Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor],
    tokens: dict[str, torch.Tensor],
    groups: Groups,
    budget: Budget,
    rates: Rates,
    device: str,
) -> list[float]:
    """Minimise −log σ(better − worse) over the strictly ordered pairs of each group.

    This is PickScore's and HPS's cross-entropy between two images of a prompt, and ImageReward's ranking loss.

    Args:
        name: what the progress lines call it.
        parameters: what is trained.
        score: (images [N, 3, 64, 64] in [0, 1], tokens of N prompts) → scores [N] in logits.
        tokens: of the groups' prompts.
        groups: what is learned.
        budget: `batch` counts groups.
        rates: how it is optimised.
        device: where to train.

    Returns:
        The loss at each step.
    """
    value = (groups.grades - _WORN * groups.worn).to(device)
    images, tokens = groups.images.to(device), {key: rows.to(device) for key, rows in tokens.items()}

    def loss() -> tuple[torch.Tensor, torch.Tensor]:
        pick = torch.randint(len(images), (budget.batch,), device=device)
        pixels = images[pick].flatten(0, 1).float() / 255
        said = {key: rows[pick].repeat_interleave(SIZE, 0) for key, rows in tokens.items()}
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            scores = score(_jittered(pixels), said).float().view(-1, SIZE)
        better = value[pick][:, :, None] > value[pick][:, None]
        found = (F.softplus(scores[:, None] - scores[:, :, None]) * better).sum() / better.sum().clamp(min=1)
        return found, found

    return fit(name, parameters, loss, budget, rates)


@torch.no_grad()
def scores(
    score: Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor],
    tokens: dict[str, torch.Tensor],
    groups: Groups,
    device: str,
) -> torch.Tensor:
    """Of all images of the groups, [G · 4], a few hundred at a time; arguments as for `train`."""
    found = []
    for start in range(0, len(groups.images), 64):
        rows = slice(start, start + 64)
        said = {key: values[rows].to(device).repeat_interleave(SIZE, 0) for key, values in tokens.items()}
        found.append(score(groups.images[rows].to(device).flatten(0, 1).float() / 255, said).float().cpu())
    return torch.cat(found)


def agreement(reward: Reward, groups: Groups) -> float:
    """Share of the strictly ordered pairs, by the verifier's grade, that the reward orders the same way."""
    images = groups.images.flatten(0, 1).float() / 255
    prompts = [prompt for prompt in groups.prompts for _ in range(SIZE)]
    metadata = [item for item in groups.metadata for _ in range(SIZE)]
    scores = reward(images, prompts, metadata).float().cpu().view(-1, SIZE)
    better = groups.grades[:, :, None] > groups.grades[:, None]
    return float((scores[:, :, None] > scores[:, None])[better].float().mean())


def _jittered(images: torch.Tensor) -> torch.Tensor:
    """A little noise, so that no image is seen twice. (A mirror would turn left into right.)"""
    return (images + 0.01 * torch.randn_like(images)).clamp(0, 1)


def _wear(images: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Each image blurred or noisy."""
    blurred = F.avg_pool2d(F.pad(images, (2, 2, 2, 2), mode="replicate"), 5, 1)
    noisy = (images + 0.15 * torch.randn_like(images)).clamp(0, 1)
    choice = torch.from_numpy(rng.random(len(images)) < 0.5)
    return torch.where(choice[:, None, None, None], blurred, noisy)


def _graded(prompts: list[str], metadata: list[dict[str, Any]], images: torch.Tensor, worn: torch.Tensor) -> Groups:
    pixels = in_bytes(images)
    wanted = [item for item in metadata for _ in range(SIZE)]
    grades = in_processes(_grades, pixels.flatten(0, 1), wanted)
    return Groups(prompts, metadata, pixels, torch.tensor(grades).view(-1, SIZE), worn)


def in_bytes(images: torch.Tensor) -> torch.Tensor:
    """Images in [0, 1] as uint8."""
    return (images * 255).round().clamp(0, 255).to(torch.uint8)


def _grades(images: torch.Tensor, metadata: Sequence[dict[str, Any]]) -> list[float]:
    return [verdict.graded for verdict in verify_batch(images.float() / 255, metadata)]


def in_processes(judge: Callable[..., list[Any]], *columns: Any) -> list[Any]:
    """A module's function of equally long columns, of which it takes any part; many rows in several processes."""
    count = len(columns[0])
    if count < 4096:
        return judge(*columns)
    rows = [slice(start, start + 512) for start in range(0, count, 512)]
    workers = min(8, os.cpu_count() or 1)
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=partial(torch.set_num_threads, 1)
    ) as pool:
        found = pool.map(judge, *([column[r] for r in rows] for column in columns))
        return [one for part in found for one in part]
