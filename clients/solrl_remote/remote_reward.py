"""A reward that a server computes, with the interface of one in this process."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import httpx
import torch
from solrl_client.addresses import check_url
from solrl_client.background import result_of
from solrl_client.retries import OnWait, ignore
from solrl_client.transport import Document, RefusedError, read_document
from solrl_core.errors import RewardError
from solrl_core.rewards.images import as_uint8
from solrl_core.rewards.loading import batches
from solrl_core.rewards.wire import encode_scoring
from solrl_core.suggestions import did_you_mean
from solrl_proto.printable import printable
from solrl_proto.problems import ProblemKind
from solrl_proto.scores import (
    MAX_CHECKED_PROMPTS,
    SCORES_MEDIA_TYPE,
    PromptCheck,
    PromptVerdict,
    RewardInfo,
    RewardList,
    ScoreAnswer,
    ScorePrompt,
    ScoreRequest,
)

from solrl_remote.http_reward import HttpReward

TOKEN = "SOLRL_REWARD_TOKEN"
"""Variable of the environment with the bearer token for reward servers; `TOKEN_PATH`'s file has it, too."""

TIMEOUT = 20.0
"""Seconds for a server's answer, apart from the seconds that its reward waits for another service."""

_MAX_DOCUMENT = 2**16
"""Bytes of an answer: 256 scores take 7 kB, a list of 100 rewards 25 kB, a verdict 25 kB. One of megabytes takes
gigabytes once it is parsed."""
_NOT_ASKED = {404, 405}
"""Statuses of a server that cannot check prompts."""
_TEMPORARY = {408, 429, 502, 503, 504}

logger = logging.getLogger(__name__)


class NotServedError(ValueError):
    """A reward server does not compute the reward that was asked for."""


def connect_reward(
    name: str, options: Mapping[str, Any], *, patience: float = 0.0, on_wait: OnWait = ignore
) -> "RemoteReward":
    """Connect to the server of a reward; `options` are `at`, and optionally `timeout` and `batch_size`.

    Raises:
        ValueError: the options are invalid, or the server has no such reward.
        RewardUnavailableError: the server does not answer.
    """
    try:
        reward = RemoteReward(name, **{"patience": patience, "on_wait": on_wait, **options})
    except TypeError as error:
        raise ValueError(
            f"got options {sorted(options)} for reward {name!r} of a server; expected at, timeout and batch_size: "
            "its other options are given to the server"
        ) from error
    if reward.advice:
        logger.warning("reward %s: %s", name, reward.advice)
    return reward


