"""The table of problem kinds, and the documents that come of it."""

import pytest
from solrl_proto.problems import Problem, ProblemError, ProblemKind


@pytest.mark.parametrize("kind", ProblemKind)
def test_each_kind_has_a_wire_name_a_status_and_a_title(kind: ProblemKind) -> None:
    assert kind == kind.value == kind.name.lower().replace("_", "-")
    assert 400 <= kind.status < 600
    assert kind.title
    assert kind.title == kind.title.strip()
    problem = kind.problem("a detail")
    assert (problem.type, problem.kind) == (f"urn:solrl:problem:{kind}", kind)
    assert (problem.status, problem.title, problem.detail) == (kind.status, kind.title, "a detail")


def test_a_problem_reads_as_one_sentence_after_another() -> None:
    problem = ProblemKind.QUEUE_FULL.problem("it is full", where="body", got=3, expected="at most 2", action="wait")
    assert str(problem) == "Queue is full: it is full; at body; got 3; expected 'at most 2'; wait"
    assert str(ProblemKind.QUEUE_FULL.problem("it is full")) == "Queue is full: it is full"
    error = ProblemError(ProblemKind.OUT_OF_MEMORY, "no room", status=503, where="body.plan")
    assert (error.problem.status, error.problem.where) == (503, "body.plan")
    assert ProblemKind.OUT_OF_MEMORY.status == 507
    assert str(error) == str(error.problem)


def test_a_document_of_a_newer_service_is_still_read() -> None:
    body = {"type": "urn:solrl:problem:of-tomorrow", "title": "New", "status": 418, "detail": "a", "more": [1]}
    problem = Problem.model_validate(body)
    assert problem.kind == "of-tomorrow"
    assert problem.kind not in set(ProblemKind)
