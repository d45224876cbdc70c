"""Some best and worst seeds of an iteration: what the service saw beside what was trained on."""

from dataclasses import dataclass

import torch
from solrl_proto.rollouts import AdapterRef, Candidates, RolloutRequest

from solrl_trainer.client import RolloutClient
from solrl_trainer.config import RunConfig
from solrl_trainer.explore import plan
from solrl_trainer.images import from_png
from solrl_trainer.report.gallery import Pair
from solrl_trainer.rollouts import Gathered


@dataclass(frozen=True)
class BestAndWorst:
    """Kept seeds, and their images float32 [len(pairs), 3, H, W] in [0, 1], as explored and as trained on.

    `seconds` is what the service worked on it.
    """

    pairs: list[Pair]
    seconds: float
    explored: torch.Tensor
    regenerated: torch.Tensor


def best_and_worst(
    gathered: Gathered, client: RolloutClient, config: RunConfig, *, prompts: int, each: int
) -> BestAndWorst:
    """Ask the service for its images of the `each` best and worst seeds of the first `prompts` groups.

    Raises:
        ProblemError: it refuses, has lost the adapter version, or is gone.
    """
    half = config.explore.keep // 2
    each = min(each, half)
    groups = gathered.kept[:prompts]
    index = [[*range(each), *range(len(group.seeds) - each, len(group.seeds))] for group in groups]
    answer = client.rollouts(
        RolloutRequest(
            model=config.model_name,
            adapter=AdapterRef(run=config.run, version=gathered.version),
            prompts=tuple(group.prompt for group in groups),
            candidates=Candidates(
                seeds=tuple(tuple(group.seeds[i] for i in places) for group, places in zip(groups, index, strict=True))
            ),
            plan=plan(config, whole=True),
            rewards=config.trained,
            images="png",
        )
    )
    return BestAndWorst(
        pairs=[
            Pair(
                prompt=group.prompt.text,
                seed=group.seeds[i],
                place="best" if i < half else "worst",
                proxy=float(group.proxy[i]),
                true=float(gathered.made.scores[row, i]),
            )
            for row, (group, places) in enumerate(zip(groups, index, strict=True))
            for i in places
        ],
        seconds=answer.seconds.switch + answer.seconds.generate + answer.seconds.reward,
        explored=torch.stack([from_png(png) for one in answer.groups for png in one.images or () if png is not None]),
        regenerated=torch.cat([gathered.made.images[row, places] for row, places in enumerate(index)]),
    )
