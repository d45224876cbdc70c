"""The stored results of several workers: one for each setting, each against its own goals."""

from typing import Any

from workers import LOCAL, PROCESS, page


def result(several: float, process: float, **more: Any) -> dict[str, Any]:
    """A result with these ratios."""
    rates = {LOCAL: [1.0], PROCESS: [process], "2 processes": [process * several]}
    ratios = {"process": process, "several": several}
    about = {"device": "a GPU", "cores": 12, "threads": 4, "model": "m", "precision": "bf16", "steps": 6}
    return {**about, "ratios": ratios, "candidates_per_second": rates, **more}


def test_each_setting_has_its_own_goals() -> None:
    found = {"own-cores": result(1.8, 0.9), "gpus": result(2.0, 0.98)}
    gpus, cores = [line.split(" | ") for line in page(found).splitlines()[-2:]]
    assert gpus[0] == "| a GPU, one for each worker"
    assert gpus[4:] == ["1.96 (2 processes)", "2.000", "≥ 1.9", "yes", "0.980", "≥ 0.99", "no |"]
    assert cores[0] == "| 12 CPU cores, 4 threads for each worker"
    assert cores[5:] == ["1.800", "≥ 1.8", "yes", "0.900", "–", "– |"]
