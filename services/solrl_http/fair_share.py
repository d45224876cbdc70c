"""Fair shares of work, by cost, among keys that come and go: tenants, or the runs of one tenant.

Not thread-safe: its owner holds a lock.
"""

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class FairShare(Generic[Key]):
    """Cost spent per key. The waiting key that has spent the least is next.

    A key that returns keeps its debt, but gains no credit for its absence. A key that arrives without debt is a
    new flow, as in FQ-CoDel (RFC 8290), which may be served first.
    """

    def __init__(self) -> None:
        self._spent: dict[Key, float] = {}
        self._new_flows: dict[Key, None] = {}
        self._clock = 0.0

    def __contains__(self, key: Key) -> bool:
        """Whether a key waits or has debt."""
        return key in self._spent

    def arrive(self, key: Key, waiting: Collection[Key]) -> None:
        """Register a key that begins to wait; `waiting` are the other waiting keys."""
        floor = min((self._spent[key] for key in waiting), default=self._clock)
        # A floor is negative if lost work was put back after its cost was forgotten.
        debt = self._spent.get(key, floor)
        if debt <= floor:
            self._new_flows[key] = None
        self._spent[key] = max(debt, floor)

    def new_flow(self, waiting: Collection[Key], among: Collection[Key]) -> Key | None:
        """The new flow `among` these waiting keys that has waited longest, or None; it remains one until `admit`."""
        for key in [key for key in self._new_flows if key not in waiting]:
            del self._new_flows[key]
        return next((key for key in self._new_flows if key in among), None)

    def admit(self, key: Key) -> None:
        """Record that a key is being served; it is no longer a new flow."""
        self._new_flows.pop(key, None)

    def least_served(self, waiting: Collection[Key], last: Key | None, surplus: float = 0.0) -> Key:
        """The waiting key that has spent the least; new flows come last.

        `last` wins ties, and against keys that have spent up to `surplus` less.
        """

        def order(key: Key) -> tuple[bool, float, bool]:
            bonus = surplus if key == last else 0.0
            return key in self._new_flows, self._spent[key] - bonus, key != last

        return min(waiting, key=order)

    def charge(self, key: Key, cost: float) -> None:
        """Add to a key's cost; does nothing for a key whose debt was forgotten."""
        if key in self._spent:
            self._spent[key] += cost

    def serve(self, key: Key, cost: float, waiting: Collection[Key]) -> None:
        """Charge a key for the item being served; `waiting` are the keys still waiting."""
        self._clock = self._spent[key]
        self._spent[key] += cost
        if waiting:
            # Forget absent keys without debt, so that the table stays bounded.
            self._spent = {k: spent for k, spent in self._spent.items() if k in waiting or spent > self._clock}
        else:
            # No key waits: forget old debts, but count the work just begun.
            self._spent, self._clock = {key: cost}, 0.0
