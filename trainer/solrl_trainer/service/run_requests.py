"""Requests to a rollout service for the candidates of one run."""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from solrl_client.answers import served_differently
from solrl_client.rollouts import RolloutClient, rollout_request
from solrl_core.families import Backbone
from solrl_core.fingerprint import fingerprint
from solrl_core.image_files import for_showing, from_file
from solrl_engine.scorer import sum_times
from solrl_proto.models import ModelInfo
from solrl_proto.problems import Problem
from solrl_proto.rollouts import (
    AdapterRef,
    Plan,
    PromptItem,
    RewardSpec,
    RolloutAnswer,
    RolloutGroup,
    RolloutTimings,
)

from solrl_trainer.prompts.prompt_rewards import group_indices, prompt_overrides, rewards_to_score
from solrl_trainer.service.requirements import reward_specs
from solrl_trainer.settings.config import RunConfig


@dataclass(frozen=True)
class RunRequests:
    """Asks a service for candidates of a run, always under an exact adapter version.

    Attributes:
        hosted: the model at the service, as it said at the start; None to accept any answer.
        digests: of model and rewards, loaded here.
        restore: removes the cause of a refusal, if it can; the request is then repeated.
        model: this device's, whose size the service's images must have; only `images_of` needs it.
    """

    config: RunConfig
    client: RolloutClient
    hosted: ModelInfo | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    restore: Callable[[Problem], bool] | None = None
    model: Backbone | None = None

    @property
    def url(self) -> str:
        return self.client.url

    def candidates_of(
        self,
        prompts: Sequence[PromptItem],
        version: int,
        seed_root: int,
        *,
        iteration: int,
        on_group: Callable[[RolloutGroup], None] = lambda group: None,
    ) -> RolloutAnswer:
        """Seeds and scores of each prompt's candidates under `version`, by the iteration's plan.

        `on_group` is called with each group as it arrives, from this thread. ProblemErrors: refused or unreachable; 422
        `digest-mismatch`, the service now serves another model; 409 `served-differently`, the answer does not match.
        """
        candidates = {"count": self.config.explore.candidates, "seed_root": seed_root}
        plan = self.config.exploration_plan(iteration)
        return self._answer(prompts, version, candidates, plan, on_group)

    def images_of(
        self, prompts: Sequence[PromptItem], seeds: Sequence[Sequence[int]], version: int, iteration: int
    ) -> tuple[torch.Tensor, float]:
        """Images `for_showing` of candidates explored for an iteration under `version`, float32 in [0, 1].

        Beside them, the seconds that the service spent. ProblemErrors: refused or unreachable; 409
        `served-differently`, an image is missing or not the model's.
        """
        assert self.model is not None
        plan, kind = self.config.exploration_plan(iteration), "png"
        requests: list[tuple[Sequence[PromptItem], Sequence[Sequence[int]]]] = [(prompts, seeds)]
        if self.model.frames > 1:  # an answer has room for few clips
            prompt_seeds, kind = zip(prompts, seeds, strict=True), "webp"
            requests = [([prompt], [row[i : i + 2]]) for prompt, row in prompt_seeds for i in range(0, len(row), 2)]
        answers = [self._answer(part, version, {"seeds": rows}, plan, images=kind) for part, rows in requests]
        groups = [group for answer in answers for group in answer.groups]
        size = self.model.height, self.model.width, self.model.frames
        images = torch.cat([for_showing(image[None]) for group in groups for image in self._images(group, size)])
        spent = [answer.seconds for answer in answers]
        return images, sum(timing.switch + timing.generate + timing.reward for timing in spent)

    def _images(self, group: RolloutGroup, size: tuple[int, int, int]) -> Iterator[torch.Tensor]:
        files, name = group.images or (), f"group {group.prompt_id!r}: images"
        if len(files) != len(group.seeds):
            raise served_differently(self.url, name, f"{len(files)} images", f"{len(group.seeds)}, one for each seed")
        for place, file in enumerate(files):
            try:
                yield from_file(base64.b64decode(file or ""), *size)
            except ValueError as error:  # of base64, too
                got = str(error).removeprefix("got ")
                raise served_differently(self.url, f"{name}[{place}]", got, "an image of the model") from error

    def _rewards_of(self, prompt: PromptItem) -> tuple[tuple[RewardSpec, ...], str | None]:
        """The rewards as a request names them, and the fingerprint that its answer must have; None to accept any."""
        rewards = self.config.trained
        if (overrides := prompt_overrides(prompt)) is not None:
            names = rewards_to_score(prompt, [spec.name for spec in rewards])
            rewards = tuple(RewardSpec(name=name, weight=overrides[name]) for name in names)
        if self.hosted is None:
            return rewards, None
        rewards = reward_specs(rewards, self.config, self.hosted, self.digests)
        return rewards, fingerprint(self.digests, [spec.name for spec in rewards])

    def _answer(
        self,
        prompts: Sequence[PromptItem],
        version: int,
        candidates: Mapping[str, Any],
        plan: Plan,
        on_group: Callable[[RolloutGroup], None] = lambda group: None,
        **options: Any,
    ) -> RolloutAnswer:
        """The answer of one request, or of one for each set of rewards, joined."""
        numerics = {info.precision: info.numerics for info in self.hosted.precisions} if self.hosted else None
        answers, placed = list[RolloutAnswer](), list[tuple[int, RolloutGroup]]()
        for (rewards, expected), rows in group_indices(map(self._rewards_of, prompts)):
            seeds = {"seeds": [candidates["seeds"][row] for row in rows]} if "seeds" in candidates else {}
            request = rollout_request(
                model=self.config.model_name,
                adapter=AdapterRef(run=self.config.run, version=version),
                prompts=tuple(prompts[row] for row in rows),
                candidates={**candidates, **seeds},
                plan=plan,
                rewards=rewards,
                **options,
            )
            answer = self.client.rollouts(
                request, fingerprint=expected, numerics=numerics, on_group=on_group, restore=self.restore
            )
            answers.append(answer)
            placed += zip(rows, answer.groups, strict=True)
        return answers[0] if len(answers) == 1 else _joined(answers, placed)


def _joined(answers: Sequence[RolloutAnswer], placed: Sequence[tuple[int, RolloutGroup]]) -> RolloutAnswer:
    """One answer with these groups, in the order of their places, and the seconds of all."""
    groups = [group for _, group in sorted(placed, key=lambda pair: pair[0])]
    seconds = [answer.seconds for answer in answers]
    sums = {name: sum(getattr(span, name) for span in seconds) for name in ("queued", "switch", "generate", "reward")}
    total = RolloutTimings(**sums, rewards=sum_times(span.rewards for span in seconds))
    return answers[0].model_copy(update={"groups": tuple(groups), "seconds": total})
