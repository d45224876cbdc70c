"""Exploration over HTTP, and selection from what it found."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from solrl_core.adapter import adapter_digest
from solrl_proto.adapters import AdapterList
from solrl_proto.problems import Problem, ProblemError, ProblemKind
from solrl_proto.rollouts import (
    AdapterRef,
    Candidates,
    Plan,
    PromptItem,
    RolloutAnswer,
    RolloutGroup,
    RolloutRequest,
)

from solrl_trainer.client import RolloutClient
from solrl_trainer.config import RunConfig
from solrl_trainer.selection import best_worst

_LOST = (ProblemKind.RUN_NOT_FOUND, ProblemKind.VERSION_NOT_FOUND)


@dataclass(frozen=True)
class Kept:
    """A prompt's kept seeds, best half first, with the proxy rewards that chose them."""

    prompt: PromptItem
    seeds: list[int]
    proxy: torch.Tensor


class Explorer:
    """Asks the service for candidates under exact adapter versions, and keeps it supplied with them.

    What the service loses (it restarts, its Redis comes back a version behind) is pushed again.
    """

    def __init__(
        self,
        client: RolloutClient,
        config: RunConfig,
        fingerprint: str | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`fingerprint`: what the service's answers must carry."""
        self._client = client
        self._config = config
        self._fingerprint = fingerprint
        self._note = note
        self._adapters: dict[int, bytes] = {}
        self._lock = threading.RLock()

    def start(self, adapters: Mapping[int, bytes], own: Collection[str] = ()) -> None:
        """Make the service hold these versions of the run, the last as its head.

        Later versions that it holds are deleted if this run pushed them before it broke off; the whole run, if it
        does not hold these any more.

        Args:
            adapters: by version.
            own: digests of all that this run pushed before.

        Raises:
            ProblemError: 409 `run-taken`: it holds another run of this name.
        """
        self._adapters = dict(adapters)
        last = max(adapters)
        held = self._client.adapters(self._config.run)
        if held is not None and held.head > last:
            if not all(info.digest in own for info in held.versions if info.version > last):
                raise self._taken(held)
            self._go_back(held, last)
        self._supply()

    def push(self, version: int, adapter: bytes) -> None:
        """Hand the behaviour policy of `version` to the service."""
        config = self._config
        with self._lock:
            parent = max(self._adapters, default=None)
            self._adapters[version] = adapter
            for old in sorted(self._adapters)[: -(config.explore.lag + 2)]:
                del self._adapters[old]
            try:
                self._client.push(config.run, version, parent, config.model_name, adapter)
            except ProblemError as error:
                if not self._mend(error.problem):
                    raise

    def explore(
        self,
        prompts: Sequence[PromptItem],
        version: int,
        seed_root: int,
        *,
        whole: bool = False,
        on_group: Callable[[RolloutGroup], None] = lambda group: None,
    ) -> RolloutAnswer:
        """Ask for `explore.candidates` of each prompt under `version`; `whole`: without pruning any.

        Raises:
            ProblemError: refused, unreachable, or 409 `digest-mismatch`: the service serves another model by now.
        """
        explore = self._config.explore
        request = RolloutRequest(
            model=self._config.model_name,
            adapter=AdapterRef(run=self._config.run, version=version),
            prompts=tuple(prompts),
            candidates=Candidates(count=explore.candidates, seed_root=seed_root),
            plan=plan(self._config, whole=whole),
            rewards=self._config.trained,
        )
        answer = self._client.rollouts(request, on_group=on_group, mend=self._mend)
        if self._fingerprint is not None and answer.fingerprint != self._fingerprint:
            raise ProblemError(
                ProblemKind.DIGEST_MISMATCH,
                f"the service at {self._client.url} does not serve the model any more that it served at the start",
                got=answer.fingerprint,
                expected=self._fingerprint,
                action="start it with the same model, revision and rewards as before, then resume",
            )
        return answer

    def _mend(self, problem: Problem) -> bool:
        """Push what the service lost; whether there was anything."""
        if problem.kind not in (*_LOST, ProblemKind.PARENT_CONFLICT):
            return False
        with self._lock:
            pushed = self._supply()
        if pushed:
            self._note(f"the service had lost this run's {_versions(pushed)}; pushed again")
        return bool(pushed)

    def _go_back(self, held: AdapterList, version: int) -> None:
        """Make `version` the head again, or delete the run where the service does not hold all that is needed."""
        run = self._config.run
        stored = {info.version: info.digest for info in held.versions}
        if all(stored.get(needed) == adapter_digest(adapter) for needed, adapter in self._adapters.items()):
            try:
                self._client.rewind(run, version, held.head)
            except ProblemError as error:
                if error.problem.kind not in _LOST:
                    raise
            else:
                self._note(f"the service took back this run's versions after {version}, up to {held.head}")
                return
        self._client.delete(run)
        self._note(f"the service had not kept what version {version} needs; this run's versions are pushed anew")

    def _supply(self) -> list[int]:
        """Push all known versions beyond the service's head, and return them.

        Raises:
            ProblemError: 409 `run-taken`.
        """
        run, model = self._config.run, self._config.model_name
        held = self._client.adapters(run)
        stored = {info.version: info.digest for info in held.versions} if held else {}
        for version, adapter in self._adapters.items():
            if held is not None and stored.get(version, adapter_digest(adapter)) != adapter_digest(adapter):
                raise self._taken(held)
        head = held.head if held else None
        missing = sorted(version for version in self._adapters if head is None or version > head)
        for version in missing:
            self._client.push(run, version, head, model, self._adapters[version])
            head = version
        return missing

    def _taken(self, held: AdapterList) -> ProblemError:
        run = self._config.run
        return ProblemError(
            ProblemKind.RUN_TAKEN,
            f"the service at {self._client.url} holds another run {run!r}, whose head is version {held.head}",
            where="run",
            got=run,
            action=f"choose another name (--set run=…), or delete that run (DELETE /v1/runs/{run})",
        )


def _versions(versions: Sequence[int]) -> str:
    named = " and ".join(map(str, versions))
    return f"version {named}" if len(versions) == 1 else f"versions {named}"


def plan(config: RunConfig, *, whole: bool = False) -> Plan:
    """How the service is to make the candidates; `whole`: without pruning any."""
    return Plan(
        steps=config.explore.steps,
        prune=None if whole else config.explore.prune,
        solver=config.solver,
        fitted=config.explore.fitted,
        guidance=config.guidance,
        precision=config.explore.precision,
    )


def keep(group: RolloutGroup, prompt: PromptItem, count: int) -> Kept:
    """Select the best and worst of a group."""
    made = [(seed, score) for seed, score in zip(group.seeds, group.scores, strict=True) if score is not None]
    chosen = [made[i] for i in best_worst([score for _, score in made], count)]
    return Kept(prompt, [seed for seed, _ in chosen], torch.tensor([score for _, score in chosen]))
