"""GenEval's score with a small detector and a small CLIP: from pixels to verdicts."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from solrl_core.reward_registry import REWARDS
from solrl_core.rewards.detector import ColourNames, Detector
from solrl_core.rewards.geneval import GenEval
from solrl_core.rewards.geneval_rules import (
    COLOURS,
    COUNTING_THRESHOLD,
    MOST_OBJECTS,
    THRESHOLD,
    DetectedObject,
    check_metadata,
    is_correct,
    kept_objects,
    relations,
)
from solrl_core.rewards.reward import RewardSet, prompt_fault
from tests.core.rewards.reward_helpers import CLIP, DATA, on_bytes
from transformers import YolosConfig, YolosForObjectDetection, YolosImageProcessorPil

NAMES = ("person", "aeroplane", "tvmonitor", "dog")
A_DOG = {"class": "dog", "count": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A detector of random weights, which finds something everywhere."""
    config = YolosConfig(
        **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
        **{"image_size": [32, 32], "patch_size": 8, "num_detection_tokens": 6},
        id2label=dict(enumerate(NAMES)),
        label2id={name: at for at, name in enumerate(NAMES)},
    )
    torch.manual_seed(1)
    model = YolosForObjectDetection(config)
    for weight in model.parameters():
        weight.data = torch.randn_like(weight) * (1.0 if weight.ndim > 1 else 0.1)
    found = tmp_path_factory.mktemp("detector")
    model.save_pretrained(found)
    YolosImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def geneval(folder: Path) -> GenEval:
    return GenEval(str(folder), CLIP)


def picture(*shades: int) -> torch.Tensor:
    return torch.tensor(shades)[:, None, None, None].expand(-1, 3, 32, 32) / 255


def test_the_detector_gives_what_transformers_gives(folder: Path) -> None:
    detector = Detector(str(folder), device="cpu", dtype="float32")
    assert detector.names == {"person", "airplane", "tv", "dog"}
    image = Image.fromarray((on_bytes(1, 48, 64)[0].permute(1, 2, 0) * 255).byte().numpy())
    with torch.inference_mode():
        found = detector.find(image, 0.2)
    model = YolosForObjectDetection.from_pretrained(folder).eval()
    processor = YolosImageProcessorPil.from_pretrained(folder)
    with torch.inference_mode():
        out = model(**processor(images=image, return_tensors="pt"))
    shares = out.logits[0].softmax(-1)[:, :-1]
    kept = shares.max(-1).values > 0.2
    assert 0 < len(found) == int(kept.sum())
    x, y, width, height = (out.pred_boxes[0][kept] * torch.tensor([64, 48, 64, 48])).unbind(-1)
    boxes = torch.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], -1)
    torch.testing.assert_close(torch.tensor([one[2:] for one in found]), boxes, rtol=1e-5, atol=1e-4)
    plain = ("person", "airplane", "tv", "dog")
    assert [one.name for one in found] == [plain[at] for at in shares[kept].argmax(-1).tolist()]
    assert [one.score for one in found] == pytest.approx(shares[kept].max(-1).values.tolist())


def test_images_are_scored_by_their_own_metadata(geneval: GenEval, monkeypatch: pytest.MonkeyPatch) -> None:
    dog, other = DetectedObject("dog", 0.95, 0, 0, 9, 9), DetectedObject("dog", 0.92, 20, 0, 29, 9)
    # Objects by the colour of an image's first pixel, in place of those that the detector finds.
    scene = {10: [dog], 20: [dog, other], 30: []}
    monkeypatch.setattr(geneval._detector, "find", lambda image, least: scene[image.getpixel((0, 0))[0]])
    one = {"tag": "single_object", "include": [{"class": "dog", "count": 1}]}
    two = {"tag": "counting", "include": [{"class": "dog", "count": 2}], "exclude": [{"class": "dog", "count": 3}]}
    rewards = RewardSet({"geneval": geneval})
    rows = [one, one, one, two, two]
    found = rewards.score(["geneval"], picture(10, 20, 30, 10, 20), ["a dog"] * 5, rows)["geneval"]
    assert found.tolist() == [1, 1, 0, 0, 1]
    assert geneval(picture(), [], []).shape == (0,)


COUNT_TWO = {"tag": "counting", "include": [A_DOG | {"count": 2}], "exclude": [A_DOG | {"count": 3}]}


