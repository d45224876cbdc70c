"""An exploration that goes on in a thread of its own while its groups are used, or the iteration before is trained."""

import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from solrl_proto.rollouts import RolloutAnswer, RolloutGroup


class Exploration:
    """Begins at once; its groups are had as they come, and then `answer`, which holds them all.

    `seconds` is then how long it took, whether or not anybody waited.
    """

    answer: RolloutAnswer
    seconds: float

    def __init__(self, explore: Callable[..., RolloutAnswer]) -> None:
        """`explore` calls its argument `on_group` with each group, and returns the whole."""
        self._explore = explore
        self._came: SimpleQueue[RolloutGroup | RolloutAnswer | BaseException] = SimpleQueue()
        # A daemon, so that a run that fails does not wait for candidates that nobody wants.
        threading.Thread(target=self._run, name="solrl-explore", daemon=True).start()

    def groups(self) -> Iterator[RolloutGroup]:
        """Each group as it comes; raises what the exploration raised."""
        while True:
            came = self._came.get()
            if isinstance(came, RolloutGroup):
                yield came
            elif isinstance(came, RolloutAnswer):
                self.answer = came
                return
            else:
                raise came

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            answer = self._explore(on_group=self._came.put)
            self.seconds = time.perf_counter() - started
            self._came.put(answer)
        except BaseException as error:
            self._came.put(error)
