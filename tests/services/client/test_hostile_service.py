"""The client with a service that gives wrong answers: no part of such an answer is used."""

import gzip
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from solrl_client.addresses import check_rollout_url
from solrl_client.retries import Wait
from solrl_client.rollouts import RolloutClient
from solrl_proto.identifiers import Precision
from solrl_proto.models import Numerics
from solrl_proto.problems import Problem, ProblemError
from solrl_proto.rollouts import RolloutGroup, RolloutRequest
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import ConfigError, resolve
from tests.support.service_helpers import rollout_request
from tests.trainer.hostile_service import DIGEST, Answer, HostileService, hostile_service

Line = dict[str, Any]


@pytest.fixture(scope="module")
def shared() -> Iterator[HostileService]:
    with hostile_service() as service:
        yield service


@pytest.fixture
def service(shared: HostileService) -> HostileService:
    """The service, with correct answers at the start of each test."""
    honest = HostileService(url=shared.url)
    vars(shared).update(vars(honest))
    return shared


def request_of(**more: Any) -> RolloutRequest:
    """Two prompts with twelve candidates each, two rewards."""
    asked = rollout_request(["a red circle", "a blue cross"], 12, adapter=("run", 3), steps=6, precision="bf16")
    asked["rewards"] = [{"name": "clipscore"}, {"name": "verifier", "weight": -0.5}]
    return RolloutRequest.model_validate(asked | more)


def refused(
    service: HostileService, act: Callable[[RolloutClient], Any] = lambda client: client.rollouts(request_of())
) -> Problem:
    """The problem with which a client's call, of an exploration by default, ends."""
    with RolloutClient(service.url, pause=0.01) as client, pytest.raises(ProblemError) as raised:
        act(client)
    return raised.value.problem


def unused(service: HostileService, **expected: Any) -> Problem:
    """The problem with which an exploration ends; no group was used, and the request was sent once."""
    used: list[RolloutGroup] = []
    problem = refused(service, lambda client: client.rollouts(request_of(), on_group=used.append, **expected))
    assert used == []
    assert len(service.asked) == 1
    return problem


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"plan": {"steps": 6, "precision": "auto"}},
        {"images": "png"},
        {"candidates": {"seeds": [[5, 3], [9, 1, 2]]}},
        {"adapter": None},
    ],
)
def test_a_correct_answer_is_accepted(service: HostileService, more: dict[str, Any]) -> None:
    used: list[RolloutGroup] = []
    with RolloutClient(service.url) as client:
        answer = client.rollouts(
            request_of(**more), fingerprint=DIGEST, numerics={"bf16": "native"}, on_group=used.append
        )
    assert tuple(used) == answer.groups
    assert [group.prompt_id for group in answer.groups] == ["p0", "p1"]


def of_plan(name: str, value: Any) -> Callable[[Line], None]:
    """Change one setting of the plan."""
    return lambda line: line["served"]["plan"].update({name: value})


def of_served(name: str, value: Any) -> Callable[[Line], None]:
    """Change the answer's description of how it was generated."""
    return lambda line: line["served"].update({name: value})


GROUPS: dict[str, tuple[Callable[[Line], Any], str]] = {
    "seeds all + 1": (lambda line: line.update(seeds=[seed + 1 for seed in line["seeds"]]), "seeds"),
    "two seeds swapped": (lambda line: line["seeds"].insert(10, line["seeds"].pop()), "seeds"),
    "other reward names": (lambda line: line["rewards"].update(pickscore=line["rewards"].pop("clipscore")), "rewards"),
    "negated scores": (lambda line: line.update(scores=[-score for score in line["scores"]]), "scores[0]"),
    "one other score": (lambda line: line["scores"].__setitem__(3, line["scores"][3] + 1e-3), "scores[3]"),
    "a score that is no number": (lambda line: line["scores"].__setitem__(0, math.nan), "scores[0]"),
    "a score too many": (lambda line: line["scores"].append(0.0), "scores: number of values"),
    "a reward's value too few": (lambda line: line["rewards"]["verifier"].pop(), "verifier: number of values"),
    "a reward less": (lambda line: line["rewards"].pop("verifier"), "rewards"),
}
STARTS: dict[str, tuple[Callable[[Line], None], str]] = {
    "another model": (of_served("model", "mini-flux"), "served.model"),
    "another version": (of_served("adapter", {"run": "run", "version": 2}), "served.adapter"),
    "the base": (of_served("adapter", None), "served.adapter"),
    "fewer steps": (of_plan("steps", 5), "served.plan.steps"),
    "another solver": (of_plan("solver", "dpm2"), "served.plan.solver"),
    "another guidance": (of_plan("guidance", 2.0), "served.plan.guidance"),
    "stochastic steps": (of_plan("sde", {"kind": "dance", "eta": 0.3}), "served.plan.sde"),
    "another precision": (of_served("precision", "nvfp4"), "served.precision"),
}


