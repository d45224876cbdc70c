"""Rewards that runs bring: computed by servers of their own."""

from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from solrl_core.errors import RewardUnavailableError
from solrl_core.rewards.reward import Reward
from solrl_remote.remote_reward import RemoteReward

from solrl_rollout.engine.work import ExternalReward

MOST_CONNECTED = 64
"""Connected rewards of runs that a worker keeps for each model."""
TIMEOUT = 20.0
"""Most seconds of a server's answer about a chunk's images."""


class ExternalRewards:
    """Connected rewards of runs, on the background loop. The least recently used rewards are forgotten."""

    def __init__(self) -> None:
        self._connected: OrderedDict[tuple[str, ExternalReward], Reward] = OrderedDict()

    @asynccontextmanager
    async def connected(
        self, rewards: Mapping[str, ExternalReward], *, clips: bool = False
    ) -> AsyncIterator[dict[str, Reward]]:
        """The rewards by name, connected if they are not yet. If a server fails within, its rewards are forgotten.

        `clips`: whether they are to score clips.

        Raises:
            RewardUnavailableError: a server gives no usable answer, or does not compute its reward.
        """
        try:
            yield {name: await self._find(name, reward, clips) for name, reward in rewards.items()}
        except RewardUnavailableError:
            # A server that was started again may announce another digest.
            for key in rewards.items():
                self._connected.pop(key, None)
            raise

    async def _find(self, name: str, external: ExternalReward, clips: bool) -> Reward:
        if (name, external) in self._connected:
            self._connected.move_to_end((name, external))
            return self._connected[name, external]
        reward = self._connected[name, external] = await _connect(name, external, clips)
        while len(self._connected) > MOST_CONNECTED:
            self._connected.popitem(last=False)
        return reward


async def _connect(name: str, external: ExternalReward, clips: bool) -> Reward:
    # Without the service's token: the server is a stranger's.
    try:
        reward = RemoteReward(
            name, external.at, timeout=TIMEOUT, digest=external.digest, connect=False, send_token=False
        )
        await reward.connect(clips=clips)
    except ValueError as error:
        raise RewardUnavailableError(name, f"cannot be used: {error}") from error
    return reward


def digests_with(digests: Mapping[str, str], rewards: Mapping[str, ExternalReward]) -> dict[str, str]:
    """Digests of the model's parts and rewards, plus the digests that the request pins for external rewards."""
    brought = {f"reward:{name}": reward.digest for name, reward in rewards.items()}
    return {part: digest for part, digest in {**digests, **brought}.items() if digest is not None}
