"""Algorithms against values of their public code, which `benchmarks/parity` computed and stored.

data/NAME.json names repository and commit.
"""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.__main__ import LIMIT, relative_differences
from parity.published import Published

STORED = sorted((Path(__file__).parent / "data").glob("*.json"))


@pytest.fixture(params=STORED, ids=[path.stem for path in STORED])
def stored(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param.stem, json.loads(request.param.read_text())


def test_diffusionnft_is_stored() -> None:
    assert "diffusionnft" in {path.stem for path in STORED}


def test_an_algorithm_computes_what_its_public_code_does(stored: tuple[str, dict[str, Any]]) -> None:
    name, found = stored
    assert found["repository"].startswith("https://github.com/")
    assert re.fullmatch("[0-9a-f]{40}", found["commit"])
    ours = importlib.import_module(f"parity.{name}").ours()
    theirs = {key: torch.tensor(values, dtype=torch.float64) for key, values in found["values"].items()}
    apart = {key: value for key, value in relative_differences(ours, theirs).items() if not value <= LIMIT}
    assert apart == {}


CODE = """
import missing_package
SCALE = 3
def doubled(x): return 2 * x
def main(config):
    for step in config:
        total = 0
        total = total + step * scale
        result["end"] = total
        missing_package.stop()
"""


def test_public_code_runs_without_its_imports(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(CODE)
    published = Published(tmp_path)
    assert published.definitions(("no.py", "a.py"), ["doubled"], {})["doubled"](4) == 8
    names = {"step": 5, "scale": 2, "result": {}}
    assert published.run_statements(("a.py",), "total", "result['end']", names)["result"] == {"end": 10}
    with pytest.raises(LookupError, match=r"has none of \['no.py'\]"):
        published.definitions(("no.py",), ["doubled"], {})
    with pytest.raises(LookupError, match=r"expected \['tripled'\]"):
        published.definitions(("a.py",), ["tripled"], {})
    with pytest.raises(LookupError, match="no statements from 'total' to 'gone'"):
        published.run_statements(("a.py",), "total", "gone", names)


def test_values_of_other_names_or_sizes_are_refused() -> None:
    one, two = torch.ones(1), torch.ones(2)
    for ours in ({"a": two}, {"b": one}):
        with pytest.raises(ValueError, match="expected those of the public code"):
            relative_differences(ours, {"a": one})
    assert relative_differences({"a": two + 1e-3}, {"a": two})["a"] == pytest.approx(1e-3, rel=1e-3)
    assert relative_differences({"a": two * float("nan")}, {"a": two})["a"] != 0