@pytest.mark.parametrize("lie", STARTS | GROUPS)
def test_a_differently_served_answer_is_refused(service: HostileService, lie: str) -> None:
    change, where = (STARTS | GROUPS)[lie]
    setattr(service, "change_start" if lie in STARTS else "change_group", change)
    problem = unused(service)
    assert (problem.kind, problem.status) == ("served-differently", 409)
    assert (problem.where or "").removeprefix("group 'p0': ") == where
    assert (problem.got, problem.expected) != (None, None)


def test_a_different_fingerprint_is_refused_before_a_group_is_used(service: HostileService) -> None:
    wanted = "sha256:" + "1" * 64
    problem = unused(service, fingerprint=wanted)
    assert (problem.kind, problem.got, problem.expected) == ("digest-mismatch", DIGEST, wanted)


@pytest.mark.parametrize(
    ("said", "expected"), [({"bf16": "emulated"}, "emulated"), ({"nvfp4": "native"}, "not supported")]
)
def test_other_numerics_than_the_service_announced_are_refused(
    service: HostileService, said: dict[Precision, Numerics], expected: str
) -> None:
    problem = unused(service, numerics=said)
    assert (problem.kind, problem.where) == ("served-differently", "served.numerics")
    assert (problem.got, problem.expected) == ("native", expected)


def test_a_resumed_stream_must_be_served_in_the_same_way(service: HostileService) -> None:
    precisions, cut = iter(("bf16", "nvfp4")), iter((True, False))
    service.change_start = lambda line: line["served"].update(precision=next(precisions))
    service.change_lines = lambda lines: lines[:2] if next(cut) else lines
    problem = refused(service, lambda client: client.rollouts(request_of(plan={"steps": 6})))
    assert (problem.kind, problem.where) == ("served-differently", "served")


@pytest.mark.parametrize(
    ("field", "value"), [("digest", "sha256:" + "2" * 64), ("version", 4), ("run", "another"), ("model", "mini-flux")]
)
def test_a_push_that_stored_something_different_is_refused(service: HostileService, field: str, value: Any) -> None:
    service.change_stored = lambda stored: stored.update({field: value})
    problem = refused(service, lambda client: client.push("run", 3, 2, "mini-sana", b"adapter"))
    assert (problem.kind, problem.where, problem.got) == ("served-differently", field, value)


def test_a_stream_without_only_its_end_line_is_complete(service: HostileService) -> None:
    service.change_lines = lambda lines: lines[:-1]
    used: list[RolloutGroup] = []
    with RolloutClient(service.url, pause=0.01) as client:
        answer = client.rollouts(request_of(), on_group=used.append)
    assert len(service.asked) == 1
    assert tuple(used) == answer.groups
    assert answer.seconds.generate > 0


@pytest.mark.parametrize(
    "lines",
    [
        lambda lines: [*lines[:2], lines[1], lines[3]],  # a group twice
        lambda lines: [lines[0], lines[3]],
        lambda lines: [b"[]\n", *lines],
        lambda lines: [b"\n", *lines],
        lambda lines: [lines[0], lines[1].replace(b"p0", b"p7"), *lines[2:]],
        lambda lines: lines[1:],
        lambda lines: [lines[0], *lines],
    ],
)
def test_unexpected_lines_are_refused(service: HostileService, lines: Callable[[list[bytes]], list[bytes]]) -> None:
    service.change_lines = lines
    assert refused(service).kind == "unexpected-answer"
    assert len(service.asked) == 1


def test_an_answer_is_read_only_up_to_the_largest_valid_size(service: HostileService) -> None:
    service.answers = [Answer(parts=(b"x" * 2**20,) * 400)]
    assert "a line of more than" in refused(service).detail
    service.answers = [Answer(parts=(b"[" * 2**20,) * 400)]
    assert "a document of more than" in refused(service, RolloutClient.models).detail
    service.answers = [Answer(status=500, parts=(b"x" * 2**20,) * 400)]
    problem = refused(service, RolloutClient.models)
    assert "a refusal of more than" in problem.detail
    assert problem.status == 500


def test_a_compressed_body_is_neither_requested_nor_read(service: HostileService) -> None:
    bomb = gzip.compress(b" " * 2**24)
    for status in (200, 500):
        service.answers = [Answer(status, {"Content-Encoding": "gzip"}, (bomb,))]
        assert "Content-Encoding" in refused(service, RolloutClient.models).detail
    assert {headers["accept-encoding"] for headers in service.headers} == {"identity"}


