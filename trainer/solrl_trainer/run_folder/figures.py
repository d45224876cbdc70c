"""Formatting of a run's figures, shared by the terminal, the report and the grid."""

import json
from collections.abc import Mapping
from typing import Any

TRAINED_SUM = "weighted sum"
"""Key of the row of the trained score, if it is a sum of several rewards."""
EVALUATION_ONLY = "evaluation only"
FEW_PROMPTS = 8
"""With fewer prompts, a bootstrap interval over prompts is too narrow."""
LEAST_FIDELITY = 0.75
"""Least Spearman of rank fidelity without a note on what to do: just below the miniatures' lowest with Euler, 0.78; the
paper has 0.90 to 0.94 for its large models."""

OCR = "ocr"
"""The reward that compares the text in an image with the prompt's."""
READ_RIGHT = "read right"
"""Key of the row of the share of images whose text that reward reads right."""
_SHARES = {"verifier": "strict accuracy (verifier)", "judge": "strict accuracy (judge)", READ_RIGHT: "read right (ocr)"}
"""Rewards that are a share of images → their label. They are shown in per cent."""


def trained_text(model: str, preset: str, weights: Mapping[str, float]) -> str:
    """Description of a run: model, recipe and trained rewards. Settings may have changed the preset's reward."""
    _, recipe, _ = preset.split("/")
    return f"{model}, {recipe}, trained on {sum_text(weights)}"


def sum_text(weights: Mapping[str, float]) -> str:
    """The trained score as a formula, such as "clipscore + 0.2 × hpsv2"; a single reward is its name.

    Without rewards, stored images are trained on.
    """
    if not weights:
        return "stored images"
    terms = [
        ("−" if weight < 0 else "+", name if abs(weight) == 1 else f"{abs(weight):g} × {name}")
        for name, weight in weights.items()
    ]
    return " ".join(f"{sign} {term}" for sign, term in terms).removeprefix("+ ")


def trained_sum(means: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The trained score of held-out means: their weighted sum, unless prompts differ in weights and it is there."""
    if TRAINED_SUM in means:
        return means[TRAINED_SUM]
    return sum(weight * means[name] for name, weight in weights.items())


def role_text(name: str, weights: Mapping[str, float]) -> str:
    """Whether a row's reward was trained on, and its weight if there are several."""
    if name == TRAINED_SUM:
        return f"trained: {sum_text(weights)}"
    if name == READ_RIGHT:
        return "images whose ocr is 1"
    if list(weights) == [name]:
        return "trained"
    return f"trained, weight {weights[name]:g}".replace("-", "−") if name in weights else EVALUATION_ONLY


def ended_text(reason: str, iterations: int, planned: int, version: int) -> str:
    """How a run ended with its best weights, of `version`, after `iterations` of `planned`; follows "the run"."""
    return f"ended after {iterations} of {planned} iterations: {reason}; the weights are of version {version}"


def result_end(result: Mapping[str, Any]) -> str:
    """`ended_text` of a run's result; empty if the run took its last weights."""
    if not result.get("stopped"):
        return ""
    return ended_text(result["stopped"], result["iterations"], result["planned"], result["version"])


def place_text(by: str, server: str | None) -> str:
    """Place where a reward ran: in one of the programs, or at a server that it asked."""
    return f"in the {by}" if server is None else f"at {server}, for the {by}"


def few_prompts_text(prompts: int) -> str:
    """Warning about intervals over few prompts; empty if there are enough."""
    if prompts >= FEW_PROMPTS:
        return ""
    over = "1 prompt" if prompts == 1 else f"{prompts} prompts"
    return f"the intervals are over {over} and may be too narrow; use at least {FEW_PROMPTS}"


def hacked_text(rewards: Mapping[str, Mapping[str, float]], weights: Mapping[str, float]) -> str:
    """Warning that rewards which are not trained on clearly fell while the trained score rose; empty if none did.

    The rewards have `low` and `high`, the interval of the gain; the weights are of the trained ones.
    """
    signs = {TRAINED_SUM: 1.0} if TRAINED_SUM in rewards else weights if len(weights) == 1 else {}
    rose = any(
        rewards[name]["low" if sign > 0 else "high"] * sign > 0 for name, sign in signs.items() if name in rewards
    )
    fell = [name for name, row in rewards.items() if name not in (TRAINED_SUM, *weights) and row["high"] < 0]
    if not rose or not fell:
        return ""
    *earlier, last = fell
    names = f"{', '.join(earlier)} and {last}" if earlier else last
    return f"the trained score rose, but {names} fell: look at the images, the reward may be hacked"


def judging_text(name: str) -> str:
    """What a reward does that says whether an image is right."""
    return "RapidOCR reads right" if name == OCR else f"the {name} accepts"


def reward_label(name: str) -> str:
    return _SHARES.get(name, name)


def lies_in_unit_interval(name: str) -> bool:
    """Whether a reward is known to lie between 0 and 1."""
    return name in _SHARES or name == OCR


def reward_axis(name: str) -> tuple[str, float]:
    """Title of a reward's axis, and the factor on its values."""
    return (f"{reward_label(name)}, %", 100.0) if name in _SHARES else (reward_label(name), 1.0)


def reward_text(name: str, value: float) -> str:
    """Format a mean reward."""
    return f"{100 * value:.1f} %" if name in _SHARES else f"{value:.4f}"


def gain_text(name: str, gain: float) -> str:
    """Format a gain with its sign; in points for shares."""
    return f"{100 * gain:+.1f} points" if name in _SHARES else f"{gain:+.4f}"


def interval_text(name: str, low: float, high: float) -> str:
    """Format the interval of a gain."""
    return f"[{100 * low:+.1f}, {100 * high:+.1f}]" if name in _SHARES else f"[{low:+.4f}, {high:+.4f}]"


def duration_text(seconds: float) -> str:
    """Format seconds as h, min and s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds_over = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds_over:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def value_text(value: object, longest: int) -> str:
    """A setting's JSON value as text, without the quotes of a string; an ellipsis ends one that is too long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
