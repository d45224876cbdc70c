"""Training runs give what they gave before: seeds, scores, losses, adapters, weights, files and keys."""

import json
from typing import Any

import pytest
from tests.golden.golden_runs import RECORDED, RUNS, processor, run_all


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_all(tmp_path_factory.mktemp("golden"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bf16_scores_are_those_recorded_on_any_processor(found: dict[str, Any], recorded: dict[str, Any]) -> None:
    for scores, expected in zip(found["bf16_scores"], recorded["bf16_scores"], strict=True):
        assert scores == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("recipe", RUNS)
def test_a_run_writes_the_same_files_and_keys(found: dict[str, Any], recorded: dict[str, Any], recipe: str) -> None:
    any_processor = next(iter(recorded["processors"].values()))
    assert found["runs"][recipe]["files"] == any_processor[recipe]["files"]
    lines, expected = found["runs"][recipe]["metrics"], any_processor[recipe]["metrics"]
    assert [sorted(line) for line in lines] == [sorted(line) for line in expected]


@pytest.mark.parametrize("recipe", RUNS)
def test_a_run_is_equal_bit_for_bit(found: dict[str, Any], recorded: dict[str, Any], recipe: str) -> None:
    if processor() not in recorded["processors"]:
        pytest.skip(f"bits were not recorded on {processor()}")
    expected = recorded["processors"][processor()][recipe]
    run = found["runs"][recipe]
    for name, value in expected.items():
        assert run[name] == value, name
