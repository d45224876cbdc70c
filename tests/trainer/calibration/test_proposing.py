"""Calibration proposes numbers of candidates and kept samples by their signal for the time of a prompt."""

import torch
from solrl_trainer.calibration.proposing import proposals, signal, text


def scores(prompts: int = 200, candidates: int = 32) -> torch.Tensor:
    return torch.randn(prompts, candidates, generator=torch.Generator().manual_seed(0))


def test_the_signal_of_all_samples_is_their_number_less_one_and_extremes_have_more() -> None:
    true = scores()
    assert abs(signal(true, true, 32, 32) - 31) < 0.01
    # The best two and worst two of 32 normal numbers lie near ±2.07 and ±1.65 (order statistics).
    assert abs(signal(true, true, 32, 4) - 2 * (2.07**2 + 1.65**2)) < 0.7
    assert signal(scores(), true.flip(0), 32, 4) < 5  # a proxy by chance: four samples' own variance


def test_costly_exploring_favours_fewer_candidates_and_costly_training_fewer_samples() -> None:
    true = scores()

    def fastest(explored: float, step: float) -> tuple[int, int]:
        best = proposals(true, true, 4, explored=explored, step=step, steps=10, levels=4)[0]
        return best.candidates, best.keep

    assert fastest(explored=1e-6, step=1.0) == (32, 4)
    assert fastest(explored=1.0, step=1e-6)[0] == 16
    assert fastest(explored=1.0, step=1e-6)[1] > 4


def test_speeds_are_relative_to_the_runs_numbers_and_the_line_names_the_settings() -> None:
    true = scores()
    every = proposals(true, true, 12, explored=0.01, step=0.1, steps=10, levels=4)
    present = next(each for each in every if (each.candidates, each.keep) == (32, 12))
    assert present.speed == 1
    assert present.seconds == 32 * 0.01 + 12 * 0.1 * (10 + 4 * 4)
    assert every[0].speed > 1
    assert text(every, present).startswith(f"explore.candidates={every[0].candidates} explore.keep={every[0].keep}: ")
    assert text(every, every[0]).startswith(f"{every[0].candidates} candidates and {every[0].keep} kept")


def test_equal_rewards_propose_the_runs_numbers() -> None:
    flat = torch.ones(4, 24)
    assert all(each.speed == 1 for each in proposals(flat, flat, 4, explored=1, step=1, steps=10, levels=4))