def test_scores_below_the_counting_threshold_are_told_once(
    folder: Path, geneval: GenEval, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A detector with RT-DETR's scores, each of a class by itself, sees both dogs, and a third at 0.4."""
    seen = [DetectedObject("dog", score, 20 * at, 0, 20 * at + 9, 9) for at, score in enumerate((0.84, 0.71, 0.4))]
    for softmax, threshold, right in ((True, 0.9, 0.0), (False, 0.5, 1.0)):
        monkeypatch.setattr("solrl_core.rewards.detector._SOFTMAX", ("yolos",) if softmax else ())
        reward = GenEval(str(folder), CLIP)
        assert reward._thresholds["counting_threshold"] == threshold
        monkeypatch.setattr(reward._detector, "find", lambda image, least: [one for one in seen if one.score > least])
        caplog.clear()
        for _ in range(3):
            assert reward(picture(*[10] * 20), ["two dogs"] * 20, [COUNT_TWO] * 20).tolist() == [right] * 20
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == (not right)
        assert right or "0 of 24 images of counting prompts have any object above counting_threshold 0.9" in said[0]
        assert right or "the likeliest has 0.84" in said[0]
    assert geneval._thresholds["counting_threshold"] == 0.9
    assert GenEval(str(folder), CLIP, counting_threshold=0.0)._thresholds["counting_threshold"] == 0


def red_and_blue(pixel_values: torch.Tensor) -> Any:
    """Features of an image that are the means of its red and blue."""
    return SimpleNamespace(pooler_output=pixel_values.mean((2, 3))[:, [0, 2]])


def test_colours_are_of_the_crop(monkeypatch: pytest.MonkeyPatch) -> None:
    colours = ColourNames(CLIP, device="cpu", dtype="float32")
    pixels = np.zeros((32, 64, 3), np.uint8)
    pixels[:, :32, 0] = pixels[:, 32:, 2] = 255
    left, right = DetectedObject("dog", 0.9, 0, 0, 32, 32), DetectedObject("dog", 0.9, 32, 0, 64, 32)
    thin = DetectedObject("dog", 0.9, 40.2, 3.1, 40.3, 3.2)
    classifier = torch.full((len(COLOURS), 2), -1.0)
    classifier[COLOURS.index("red")], classifier[COLOURS.index("blue")] = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    monkeypatch.setattr(colours, "_classifier", lambda name: classifier)
    monkeypatch.setattr(colours._model, "get_image_features", red_and_blue)
    assert colours.of(Image.fromarray(pixels), "dog", [left, right, thin]) == ["red", "blue", "blue"]


def test_a_colour_is_the_mean_of_three_texts() -> None:
    colours = ColourNames(CLIP, device="cpu", dtype="float32")
    with torch.inference_mode():
        found = colours._classifier("dog")
        texts = ["a photo of a orange dog", "a photo of a orange-colored dog", "a photo of a orange object"]
        tokens = colours._tokenizer(texts, padding=True, truncation=True, max_length=24, return_tensors="pt")
        features = colours._model.get_text_features(**tokens).pooler_output
    mean = (features / features.norm(dim=-1, keepdim=True)).mean(0)
    torch.testing.assert_close(found[COLOURS.index("orange")], mean / mean.norm(), rtol=1e-4, atol=1e-5)
    assert found.shape == (len(COLOURS), features.shape[-1])


def test_a_class_that_the_detector_lacks_is_refused(geneval: GenEval) -> None:
    for part in ("include", "exclude"):
        with pytest.raises(ValueError, match=r"got class 'unicorn'; expected one that the detector has: .'airplane'"):
            geneval(picture(10), ["a"], [{part: [{"class": "unicorn", "count": 1}]}])
    with pytest.raises(ValueError, match="got 1 images and 0 rows"):
        geneval(picture(10), [], [])
    assert prompt_fault(REWARDS.find("geneval"), "a dog", {}) is not None
    assert prompt_fault(REWARDS.find("geneval"), "a dog", {"include": [{"class": "dog", "count": 1}]}) is None


def test_the_digest_is_of_all(folder: Path, geneval: GenEval, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert GenEval(str(folder), CLIP).digest == geneval.digest
    changes: list[dict[str, Any]] = [{"threshold": 0.5}, {"counting_threshold": 0.5}]
    others = {GenEval(str(folder), CLIP, **change).digest for change in changes}
    model = YolosForObjectDetection.from_pretrained(folder)
    model.class_labels_classifier.layers[-1].bias.data.add_(1)
    model.save_pretrained(tmp_path)
    YolosImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    others.add(GenEval(str(tmp_path), CLIP).digest)
    monkeypatch.setattr("solrl_core.rewards.geneval.source_digest", lambda rule: f"another {rule.__name__}")
    others.add(GenEval(str(folder), CLIP).digest)
    assert len(others | {geneval.digest}) == 5


def test_invalid_options_are_refused(folder: Path, tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [{"threshold": 1.0}, {"counting_threshold": -0.1}]
    for options in wrong:
        with pytest.raises(ValueError, match="expected 0 to below 1"):
            GenEval(str(folder), CLIP, **options)
    with pytest.raises(OSError, match="none"):
        GenEval(str(tmp_path / "none"), CLIP)
    with pytest.raises(ValueError, match="CLIPConfig"):
        GenEval(CLIP, CLIP)


CASES = json.loads((DATA / "geneval.json").read_text())


def verdict(metadata: dict[str, Any], objects: list[DetectedObject], colours: dict[DetectedObject, str]) -> bool:
    check_metadata(metadata)
    kept = kept_objects(objects, metadata, threshold=THRESHOLD, counting_threshold=COUNTING_THRESHOLD)
    return is_correct(kept, metadata, lambda name, group: [colours[one] for one in group])


@pytest.mark.parametrize("case", CASES, ids=[f"{at}-{case['metadata']['tag']}" for at, case in enumerate(CASES)])
def test_verdicts_equal_the_originals(case: dict[str, Any]) -> None:
    objects = [DetectedObject(*row) for row in case["objects"]]
    colours = dict(zip(objects, case["colours"], strict=True))
    assert verdict(case["metadata"], objects, colours) is case["correct"]


def thing(name: str = "dog", score: float = 0.95, x: float = 0.0, y: float = 0.0, side: float = 10.0) -> DetectedObject:
    return DetectedObject(name, score, x, y, x + side, y + side)


@pytest.mark.parametrize(
    ("tag", "score", "kept"),
    [("single_object", 0.3, 0), ("single_object", 0.31, 1), ("counting", 0.9, 0), ("counting", 0.91, 1)],
)
def test_a_score_must_exceed_the_threshold_of_the_tag(tag: str, score: float, kept: int) -> None:
    found = kept_objects([thing(score=score)], {"tag": tag}, threshold=0.3, counting_threshold=0.9)
    assert len(found.get("dog", [])) == kept


def test_the_likeliest_objects_of_each_class_are_kept_and_have_the_colours() -> None:
    dogs = [thing(score=0.5 + at / 100, x=at) for at in range(MOST_OBJECTS + 4)]
    found = kept_objects([*dogs, thing("cat")], {}, threshold=0.3, counting_threshold=0.9)
    assert found["dog"] == dogs[::-1][:MOST_OBJECTS]
    assert found["cat"] == [thing("cat")]
    metadata = {"include": [{"class": "dog", "count": 1, "color": "red"}]}
    red, blue = thing(score=0.8), thing(score=0.9, x=50)
    colours = {red: "red", blue: "blue"}
    assert not verdict(metadata, [red, blue], colours)
    assert verdict(metadata, [red._replace(score=0.99), blue], {**colours, red._replace(score=0.99): "red"})
    assert verdict(metadata, [red], colours)
    both = {"include": [{"class": "dog", "count": 2, "color": "red"}]}
    assert not verdict(both, [red, blue], colours)
    assert verdict(both, [red, blue], {red: "red", blue: "red"})


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (100, 0, {"right of"}),
        (-100, 0, {"left of"}),
        (0, 100, {"below"}),
        (0, -100, {"above"}),
        (100, 100, {"right of", "below"}),
        (100, 40, {"right of"}),
        (0, 0, set()),
        (2, 0, set()),
        (2.5, 0, set()),  # a fifth of the offset is beyond the margin
        (5, 0, {"right of"}),
    ],
)
def test_relations_depend_on_offset_and_size(x: float, y: float, expected: set[str]) -> None:
    assert relations(thing(x=x, y=y), thing()) == expected


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, "metadata is {}; expected GenEval's `include` or `exclude`"),
        ({"include": "dog"}, "metadata.include is 'dog'; expected a list of at most 16 objects"),
        ({"include": ["dog"]}, "metadata.include.0 is 'dog'; expected an object with a class"),
        ({"include": [{"class": "dog"}]}, "include.0.count is missing; expected a whole number from 1 to 16"),
        *[({"exclude": [A_DOG | {"count": count}]}, "exclude.0.count is ") for count in (True, -1, 17, 10**30, 1.0)],
        ({"exclude": [A_DOG] * 17}, "metadata.exclude is '17 items'"),
        ({"include": [A_DOG | {"color": "teal"}]}, "include.0.color is 'teal'; expected one of"),
        ({"include": [A_DOG | {"position": ["above", 0]}]}, "include.0.position is ['above', 0]"),
        ({"include": [A_DOG, A_DOG | {"position": ["near", 0]}]}, "include.1.position is ['near', 0]; expected [REL"),
    ],
)
def test_other_metadata_is_refused(metadata: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"metadata|clude") as caught:
        check_metadata(metadata)
    assert said in str(caught.value)
