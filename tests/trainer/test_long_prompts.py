"""Prompts that are longer than the model reads are named before a run."""

from pathlib import Path

from solrl_core.families import load_backbone
from solrl_proto.rollouts import PromptItem
from solrl_trainer.ranks.communicator import SingleProcess
from solrl_trainer.session import open_session
from solrl_trainer.settings.long_prompts import warn_of_long_prompts
from solrl_trainer.settings.presets import resolve

LONG = "two red circles and " * 10


def items(*texts: str) -> list[PromptItem]:
    return [PromptItem(id=str(i), text=text) for i, text in enumerate(texts)]


def test_long_prompts_are_named(notes: list[str]) -> None:
    long = [f"{LONG} a cross {i}" for i in range(5)]
    warn_of_long_prompts(load_backbone("mini-sana"), {"training": items("a", *long), "held-out": items("b")})
    (text,) = notes
    assert text.startswith("5 of 6 training prompts are longer than mini-sana reads")
    assert text.count("'two red circles and") == 3
    assert "and 2 more" in text


def test_a_run_names_its_own(tmp_path: Path, notes: list[str]) -> None:
    (tmp_path / "train.txt").write_text(f"a red circle\n{LONG}\n")
    (tmp_path / "test.txt").write_text("a green cross\n")
    settings = [f"prompts={tmp_path}", "explore.prompts=1", "lora.rank=2", "evaluate.rewards=clipscore"]
    with open_session(resolve("mini-sana/naive_scaling/clipscore", overrides=settings).config, SingleProcess()):
        assert [note for note in notes if note.startswith("1 of 2 training prompts are longer")]