class RemoteReward(HttpReward):
    """Scores images at a reward server. They are sent as 8-bit images, rounded to nearest.

    An answer is used only if it is complete, finite and of the digest that the server announced at first.

    Args:
        name: the reward's name at the server.
        at: address of the server.
        timeout: most seconds of the server's answer; by default 20, plus the `max_latency_s` that the server announces
            for the reward.
        batch_size: most images in a request.
        patience: seconds to retry without an answer, or after a temporary error such as 503; for scores, also after
            an unusable answer.
        digest: digest that the reward must have; None asks the server for it.
        connect: False to ask nothing yet; then await `connect` before anything else.
        send_token: whether requests have this program's token for reward servers.
        on_wait: called at each pause before a retry.

    Attributes:
        digest: the reward's digest, as it was given or the server announced it.
        takes_clips: whether the server's reward scores clips as a whole.
        advice: what is wrong with a timeout that is shorter than the server's own; empty otherwise.

    Raises:
        ValueError: an option is invalid, or the server has no such reward.
        RewardUnavailableError: the server does not answer.
    """

    def __init__(
        self,
        name: str,
        at: str,
        *,
        timeout: float | None = None,
        batch_size: int = 32,
        patience: float = 0.0,
        digest: str | None = None,
        connect: bool = True,
        send_token: bool = True,
        on_wait: OnWait = ignore,
    ) -> None:
        if timeout is not None and not timeout > 0:
            raise ValueError(f"got timeout {timeout} for reward {name!r}; expected seconds above 0")
        batches(0, batch_size)
        at = check_url(at, f"address of reward {name!r}", TOKEN)
        token = TOKEN if send_token else None
        super().__init__(name, at, token, timeout or TIMEOUT, patience, on_wait=on_wait)
        self._batch_size = batch_size
        self._source = "as the request says" if digest else "as when this program connected"
        self._given_timeout = timeout
        self.digest = digest
        self.advice = ""
        self.takes_clips = False
        if connect:
            result_of(self.connect())

    async def connect(self, *, clips: bool = False) -> None:
        """Ask the server for digest and time limit unless the digest was given, and whether it takes clips.

        Args:
            clips: whether to ask a server whose digest was given, too, because there are clips to score.

        Raises:
            ValueError: the server has no such reward.
            RewardUnavailableError: the server does not answer.
        """
        if self.digest is not None and not clips:
            return
        announced = await self._announced()
        self.takes_clips = announced.takes_clips
        if self.digest is not None:
            return
        self.digest, waits = announced.digest, announced.max_latency_s or 0.0
        self.timeout = self._given_timeout or TIMEOUT + waits
        if self.timeout < waits:
            self.advice = (
                f"timeout is {self.timeout:g} s, and the server at {self.at} may wait {waits:g} s for another service: "
                "raise or omit the option timeout, or lower the timeouts of the server's reward"
            )

    async def ask(
        self, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> torch.Tensor:
        frames = 1 if images.ndim == 4 else images.shape[1]
        rows = batches(len(images), max(1, self._batch_size // frames))
        scores = [await self._scores(images[r], prompts[r], metadata[r]) for r in rows]
        return torch.cat(scores) if scores else torch.zeros(0)

    def first_fault(self, prompts: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
        """Why the reward cannot judge one of the (text, metadata) pairs; None if it can judge all.

        Also None for a server that cannot check prompts, such as a server in another language.

        Raises:
            RewardUnavailableError: the server gave no usable answer.
        """
        for rows in batches(len(prompts), MAX_CHECKED_PROMPTS):
            items = tuple(ScorePrompt(text=text, metadata=dict(metadata)) for text, metadata in prompts[rows])
            check = partial(self._check, PromptCheck(reward=self._name, prompts=items))
            if fault := result_of(self._patiently(check)):
                return printable(fault)
        return None

    async def _check(self, check: PromptCheck) -> str | None:
        body, headers = check.model_dump_json().encode(), {"Content-Type": "application/json"}
        answer = await self._answer("POST", "/v1/prompts", _MAX_DOCUMENT, content=body, headers=headers)
        if answer.status_code in _NOT_ASKED:
            return None
        return self._read(answer, PromptVerdict).fault

    async def _scores(
        self, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> torch.Tensor:
        items = tuple(ScorePrompt(text=t, metadata=dict(m)) for t, m in zip(prompts, metadata, strict=True))
        request = ScoreRequest(rewards=(self._name,), prompts=items)
        body = await asyncio.to_thread(lambda: encode_scoring(as_uint8(images), request))
        headers = {"Content-Type": SCORES_MEDIA_TYPE}

        async def attempt() -> torch.Tensor:
            answer = await self._answer("POST", "/v1/scores", _MAX_DOCUMENT, content=body, headers=headers)
            return self._checked(self._read(answer, ScoreAnswer, connected=True), len(images))

        return await self._patiently(attempt)

    def _checked(self, answer: ScoreAnswer, count: int) -> torch.Tensor:
        """The scores of an answer; every score can be used."""
        digest = answer.digests.get(self._name)
        if digest != self.digest:
            raise self._temporary(
                f"has the digest {digest} now; expected {self.digest}, {self._source}: start it again, or the server "
                "with the same reward"
            )
        scores = torch.tensor(answer.scores.get(self._name, ()), dtype=torch.float32)
        if len(scores) != count:
            raise self._temporary(f"gave {len(scores)} scores for {count} images")
        bad = (~torch.isfinite(scores)).nonzero()
        if len(bad):
            raise self._temporary(f"gave {scores[int(bad[0])]} for image {int(bad[0])}")
        return scores

    async def _announced(self) -> RewardInfo:
        rewards = {reward.name: reward for reward in (await self._patiently(self._listed)).rewards}
        if self._name not in rewards:
            raise NotServedError(
                f"the server at {self.at} does not compute reward {self._name!r}{did_you_mean(self._name, rewards)}; "
                f"expected one of {sorted(rewards)}, or a server started with --rewards {self._name}"
            )
        return rewards[self._name]

    async def _listed(self) -> RewardList:
        return self._read(await self._answer("GET", "/v1/rewards", _MAX_DOCUMENT), RewardList)

    def _read(self, answer: httpx.Response, model: type[Document], *, connected: bool = False) -> Document:
        """The document of an answer.

        Once a reward is `connected`, an answer that cannot be used is a temporary fault: the server restarted with
        other settings, or another program answers at its address.
        """
        try:
            return read_document(answer, model, _MAX_DOCUMENT)
        except RefusedError as error:
            raise self._refused(error, connected) from None

    def _refused(self, error: RefusedError, connected: bool) -> RewardError:
        problem = error.problem
        if problem.kind == ProblemKind.REWARD_FAILED and problem.status not in _TEMPORARY:
            return RewardError(self._name, f"failed at {self.at}: {problem.detail}")
        if problem.kind == ProblemKind.INVALID_REQUEST:  # of this request, whenever it is sent
            return RewardError(self._name, f"was refused by {self.at}: {problem}")
        advice = ""
        if problem.status in (401, 403) and self._sends_token:
            advice = f"; the token is in {TOKEN}, or in {TOKEN}_PATH's file"
        elif problem.status in (401, 403):
            advice = "; no token is sent to a server that a run brings, so start it without a token file"
        fault = f"answered {problem.status} ({problem.title}: {problem.detail}{advice})"
        if connected or problem.status in _TEMPORARY:
            return self._temporary(fault, error.retry_after)
        return self._unavailable(fault)
