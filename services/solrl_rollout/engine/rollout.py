"""An accepted request on its way through the engine: its groups as they are finished, then what they took."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from solrl_proto.rollouts import EndLine, RolloutAnswer, RolloutGroup, RolloutRequest, RolloutTimings, Served

from solrl_rollout.engine.engine import Engine
from solrl_rollout.engine.groups import Group
from solrl_rollout.engine.work import Chunk, Job, Scored, split


class Rollout:
    """One request's work. Whoever holds it closes it: what is not made by then is not made any more."""

    def __init__(self, request: RolloutRequest, job: Job, served: Served, engine: Engine) -> None:
        """Queue the request's chunks.

        Raises:
            ProblemError: 429 `queue-full`, 503 `engine-dead`.
        """
        self._request = request
        self._job = job
        self.served = served
        self._engine = engine
        self._asked = self._begun = time.monotonic()
        self._took = dict.fromkeys(("switch", "generate", "reward"), 0.0)
        self._split = split(request, job)
        self._tasks: list[asyncio.Task[RolloutGroup]] = []
        engine.submit([chunk for chunks in self._split for chunk in chunks])

    async def groups(self) -> AsyncIterator[RolloutGroup]:
        """Each group as it is finished.

        Raises:
            ProblemError: of the first group that fails; 422, 500, 503.
        """
        self._tasks = [asyncio.create_task(self._finish(chunks)) for chunks in self._split]
        for finished in asyncio.as_completed(self._tasks):
            yield await finished

    async def answer(self) -> RolloutAnswer:
        """All groups, in the order of the prompts. Raises as `groups` does."""
        made = {group.prompt_id: group async for group in self.groups()}
        ordered = tuple(made[prompt.id] for prompt in self._request.prompts)
        return RolloutAnswer(**dict(self.served), groups=ordered, seconds=self._seconds())

    def end(self) -> EndLine:
        """What closes a stream of all groups."""
        return EndLine(groups=len(self._split), seconds=self._seconds())

    async def close(self) -> None:
        """Free what waits and stop what runs. Harmless after the end."""
        self._engine.cancel(self._job)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _finish(self, chunks: list[Chunk]) -> RolloutGroup:
        done = await self._made(chunks)
        group = Group(self._request, chunks, done, done)
        if self._request.plan.prune is not None:
            # In a thread, since whole latents are copied there.
            places, chosen = await asyncio.to_thread(group.survivors, self._request.plan.prune.keep)
            self._engine.submit(chosen, admitted=True)
            group = group.pruned(places, await self._made(chosen))
        # In a thread, since images are compressed there.
        return await asyncio.to_thread(group.answer)

    async def _made(self, chunks: Sequence[Chunk]) -> list[Scored]:
        done = await asyncio.gather(*(asyncio.wrap_future(chunk.done) for chunk in chunks))
        for one in done:
            self._begun = one.started if self._begun == self._asked else min(self._begun, one.started)
            for what in self._took:
                self._took[what] += getattr(one, what)
        return done

    def _seconds(self) -> RolloutTimings:
        return RolloutTimings(queued=self._begun - self._asked, **self._took)
