"""A row passes only if it has trials and no guarantee was violated."""

import json
import sys
from pathlib import Path

import faults
import pytest
from fault_trials.findings import Findings, Row


def test_a_violated_guarantee_is_reported() -> None:
    findings = Findings(trials=2)
    findings.require(True, "first", "holds")
    assert findings.passed
    findings.require(False, "second", "two winners")
    assert not findings.passed
    assert findings.broken == ["second: two winners"]


@pytest.mark.parametrize(("promise", "trials"), [("one winner", [2, 3, 4]), ("no winner", [0, 1, 2, 3, 4])])
def test_a_row_that_resumes_runs_the_trials_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, promise: str, trials: list[int]
) -> None:
    def started(promise: str, *options: str) -> list[int]:
        ran = []

        def run(trials: int, findings: Findings) -> None:
            for number in range(findings.trials, trials):
                ran.append(number)
                findings.done("a race")
                findings.add("won")

        row = Row("races", promise, full=5, short=2, run=run, resumable=True)
        monkeypatch.setattr(faults, "rows", lambda: {"races": row})
        monkeypatch.setattr("signal.signal", lambda *_: None)
        monkeypatch.setattr(sys, "argv", ["faults.py", "--out", str(tmp_path), *options])
        assert faults.main() == 0
        return ran

    assert started("one winner", "--short") == [0, 1]
    assert started(promise, "--resume") == trials
    (row,) = json.loads((tmp_path / "faults.json").read_text())["rows"].values()
    assert (row["trials"], row["counted"]) == (5, {"won": 5})
