"""Rewards of samples, and the score that training optimises."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from solrl_core.image_files import for_showing
from solrl_core.rewards.reward import weighted_sum
from solrl_core.sampling.generator import GeneratorOutput
from solrl_engine.scorer import NonFiniteImagesError, RewardTimes, Scorer, Scores, sum_times
from solrl_engine.side_stream import Pending, SideStream
from solrl_proto.rollouts import PromptItem, RewardSpec, RewardTime

from solrl_trainer.prompts.prompt_rewards import group_indices, prompt_weights, rewards_to_score
from solrl_trainer.rollouts.groups import ScoredSamples

OnTimes = Callable[[Mapping[str, RewardTime]], None]
"""Called with the times of rewards, by name."""


class SampleScorer:
    """Scores samples by a run's rewards, on a GPU while further samples are generated."""

    def __init__(
        self,
        scorer: Scorer,
        names: Sequence[str],
        trained: Sequence[RewardSpec],
        side: SideStream,
        on_times: OnTimes = lambda times: None,
    ) -> None:
        """Set up a scorer for these `trained` rewards with their weights; several share `scorer` and the stream `side`.

        The rewards `names` are applied. A prompt's own rewards replace them, if they have a weight or are in `names`.
        `on_times` is called with the time of each reward, whenever images were scored.
        """
        self._scorer, self._side, self._on_times = scorer, side, on_times
        self._names = tuple(names)
        self._weights = {spec.name: spec.weight for spec in trained}

    @property
    def overlaps(self) -> bool:
        """Whether samples are scored while further samples are generated."""
        return self._side.overlaps

    def score_samples(self, prompts: Sequence[PromptItem], samples: GeneratorOutput) -> Pending[ScoredSamples]:
        """Begin to apply every reward to samples, one prompt for each."""

        def scored() -> ScoredSamples:
            score, rewards = self._rate(prompts, samples.images)
            return ScoredSamples(samples.latents, for_showing(samples.images).cpu(), samples.recording, score, rewards)

        return self._side.start(scored)

    def score_images(self, prompts: Sequence[PromptItem], images: torch.Tensor) -> Pending[torch.Tensor]:
        """Begin to compute the scores [N] of images or clips, one prompt for each."""
        return self._side.start(lambda: self._rate(prompts, images)[0])

    def _rate(self, prompts: Sequence[PromptItem], images: torch.Tensor) -> tuple[torch.Tensor, Scores]:
        rewards, times = score_policy_images(self._scorer, self._names, images, prompts)
        self._on_times(times)
        score = torch.empty(len(prompts))
        for weights, rows in group_indices(prompt_weights(prompt, self._weights) for prompt in prompts):
            score[rows] = weighted_sum({name: rewards[name][rows] for name in weights}, weights)
        return score, rewards


def score_policy_images(
    scorer: Scorer,
    names: Sequence[str],
    images: torch.Tensor,
    prompts: Sequence[PromptItem],
    always: Sequence[str] = (),
) -> tuple[Scores, RewardTimes]:
    """Rewards of a policy's images, one for each prompt, and their times; NaN where a prompt does not have a reward.

    `names` are rewards of prompts that name none, and `always` of all prompts. Raises the errors of `Scorer.score`, and
    a FloatingPointError for images that are not finite.
    """
    reward_names = [tuple(dict.fromkeys((*rewards_to_score(prompt, names), *always))) for prompt in prompts]
    scores = {name: torch.full((len(prompts),), torch.nan) for name in dict.fromkeys(chain(names, *reward_names))}
    times = []
    try:
        for rewards, rows in group_indices(reward_names):
            chosen = images if len(rows) == len(prompts) else images[rows]
            part, spent = scorer.score(rewards, chosen, [prompts[row] for row in rows])
            times.append(spent)
            for name, values in part.items():
                scores[name][rows] = values
    except NonFiniteImagesError as error:
        raise FloatingPointError(
            "the policy generates images that are not finite, so the run stops before they are scored. Lower "
            "optimizer.learning_rate; `--resume` continues from the last checkpoint"
        ) from error
    return scores, sum_times(times)
