"""Comparison of a rollout service's answers with the requests.

A service's scores select the training samples. So an answer that was served otherwise than asked, by a service that was
started again or by another replica, is refused before a group is used.
"""

import math
from collections.abc import Mapping
from typing import Any

from solrl_proto.adapters import AdapterInfo, adapter_digest
from solrl_proto.identifiers import Precision
from solrl_proto.models import Numerics
from solrl_proto.printable import printable_value
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.rollouts import Plan, RolloutGroup, RolloutRequest, Served

_LINE_BYTES = 2**17
_CANDIDATE_BYTES = 2**10
_IMAGE_BYTES = {"none": 0, "png": 2**25, "webp": 2**28}
_SUM_ROUNDING, _SUM_FLOOR = 1e-5, 1e-30
"""Tolerances of a sum, because a service adds in float32: a share of the summands' magnitudes, and a floor near 0."""


def longest_line(request: RolloutRequest) -> int:
    """Upper bound in bytes for a line of the answer: generous for the plan, numbers, texts and images."""
    explicit, count = request.candidates.seeds, request.candidates.count
    candidates = max(map(len, explicit)) if explicit is not None else count or 0
    candidate_bytes = _CANDIDATE_BYTES + _IMAGE_BYTES[request.images]
    return _LINE_BYTES + len(request.plan.model_dump_json()) + candidates * candidate_bytes


class AnswerCheck:
    """Checks the parts of one answer against its request.

    Attributes:
        served: the `Served` that `start` checked last; None before its first call.
    """

    def __init__(
        self,
        request: RolloutRequest,
        url: str,
        fingerprint: str | None = None,
        numerics: Mapping[Precision, Numerics] | None = None,
    ) -> None:
        """For the arguments, see `RolloutClient.rollouts`; `url` is for messages."""
        self._request = request
        self._url = url
        self._fingerprint = fingerprint
        self._numerics = numerics
        self._seeds = {prompt.id: tuple(seeds) for prompt, seeds in request.groups()}
        self.served: Served | None = None

    def start(self, served: Served) -> None:
        """Check what serves the next groups against the request, and against what served the groups before.

        Raises:
            ProblemError: 409 `served-differently`, naming the field; 422 `digest-mismatch`, for another fingerprint.
        """
        request = self._request
        self._require("served.model", served.model, request.model)
        self._require("served.adapter", _plain(served.adapter), _plain(request.adapter))
        for field in Plan.model_fields:
            self._require(
                f"served.plan.{field}", *(_plain(getattr(plan, field)) for plan in (served.plan, request.plan))
            )
        if request.plan.precision != "auto":
            self._require("served.precision", served.precision, request.plan.precision)
        if self._numerics is not None:
            self._require("served.numerics", served.numerics, self._numerics.get(served.precision, "not supported"))
        if self._fingerprint is not None and served.fingerprint != self._fingerprint:
            raise ProblemError(
                ProblemKind.DIGEST_MISMATCH,
                f"the service at {self._url} no longer serves the model that it served at the start",
                where="served.fingerprint",
                got=served.fingerprint,
                expected=self._fingerprint,
                action="start it with the same model, revision and rewards as before, then resume",
            )
        if self.served is not None and served != self.served:
            raise ProblemError(
                ProblemKind.SERVED_DIFFERENTLY,
                f"the service at {self._url} serves the groups of one answer differently",
                where="served",
                got=served.model_dump(mode="json"),
                expected=self.served.model_dump(mode="json"),
                action="it was restarted with other settings, or replicas differ: use equal settings, then resume",
            )
        self.served = served

    def group(self, group: RolloutGroup) -> None:
        """Check a group's seeds and rewards against the request, and its scores against the weighted sums.

        Raises:
            ProblemError: 409 `served-differently`, naming the field.
        """
        name = f"group {group.prompt_id!r}: "
        self._require(name + "seeds", group.seeds, self._seeds[group.prompt_id])
        self._require(name + "rewards", sorted(group.rewards), sorted(spec.name for spec in self._request.rewards))
        for label, values in {"scores": group.scores, **group.rewards}.items():
            self._require(f"{name}{label}: number of values", len(values), len(group.seeds))
        for place, score in enumerate(group.scores):
            parts = [spec.weight * group.rewards[spec.name][place] for spec in self._request.rewards]
            total = math.fsum(parts)
            if not abs(score - total) <= _SUM_ROUNDING * math.fsum(map(abs, parts)) + _SUM_FLOOR:
                self._require(f"{name}scores[{place}]", score, f"{total}, the weighted sum of the candidate's rewards")

    def _require(self, where: str, got: Any, expected: Any) -> None:
        if got != expected:
            raise served_differently(self._url, where, got, expected)


def check_pushed(url: str, stored: AdapterInfo, *, run: str, version: int, model: str, body: bytes) -> None:
    """Compare a service's record of a push with the pushed file. An earlier push of the file may have another parent.

    Raises:
        ProblemError: 409 `served-differently`, naming the field.
    """
    sent: Mapping[str, Any] = {"run": run, "version": version, "model": model, "digest": adapter_digest(body)}
    for field, expected in sent.items():
        if (got := getattr(stored, field)) != expected:
            raise served_differently(url, field, got, expected)


def served_differently(url: str, where: str, got: Any, expected: Any) -> ProblemError:
    """The 409 for an answer that does not match its request."""
    return ProblemError(
        ProblemKind.SERVED_DIFFERENTLY,
        f"the service at {url} gave an answer that does not match the request",
        where=where,
        got=printable_value(got),
        expected=printable_value(expected),
        action="check the service's version, and any proxy or cache between",
    )


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value
