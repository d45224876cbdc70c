"""A row passes only if it was tried and no promise was broken."""

from fault_trials.findings import Findings


def test_no_trial_is_no_pass() -> None:
    assert not Findings().passed


def test_one_broken_promise_is_no_pass_and_is_told() -> None:
    findings = Findings(trials=2)
    findings.require(True, "first", "holds")
    assert findings.passed
    findings.require(False, "second", "two winners")
    assert not findings.passed
    assert findings.broken == ["second: two winners"]


def test_what_is_counted_is_told() -> None:
    findings = Findings()
    findings.add("won")
    findings.add("won", 2)
    findings.most("most", 3)
    findings.most("most", 1)
    assert findings.found == "won: 3; most: 3"
