"""Problems as text."""

from solrl_proto.problems import ProblemError, ProblemKind


def test_a_problem_reads_as_one_sentence_after_another() -> None:
    problem = ProblemKind.QUEUE_FULL.problem("it is full", where="body", got=3, expected="at most 2", action="wait")
    assert str(problem) == "Queue is full: it is full; at body; got 3; expected 'at most 2'; wait"
    assert str(ProblemKind.QUEUE_FULL.problem("it is full")) == "Queue is full: it is full"
    error = ProblemError(ProblemKind.OUT_OF_MEMORY, "no room", status=503, where="body.plan")
    assert (error.problem.status, error.problem.where) == (503, "body.plan")
    assert ProblemKind.OUT_OF_MEMORY.status == 507
    assert str(error) == str(error.problem)
