"""Times of rewards, summed by their images and their place."""

import pytest
from pydantic import ValidationError
from solrl_proto.rollouts import RewardTime
from solrl_proto.status import ScoringTime
from solrl_trainer.rollouts.device_source import RewardClock


def test_times_are_summed_by_images_reward_and_place() -> None:
    clock = RewardClock()
    here, there = RewardTime(seconds=0.25), RewardTime(seconds=2.0, server="there:8200")
    clock.add("samples", "trainer", {"a": here})
    clock.add("samples", "trainer", {"a": here, "b": there})
    clock.add("samples", "service", {"a": here})
    clock.add("candidates", "service", {"a": there})
    assert clock.times == (
        ScoringTime(of="candidates", by="service", reward="a", server="there:8200", seconds=2.0),
        ScoringTime(of="samples", by="trainer", reward="a", seconds=0.5),
        ScoringTime(of="samples", by="trainer", reward="b", server="there:8200", seconds=2.0),
        ScoringTime(of="samples", by="service", reward="a", seconds=0.25),
    )
    clock.restart()
    assert clock.times == ()


@pytest.mark.parametrize("seconds", ["-1", "NaN", "Infinity"])
def test_an_answer_has_no_time_that_a_record_refuses(seconds: str) -> None:
    with pytest.raises(ValidationError):
        RewardTime.model_validate_json(f'{{"seconds": {seconds}}}')
