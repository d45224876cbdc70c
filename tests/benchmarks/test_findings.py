"""A row passes only if it has trials and no guarantee was violated."""

from fault_trials.findings import Findings


def test_a_row_without_trials_does_not_pass() -> None:
    assert not Findings().passed


def test_a_violated_guarantee_is_reported() -> None:
    findings = Findings(trials=2)
    findings.require(True, "first", "holds")
    assert findings.passed
    findings.require(False, "second", "two winners")
    assert not findings.passed
    assert findings.broken == ["second: two winners"]


def test_counters_are_reported() -> None:
    findings = Findings()
    findings.add("won")
    findings.add("won", 2)
    findings.most("most", 3)
    findings.most("most", 1)
    assert findings.found == "won: 3; most: 3"
