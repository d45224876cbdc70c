"""A service's arithmetic, noted where it is not the trainer's."""

import pytest
import torch
from solrl_core.arithmetic import arithmetic
from solrl_proto.models import ModelInfo
from solrl_trainer.ranks.communicator import Communicator
from solrl_trainer.service.requirements import log_arithmetic
from solrl_trainer.service.service_source import ServiceSource
from solrl_trainer.session import open_session
from tests.support.service_helpers import running_service
from tests.trainer.training_helpers import tiny_config

OURS = {"device": "CPU with AVX512", "threads": "2", "torch": "2.11.0"}


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (OURS | {"threads": "16"}, "threads 16 (here 2)"),
        ({"device": "NVIDIA H200", "cuda": "13.0"}, "device NVIDIA H200 (here CPU with AVX512), cuda 13.0 (here none)"),
        (OURS | {"device": "\x1b[2J" + "x" * 1000}, r"device \x1b[2Jxxx"),
        (None, "does not report"),
        (OURS, None),
    ],
)
def test_a_difference_is_noted(theirs: dict[str, str] | None, said: str | None, notes: list[str]) -> None:
    log_arithmetic(ModelInfo.model_construct(arithmetic=theirs), OURS)
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
