"""Rewards that runs bring: computed by servers of their own, which the operator allows by address."""

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from solrl_client.addresses import origin
from solrl_core.errors import RewardUnavailableError
from solrl_core.rewards.base import Reward
from solrl_proto.rollouts import RewardSpec
from solrl_remote.remote_reward import RemoteReward

from solrl_rollout.engine.problems import reward_server_refused
from solrl_rollout.engine.work import ExternalReward

MOST_CONNECTED = 64
"""Connected rewards of runs that a worker keeps for each model."""
TIMEOUT = 20.0
"""Seconds within which a server must answer about a chunk's images."""
_NOT_LISTED = "this service asks only the reward servers that its operator has listed"
_NONE_LISTED = "this service asks no reward servers that a run brings"


class ExternalRewards:
    """Connected rewards of runs, of which the least recently used are forgotten. Any thread may call its methods."""

    def __init__(self, most: int = MOST_CONNECTED) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._connected: OrderedDict[tuple[str, ExternalReward], Reward] = OrderedDict()

    @contextmanager
    def connected(self, wanted: Mapping[str, ExternalReward]) -> Iterator[dict[str, Reward]]:
        """The rewards by name, connected if they are not yet; those of a server that fails within are forgotten.

        Raises:
            RewardUnavailableError: a server gives no usable answer, or does not compute its reward.
        """
        try:
            yield {name: self._find(name, reward) for name, reward in wanted.items()}
        except RewardUnavailableError:
            # A server that was started again may announce another digest.
            with self._lock:
                for key in wanted.items():
                    self._connected.pop(key, None)
            raise

    def _find(self, name: str, wanted: ExternalReward) -> Reward:
        with self._lock:
            if (name, wanted) in self._connected:
                self._connected.move_to_end((name, wanted))
                return self._connected[name, wanted]
        reward = _connect(name, wanted)
        with self._lock:
            self._connected[name, wanted] = reward
            while len(self._connected) > self._most:
                self._connected.popitem(last=False)
        return reward


def _connect(name: str, wanted: ExternalReward) -> Reward:
    # Without the service's token: the server is a stranger's.
    try:
        return RemoteReward(name, wanted.at, timeout=TIMEOUT, digest=wanted.digest, send_token=False)
    except ValueError as error:
        raise RewardUnavailableError(name, f"cannot be used: {error}") from error


def external_rewards_of(rewards: Sequence[RewardSpec], hosts: Collection[str]) -> dict[str, ExternalReward]:
    """The rewards of a request that the run brings, by name, with their addresses as the operator lists them.

    Args:
        rewards: rewards of the request.
        hosts: the only addresses allowed, each as `origin` spells it.

    Raises:
        ProblemError: 422 `reward-unknown` for any other address.
    """
    return {
        reward.name: ExternalReward(_allowed(reward.at, hosts, f"body.rewards.{i}.at"), reward.digest)
        for i, reward in enumerate(rewards)
        if reward.at is not None
    }


def _allowed(at: str, hosts: Collection[str], where: str) -> str:
    try:
        found = origin(at, "address of a reward server")
    except ValueError as error:
        raise reward_server_refused(str(error), where, hosts) from None
    if found not in hosts:
        raise reward_server_refused(_NOT_LISTED if hosts else _NONE_LISTED, where, hosts, got=found)
    return found


def digests_with(digests: Mapping[str, str], rewards: Mapping[str, ExternalReward]) -> dict[str, str]:
    """Digests of a model's parts and rewards, with those of the run's rewards as far as the request says them."""
    brought = {f"reward:{name}": reward.digest for name, reward in rewards.items()}
    return {part: digest for part, digest in {**digests, **brought}.items() if digest is not None}
