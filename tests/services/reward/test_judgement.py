"""Scores in judges' answers: what counts as one, and expectations over token probabilities."""

import math

import pytest
from solrl_remote.judgement import Scale, TokenLogprobs


def token(text: str, **shares: float) -> TokenLogprobs:
    """A token with probabilities of the tokens at its place; `_4` stands for " 4"."""
    given = {name.replace("_", " "): math.log(share) for name, share in shares.items()}
    return TokenLogprobs(text, given or {text: 0.0})


@pytest.mark.parametrize(
    ("label", "text", "score"),
    [
        ("", "4", 4),
        ("", " 4.5\n", 4.5),
        ("", "+3.", 3),
        ("Final Score:", "Two eyes, 3 ears.\nFinal Score: 4", 4),
        ("Final Score:", "Final Score: 2.25.\nThe image has 9 errors.", 2.25),
        ("Final Score:", "Final Score:3", 3),
    ],
)
def test_a_score_is_the_number_that_an_answer_states(label: str, text: str, score: float) -> None:
    assert Scale(1, 5, label).score(text) == score


@pytest.mark.parametrize(
    ("label", "text", "said"),
    [
        ("", "", "has no score: got ''; expected a number alone"),
        ("", "I would say 4", "has no score: got 'I would say 4'"),
        *(("", text, "expected a number alone") for text in ("4/5", "٤", "nan")),
        ("", "0", "states the score 0; expected 1 to 5"),
        ("", "5.01", "states the score 5.01; expected 1 to 5"),
        ("", "<think>It is 4", "has no end of its reasoning, </think>: got '<think>It is 4'"),
        ("Score:", "4", "has 0 times 'Score:': got '4'; expected one"),
        ("Score:", "Score: 4\nScore: 5", "has 2 times 'Score:'"),
        ("Score:", "Score: good", "has no number after 'Score:': got 'Score: good'"),
        ("", "x" * 900, "x … x"),
    ],
)
def test_anything_else_is_refused(label: str, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"has|states") as caught:
        Scale(1, 5, label).score(text)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(("lowest", "highest"), [(5, 1), (1, 1), (math.nan, 5), (0, math.inf)])
def test_a_range_must_be_one(lowest: float, highest: float) -> None:
    with pytest.raises(ValueError, match="expected numbers that increase"):
        Scale(lowest, highest)


def test_the_expectation_is_over_numbers_of_the_range() -> None:
    # 7 is outside, "five" no number, and " 5" is the number 5.
    shares = {"4": 0.5, "5": 0.1, "_5": 0.1, "3": 0.1, "7": 0.1, "five": 0.1}
    expected = (4 * 0.5 + 5 * 0.2 + 3 * 0.1) / 0.8
    assert Scale(1, 5).score("4", [token("4", **shares)]) == pytest.approx(expected)


def test_the_numbers_token_is_found_behind_reasoning_and_before_the_end() -> None:
    answer = [token("Final"), token(" Score:"), token(" 2", _2=0.75, _4=0.25), token("\n"), token("<|im_end|>")]
    reasoning = [token("<think>"), token("1"), token(" or 4?"), token("</think>")]
    alone = token("4", **{"4": 0.5, "5": 0.5})
    assert Scale(1, 5).score("4", [*reasoning, alone]) == 4.5
    scale = Scale(1, 5, "Final Score:")
    for tokens in (answer, [*reasoning, *answer]):
        assert scale.score("Final Score: 2\n", tokens) == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("4", []),
        ("4", [token("four")]),
        ("4.5", [token("4", **{"4": 0.5, "5": 0.5}), token("."), token("5")]),
        ("4.", [token("4.", **{"4.": 0.5, "5": 0.5})]),
        ("4", [TokenLogprobs("4", {"4": -9999.0, "5": -math.inf})]),
    ],
)
def test_without_probabilities_of_the_number_it_is_the_stated_one(text: str, tokens: list[TokenLogprobs]) -> None:
    assert Scale(1, 5).score(text, tokens) == float(text)


@pytest.mark.parametrize(("lowest", "highest"), [(0, 10), (-1, 1)])
def test_numbers_of_several_tokens_have_no_expectation(lowest: float, highest: float) -> None:
    assert Scale(lowest, highest).score("1", [token("1", **{"1": 0.5, "0": 0.5})]) == 1
    assert Scale(0, 9).score("1", [token("1", **{"1": 0.5, "0": 0.5})]) == 0.5
