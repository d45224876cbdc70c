"""Latents of an answer: exact, and refused if they cannot be those of the request."""

import base64
import hashlib

import pytest
import torch
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import Latents, RolloutGroup
from solrl_trainer.service.regenerator import from_base64

SHAPE = (2, 3, 1)
ADAPTER = "sha256:" + "a" * 64
GIVEN = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0))


def group(latents: torch.Tensor = GIVEN, *, last: str | None = None, digest: str | None = None) -> RolloutGroup:
    """A group with these latents; `last` replaces the text of the last one."""
    parts = [row.numpy().tobytes() for row in latents]
    values = [base64.b64encode(part).decode() for part in parts]
    values[-1] = values[-1] if last is None else last
    own = f"sha256:{hashlib.sha256(b''.join(parts)).hexdigest()}"
    answered = Latents(values=tuple(values), digest=digest or own, adapter=ADAPTER)
    scores = (0.0,) * len(values)
    return RolloutGroup(
        prompt_id="p", seeds=tuple(range(len(values))), scores=scores, rewards={"r": scores}, latents=answered
    )


def test_latents_arrive_bit_for_bit() -> None:
    assert torch.equal(from_base64(group(), SHAPE, adapter=ADAPTER, url="http://s"), GIVEN)


@pytest.mark.parametrize(
    ("answered", "where"),
    [
        (group(last="AAAA"), "latents.values[3]"),
        (group(last="no base64!"), "latents.values[3]"),
        (group(last="²"), "latents.values[3]"),
        (group(digest="sha256:" + "0" * 64), "latents.digest"),
        (group(GIVEN.clone().fill_(float("nan"))), "latents.values"),
        (group(GIVEN[:, :1].contiguous()), "latents.values[0]"),
    ],
    ids=["short", "no base64", "no ASCII", "another digest", "not finite", "another shape"],
)
def test_other_latents_are_refused(answered: RolloutGroup, where: str) -> None:
    with pytest.raises(ProblemError) as raised:
        from_base64(answered, SHAPE, adapter=ADAPTER, url="http://s")
    problem = raised.value.problem
    assert (problem.kind, problem.where) == ("served-differently", f"group 'p': {where}")
    assert None not in (problem.got, problem.expected, problem.action)


def test_latents_of_another_adapter_are_refused() -> None:
    other = "sha256:" + "b" * 64
    with pytest.raises(ProblemError) as raised:
        from_base64(group(), SHAPE, adapter=other, url="http://s")
    problem = raised.value.problem
    assert (problem.where, problem.got, problem.expected) == ("group 'p': latents.adapter", ADAPTER, other)
