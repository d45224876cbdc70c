"""A service's arithmetic, noted where it is not the trainer's, and its latents, which are exact or refused."""

import base64
import hashlib

import pytest
import torch
from service_helpers import running_service
from solrl_core.arithmetic import arithmetic
from solrl_proto.models import ModelInfo
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import Latents, RolloutGroup
from solrl_trainer.ranks.communicator import Communicator
from solrl_trainer.service.regenerator import from_base64
from solrl_trainer.service.requirements import note_arithmetic
from solrl_trainer.service.service_source import ServiceSource
from solrl_trainer.session import open_session
from training_helpers import tiny_config

OURS = {"device": "CPU with AVX512", "threads": "2", "torch": "2.11.0"}


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (OURS | {"threads": "16"}, "threads 16 (here 2)"),
        ({"device": "NVIDIA H200", "cuda": "13.0"}, "device NVIDIA H200 (here CPU with AVX512), cuda 13.0 (here none)"),
        (OURS | {"device": "\x1b[2J" + "x" * 1000}, r"device \x1b[2Jxxx"),
        (None, "does not say"),
        (OURS, None),
    ],
)
def test_a_difference_is_noted(theirs: dict[str, str] | None, said: str | None, notes: list[str]) -> None:
    note_arithmetic(ModelInfo.model_construct(arithmetic=theirs), OURS)
    if said is None:
        assert notes == []
        return
    (text,) = notes
    assert said in text
    assert text.isprintable()
    assert len(text) < 500


def test_a_run_notes_the_threads_of_its_service(monkeypatch: pytest.MonkeyPatch, notes: list[str]) -> None:
    ours = arithmetic(torch.device("cpu"))
    threads = "2" if ours["threads"] == "1" else "1"
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    with running_service() as service:
        config = tiny_config("evaluate.rewards=clipscore", f"rollout_url={service.url}", run="threads")
        with open_session(config, Communicator()) as session:
            assert isinstance(session.source, ServiceSource)
            client = session.source.client
            assert client.numerics == {"bf16": "emulated", "nvfp4": "emulated"}
            told = client.client.model("mini-sana").arithmetic
    assert told == ours | {"threads": threads}
    assert [note for note in notes if note.endswith(f"threads {threads} (here {ours['threads']})")]


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


def test_latents_arrive_bit_for_bit_and_of_another_adapter_are_refused() -> None:
    assert torch.equal(from_base64(group(), SHAPE, adapter=ADAPTER, url="http://s"), GIVEN)
    other = "sha256:" + "b" * 64
    with pytest.raises(ProblemError) as raised:
        from_base64(group(), SHAPE, adapter=other, url="http://s")
    problem = raised.value.problem
    assert (problem.where, problem.got, problem.expected) == ("group 'p': latents.adapter", ADAPTER, other)


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
