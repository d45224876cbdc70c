"""A run says which reward takes much of its time."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from solrl_proto.status import ScoringTime
from solrl_trainer.records.run_log import RunLog
from solrl_trainer.records.slow_rewards import slow_reward
from solrl_trainer.run_folder.metrics_file import MetricsFile
from tests.trainer.run_folders import iteration_record


def scored(reward: str, seconds: float, by: str = "trainer", of: str = "samples") -> ScoringTime:
    return ScoringTime.model_validate({"reward": reward, "seconds": seconds, "by": by, "of": of, "server": None})


LOCAL = {"explore": 6.0, "train": 4.0, "push": 50.0}
SERVED = {"explore": 100.0, "wait": 2.0, "regenerate": 4.0, "train": 4.0}


@pytest.mark.parametrize(
    ("seconds", "scoring", "said"),
    [
        (LOCAL, [scored("a", 3.0)], None),
        (
            LOCAL,
            [scored("a", 1.0), scored("b", 1.2, of="candidates"), scored("b", 1.0)],
            "32% .* 'b' takes 2.2 s",
        ),
        (SERVED, [scored("a", 90.0, by="service", of="candidates"), scored("b", 3.0)], None),
        (SERVED, [scored("a", 4.0)], "40% of an iteration, 4 of 10 s; reward 'a'"),
        ({"explore": 0.5, "train": 0.5}, [scored("a", 0.9)], None),
    ],
)
def test_a_reward_that_takes_over_30_percent_of_an_iteration_is_named(
    seconds: dict[str, float], scoring: list[ScoringTime], said: str | None
) -> None:
    record = replace(iteration_record(1), seconds=seconds, scoring=tuple(scoring))
    text = slow_reward(record)
    assert (text is None) == (said is None)
    assert said is None or re.search(said, text or "")


def test_a_run_says_it_once_and_not_of_its_first_iteration(tmp_path: Path, notes: list[str]) -> None:
    slow = replace(iteration_record(1), seconds=LOCAL, scoring=(scored("a", 4.0),))
    log = RunLog(MetricsFile(tmp_path / "metrics.jsonl"))
    counts = []
    for _ in range(3):
        log.iteration_trained(slow)
        counts.append(len([note for note in notes if note.startswith("scoring takes 40% of an iteration")]))
    assert counts == [0, 1, 1]
