"""Rendered text: distances, the text that a prompt asks for, and real reading if the engine is installed."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from solrl_core.reward_registry import REWARDS
from solrl_core.rewards.ocr import Ocr, closeness, edit_distance, wanted_text
from solrl_core.rewards.reward import RewardSet, prompt_fault

needs_engine = pytest.mark.skipif(find_spec("rapidocr") is None, reason="the extra `ocr` is not installed")


@pytest.mark.parametrize(
    ("one", "other", "distance"), [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("ab", "ba", 2)]
)
def test_edit_distances(one: str, other: str, distance: int) -> None:
    assert edit_distance(one, other) == edit_distance(other, one) == distance


@pytest.mark.parametrize(
    ("read", "wanted", "score"),
    [
        *(("OPEN", "open", 1.0), ("NowOpen\nToday", "now  open", 1.0), ("ＯＰＥＮ　２４", "open 24", 1.0)),
        *(('It\'s "here"', "It’s “here”", 1.0), ("STRASSE", "Straße", 1.0), ("of\ufb01ce", "office", 1.0)),
        *(("OPFN", "OPEN", 0.75), ("XOPFNX", "OPEN", 0.25)),
        *((read, "OPEN", 0.0) for read in ("", "something else altogether")),
    ],
)
def test_closeness(read: str, wanted: str, score: float) -> None:
    assert closeness(read, wanted) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prompt", "metadata", "text"),
    [
        ('a sign that says "Open Now"', {}, "Open Now"),
        ("a sign that says “Geöffnet”", {}, "Geöffnet"),
        ('a sign that says "Open"', {"text": "Closed"}, "Closed"),
        ("a sign", {"text": "Closed", "seed": 3}, "Closed"),
        ('a sign that says "Open"', {"text": None}, "Open"),
        *(("ein Schild „Geöffnet“", {}, "Geöffnet"), ("en skylt ”Öppet”", {}, "Öppet")),
        *(("un panneau « Ouvert »", {}, " Ouvert "), ("‹Ouvert›", {}, "Ouvert")),
        *(("看板に「営業中」と", {}, "営業中"), ('写着"开门"的牌子', {}, "开门")),
        ("“an 'inner' \"text\"”", {}, "an 'inner' \"text\""),
        ('a 6" ruler that says "OPEN"', {}, "OPEN"),
        ('a 6" by 8" sign that says "24"', {}, "24"),
        ('the dog\'s bowl says "Rex"', {}, "Rex"),
        ('a sign that says "Room 6" and "Exit"', {}, "Room 6"),
        ('"a 6" pipe"', {"text": "24"}, "24"),
        *(('signs "" and "OPEN"', {}, "OPEN"), ('a sign ""OPEN!"" here', {}, "OPEN!")),
    ],
)
def test_the_text_is_of_the_metadata_or_quoted(prompt: str, metadata: dict[str, Any], text: str) -> None:
    assert wanted_text(prompt, metadata) == text
    assert prompt_fault(REWARDS.find("ocr"), prompt, metadata) is None


SILENT = ("a sign", 'a " sign', '""', '" "', '"\u200b"', 'a 6" ruler', 'a 6" and an 8" ruler', "a sign 'OPEN'")
INCHES = ('"a 6" pipe"', 'a sign "24" and a 6" ruler')


@pytest.mark.parametrize(
    ("prompt", "metadata", "said"),
    [
        *[(prompt, {"tag": "sign"}, "no text to render; expected one in double quotation marks") for prompt in SILENT],
        *[(prompt, {}, "is of inches; expected pairs of marks") for prompt in INCHES],
        *[('"A"', {"text": text}, "expected the text that the image shows") for text in ("", " ", "\u200b", 3, ["a"])],
        *[('"A"', {"text": text}, "metadata.text is '") for text in ("x" * 513, "\ufdfa" * 40, "\ufdfa" * 16_000)],
        ('"' + "\ufdfa" * 4000 + '"', {}, "text is '4000 characters'; expected a text of at most 512"),
    ],
)
def test_a_prompt_without_text_is_refused(prompt: str, metadata: dict[str, Any], said: str) -> None:
    assert said in prompt_fault(REWARDS.find("ocr"), prompt, metadata)


def test_without_its_packages_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(ValueError, match=r"cannot load reward 'ocr': its packages are missing .* 'solrl\[ocr\]'"):
        REWARDS.make("ocr", {"device": "cpu"})


def drawn(text: str, ink: str = "black", paper: str = "white") -> torch.Tensor:
    """An image [3, 96, 320] with a text."""
    image = Image.new("RGB", (320, 96), paper)
    ImageDraw.Draw(image).text((20, 28), text, fill=ink, font=ImageFont.load_default(36))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


@needs_engine
def test_drawn_text_is_read() -> None:
    reward = Ocr(device="cuda")
    images = torch.stack([drawn("Hello World"), drawn("Hello Moon", "yellow", "navy"), drawn(""), drawn("Hello World")])
    prompts = ['a sign that says "Hello World"'] * 3 + ["a sign"]
    found = RewardSet({"ocr": reward}).score(["ocr"], images, prompts, [{}, {}, {}, {"text": "hello worlds!"}])["ocr"]
    assert found[0] == 1
    assert 0.4 < found[1] < 0.8
    assert found[2] == 0
    assert found[3] == pytest.approx(1 - 2 / 12)
    assert reward.read((drawn("Orange", "orange") * 255).byte().permute(1, 2, 0)[None]) == ["Orange"]
    assert reward.digest == Ocr().digest
    assert reward(images[:0], [], []).shape == (0,)
    with pytest.raises(ValueError, match="got 4 images and 1 prompts"):
        reward(images, prompts[:1], [{}])


@needs_engine
def test_a_line_is_read_whole_and_the_digest_is_of_engine_and_score(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = Ocr(line=True)
    images = torch.stack([drawn(text, "red") for text in ("K7", "Open Now", "24", "")])[:, :, 20:80]
    prompts = ['"K7"', 'a sign that says "open now"', '"24"', '"x"']
    assert reward(images, prompts, [{}] * 4).tolist() == [1, 1, 1, 0]
    assert reward(images[:0], [], []).shape == (0,)
    assert reward.digest != Ocr().digest
    digests = {Ocr().digest}
    monkeypatch.setattr("solrl_core.rewards.ocr.version", lambda name: "0")
    digests.add(Ocr().digest)
    monkeypatch.setattr("solrl_core.rewards.ocr.source_digest", lambda thing: "another")
    digests.add(Ocr().digest)
    assert len(digests) == 3


@needs_engine
def test_reading_starts_no_telemetry(tmp_path: Path) -> None:
    """onnxruntime writes a device's id into the home folder before it sends usage data."""
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path)}  # it sends nothing where tests run
    code = "import torch; from solrl_core.rewards.ocr import Ocr; Ocr(line=True).read(torch.zeros(1, 32, 64, 3).byte())"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert not [path for path in tmp_path.rglob("*") if "Microsoft" in path.parts]
