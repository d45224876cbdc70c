"""Algorithms against values of their public code, which `benchmarks/parity` computed and stored.

`benchmarks/parity/data/NAME.json` names repository and commit.
"""

import importlib
import json
import re
from typing import Any

import pytest
import torch
from parity.__main__ import DATA, LIMIT, relative_differences
from parity.published import of_cases

STORED = sorted(DATA.glob("*.json"))


@pytest.fixture(params=STORED, ids=[path.stem for path in STORED])
def stored(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param.stem, json.loads(request.param.read_text())


def test_an_algorithm_computes_what_its_public_code_does(stored: tuple[str, dict[str, Any]]) -> None:
    name, found = stored
    assert found["repository"].startswith("https://github.com/")
    assert re.fullmatch("[0-9a-f]{40}", found["commit"])
    algorithm = importlib.import_module(f"parity.{name}")
    ours = of_cases(algorithm.CASES, algorithm.ours)
    theirs = {key: torch.tensor(values, dtype=torch.float64) for key, values in found["values"].items()}
    apart = {key: value for key, value in relative_differences(ours, theirs).items() if not value <= LIMIT}
    assert apart == {}
