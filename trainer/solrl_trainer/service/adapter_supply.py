"""Supply of a rollout service with the adapter versions of a run."""

import logging
import threading
from collections.abc import Collection, Mapping, Sequence

from solrl_client.retries import OnWait, ignore
from solrl_client.rollouts import RolloutClient
from solrl_proto.adapters import AdapterList, adapter_digest
from solrl_proto.problems import Problem, ProblemError, ProblemKind

from solrl_trainer.service.requirements import run_taken

logger = logging.getLogger(__name__)

LOST = (ProblemKind.RUN_NOT_FOUND, ProblemKind.VERSION_NOT_FOUND)
"""Problem kinds that mean that the service has lost versions of a run."""


class AdapterSupply:
    """Keeps the service supplied with the adapter versions that a run needs.

    Versions that the service loses are pushed again: it may restart, or its Redis may recover an older version.
    """

    def __init__(self, client: RolloutClient, *, run: str, model: str, lag: int, on_wait: OnWait = ignore) -> None:
        """`lag`: number of versions that exploration is behind the newest. `on_wait`: told of a loss' end, too."""
        self._client, self._on_wait = client, on_wait
        self._run, self._model, self._lag = run, model, lag
        self._adapters: dict[int, bytes] = {}
        self._lock = threading.RLock()

    def start(self, adapters: Mapping[int, bytes], pushed: Collection[str] = ()) -> None:
        """Make sure that the service has these versions of the run, the last as its head.

        Later versions at the service are deleted, if this run pushed them before it was interrupted: `pushed` are the
        digests of all that it has. If the service no longer has these versions, the whole run is deleted and pushed
        again. If it has another run with this name, the ProblemError is 409 `run-taken`.
        """
        self._adapters = dict(adapters)
        last = max(adapters)
        adapter_list = self._client.adapters(self._run)
        if adapter_list is not None and adapter_list.head > last:
            if not all(info.digest in pushed for info in adapter_list.versions if info.version > last):
                raise run_taken(self._client.url, self._run, adapter_list.head)
            self._rewind(adapter_list, last)
        self._push_missing()

    def push(self, version: int, adapter: bytes) -> None:
        """Push a new version on top of the newest."""
        with self._lock:
            parent = max(self._adapters, default=None)
            self._adapters[version] = adapter
            for old in sorted(self._adapters)[: -(self._lag + 2)]:
                del self._adapters[old]
            try:
                self._client.push(self._run, version, parent, self._model, adapter)
            except ProblemError as error:
                if not self.restore(error.problem):
                    raise

    def restore(self, problem: Problem) -> bool:
        """Push versions again that, according to `problem`, the service has lost; return whether to ask again.

        A request is repeated if the service has all versions again, by this call or by one of another request.
        """
        if problem.kind not in (*LOST, ProblemKind.PARENT_CONFLICT):
            return False
        with self._lock:
            pushed = self._push_missing()
        if pushed:
            logger.info("the service had lost this run's %s; pushed again", _versions(pushed))
            self._on_wait(self._client.url, None)
        return bool(pushed) or problem.kind in LOST

    def _rewind(self, adapter_list: AdapterList, version: int) -> None:
        """Make `version` the head again, or delete the run if the service lacks a required version."""
        stored = {info.version: info.digest for info in adapter_list.versions}
        if all(stored.get(version) == adapter_digest(adapter) for version, adapter in self._adapters.items()):
            try:
                self._client.rewind(self._run, version, adapter_list.head)
            except ProblemError as error:
                if error.problem.kind not in LOST:
                    raise
            else:
                head = adapter_list.head
                logger.info("the service went back to version %d of this run; its head was %d", version, head)
                return
        self._client.delete(self._run)
        logger.info("the service no longer has all versions up to %d; all of this run's are pushed again", version)

    def _push_missing(self) -> list[int]:
        """Push all known versions beyond the service's head, and return them; 409 `run-taken`."""
        adapter_list = self._client.adapters(self._run)
        stored = {info.version: info.digest for info in adapter_list.versions} if adapter_list else {}
        for version, adapter in self._adapters.items():
            if adapter_list is not None and stored.get(version, adapter_digest(adapter)) != adapter_digest(adapter):
                raise run_taken(self._client.url, self._run, adapter_list.head)
        head = adapter_list.head if adapter_list else None
        missing = sorted(version for version in self._adapters if head is None or version > head)
        for version in missing:
            self._client.push(self._run, version, head, self._model, self._adapters[version])
            head = version
        return missing


def _versions(versions: Sequence[int]) -> str:
    *earlier, last = map(str, versions)
    return f"versions {', '.join(earlier)} and {last}" if earlier else f"version {last}"
