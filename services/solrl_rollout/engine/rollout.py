"""An accepted request, which yields its groups as they finish, or the whole answer."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping

from solrl_engine.scorer import sum_times
from solrl_proto.rollouts import (
    EndLine,
    RewardTime,
    RolloutAnswer,
    RolloutGroup,
    RolloutRequest,
    RolloutTimings,
    Served,
)

from solrl_rollout.engine.engine import Engine
from solrl_rollout.engine.scored_group import group_of
from solrl_rollout.engine.work import Chunk, Job, cut_into_chunks, release


class RolloutHandle:
    """The work of one request. Its owner must close it, which cancels unfinished work."""

    def __init__(self, request: RolloutRequest, job: Job, served: Served, engine: Engine) -> None:
        """Queue the request's chunks.

        Raises:
            ProblemError: 429 `queue-full`, 503 `engine-dead`.
        """
        self._request = request
        self._job = job
        self.served = served
        self._engine = engine
        self._submitted_at = time.monotonic()
        self._started_at: float | None = None
        self._seconds = dict.fromkeys(("switch", "generate", "reward"), 0.0)
        self._times: Mapping[str, RewardTime] = {}
        self._chunks = cut_into_chunks(request, job)
        self._tasks: list[asyncio.Task[RolloutGroup]] = []
        engine.scheduler.submit([chunk for chunks in self._chunks for chunk in chunks])

    async def groups(self) -> AsyncIterator[RolloutGroup]:
        """Yield each group as soon as it is finished.

        Raises:
            ProblemError: of the first group that fails.
        """
        self._tasks = [asyncio.create_task(self._finish_group(chunks)) for chunks in self._chunks]
        for finished in asyncio.as_completed(self._tasks):
            yield await finished

    async def answer(self) -> RolloutAnswer:
        """All groups, in the order of the prompts. Raises the ProblemError of the first group that fails."""
        groups = {group.prompt_id: group async for group in self.groups()}
        ordered = tuple(groups[prompt.id] for prompt in self._request.prompts)
        return RolloutAnswer(**dict(self.served), groups=ordered, seconds=self._timings())

    def end(self) -> EndLine:
        """The line that closes a stream of all groups."""
        return EndLine(groups=len(self._chunks), seconds=self._timings())

    async def close(self) -> None:
        """Cancel unfinished work. Harmless after the end."""
        self._engine.cancel(self._job)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        release(self._job.adapter)

    async def _finish_group(self, chunks: list[Chunk]) -> RolloutGroup:
        """Wait for a prompt's chunks, and build its part of the answer."""
        scored = await asyncio.gather(*(asyncio.wrap_future(chunk.result) for chunk in chunks))
        self._times = sum_times([self._times, *(chunk.times for chunk in scored)])
        for chunk in scored:
            self._started_at = chunk.started_at if self._started_at is None else min(self._started_at, chunk.started_at)
            for phase in self._seconds:
                self._seconds[phase] += getattr(chunk, phase)
        # In a thread, since it compresses images.
        return await asyncio.to_thread(group_of, self._request, chunks, scored)

    def _timings(self) -> RolloutTimings:
        started_at = self._submitted_at if self._started_at is None else self._started_at
        return RolloutTimings(queued=started_at - self._submitted_at, **self._seconds, rewards=dict(self._times))