def problem_body(**more: Any) -> bytes:
    """The answer with a problem document."""
    fields = {"type": "urn:solrl:problem:queue-full", "title": "Queue is full", "status": 429, "detail": "wait"}
    return json.dumps(fields | more).encode()


def test_each_pause_and_the_end_of_a_wait_are_told(service: HostileService) -> None:
    gone, told = problem_body(type="urn:solrl:problem:draining", status=503), list[tuple[str, Wait | None]]()
    service.answers = [Answer(503, {}, (gone,)), Answer(503, {}, (gone,))]
    with RolloutClient(service.url, pause=0.01, patience=60, on_wait=lambda *wait: told.append(wait)) as client:
        client.rollouts(request_of())
        client.rollouts(request_of())
    assert {server for server, _ in told} == {service.url}
    first, second, end = (wait for _, wait in told)
    assert first is not None
    assert second is not None
    assert (first.fault, end) == ("wait", None)
    assert first.waited < second.waited
    assert first.waited + first.left == pytest.approx(60)


@pytest.mark.parametrize("after", ["²", "٣", "-1", "1e9", "soon", "Wed, 21 Oct 2015 07:28:00 GMT", "", None])
def test_a_request_is_repeated_whatever_the_retry_after(service: HostileService, after: str | None) -> None:
    late = Answer(408, {}, (problem_body(type="urn:solrl:problem:request-timeout", status=408),))
    service.answers = [late if after is None else Answer(429, {"Retry-After": after}, (problem_body(),))]
    with RolloutClient(service.url, pause=0.01) as client:
        client.rollouts(request_of())
    assert len(service.asked) == 2


def test_a_services_texts_are_printed_without_terminal_control_characters(service: HostileService) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202e\r\n\x9b31m" + "long " * 10_000
    body = problem_body(status=422, title=evil, detail=evil, where=evil, got={"a": evil}, expected=evil, action=evil)
    service.answers = [
        Answer(422, {}, (body,)),
        Answer(200, {}, (json.dumps({"kind": "error", "problem": json.loads(body)}).encode() + b"\n",)),
        Answer(500, {}, (evil.encode(),)),
        Answer(200, {}, (json.dumps({"kind": "group", evil: 1}).encode() + b"\n",)),
    ]
    for _ in range(4):
        said = str(refused(service))
        assert said.isprintable()
        assert len(said) < 12_000


def test_a_service_that_always_loses_the_run_is_an_error(service: HostileService) -> None:
    lost = problem_body(type="urn:solrl:problem:run-not-found", status=404)
    service.answers = [Answer(404, {}, (lost,))] * 1000
    restored: list[str] = []
    with RolloutClient(service.url, pause=0.05, patience=0.3) as client, pytest.raises(ProblemError) as raised:
        client.rollouts(request_of(), restore=lambda problem: not restored.append(problem.kind))
    assert raised.value.problem.kind == "run-not-found"
    assert 3 < len(restored) < 20


@pytest.mark.parametrize(
    "url",
    [
        *("http://user:hunter2@host:1", "https://hunter2@host", "http://host/?token=hunter2", "http://h:hunter2"),
        *("gpu-node:8100", "ftp://gpu-node", "http://", "http://\nhost", ""),
    ],
)
def test_an_invalid_address_is_refused_immediately_and_no_password_printed(url: str) -> None:
    with pytest.raises(ValueError, match="rollout URL") as raised:
        RolloutClient(url)
    assert "hunter2" not in str(raised.value)


def test_an_address_may_end_in_a_slash_or_have_a_path() -> None:
    assert check_rollout_url(" http://gpu-node:8100/ ") == "http://gpu-node:8100"
    assert check_rollout_url("https://[::1]/solrl/") == "https://[::1]/solrl"


def test_the_settings_refuse_a_password_without_printing_it() -> None:
    for given in (
        {"overrides": ["rollout_url=http://me:hunter2@host"]},
        {"files": {"a.yaml": {"rollout_url": "me:hunter2@host"}}},
    ):
        with pytest.raises(ConfigError, match="rollout URL") as raised:
            resolve("mini-sana/sol_rl/clipscore", **given)
        assert "hunter2" not in str(raised.value)
    saved = resolve("mini-sana/sol_rl/clipscore").config.model_dump(mode="json")
    with pytest.raises(ValueError, match="rollout URL") as kept:
        RunConfig.model_validate(saved | {"rollout_url": "http://me:hunter2@host"})
    assert "hunter2" not in str(kept.value)
