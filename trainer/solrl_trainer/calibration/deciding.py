"""The decision of a calibration: the cheapest plan that surely selects well enough, and how sure that is.

Every figure is a mean or median over prompts with a 95 % bootstrap interval. Plans are compared prompt by prompt, so
that what prompts have in common, and a drift of the machine, cancels. The intervals of separation and loss hold for all
plans at once: with one for each plan alone, the cheapest of many would often be one that passes by chance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from solrl_core.fidelity import Fidelity, rank_fidelity, separations
from solrl_proto.rollouts import Plan

from solrl_trainer.calibration.measuring import Observed
from solrl_trainer.calibration.plans import name
from solrl_trainer.records.evaluations import mean_intervals_together, median_interval
from solrl_trainer.run_folder.figures import few_prompts_text

_MANY_PROMPTS = 1000


class IntervalEstimate(NamedTuple):
    """A figure and its 95 % interval over prompts."""

    value: float
    low: float
    high: float

    def text(self, form: str) -> str:
        """Such as "0.83 [0.81, 0.85]", with a format specification for the numbers."""
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"


@dataclass(frozen=True)
class MeasuredPlan:
    """Cost and fidelity of a plan.

    Attributes:
        times: seconds of each prompt's group, rewards included; their median is `seconds`.
        cost: time relative to the reference plan, median over prompts.
        fidelity: rank fidelity, relative to the recipe's BF16 candidates of the same seeds.
        separation: difference in true rank between the selected best and worst: 1 perfect, 0 chance.
        loss: how much less that is than the reference plan's.
    """

    plan: Plan
    times: npt.NDArray[np.float64]
    cost: IntervalEstimate
    fidelity: Fidelity
    separation: IntervalEstimate
    loss: IntervalEstimate

    @property
    def seconds(self) -> float:
        """Median time of a group."""
        return float(np.median(self.times))

    def meets(self, minimum: float) -> bool:
        """Whether its separation surely is at least this."""
        return self.separation.low >= minimum

    def misses(self, minimum: float) -> bool:
        """Whether its separation surely is less than this."""
        return self.separation.high < minimum

    def prompts_to_decide(self, minimum: float) -> float:
        """Number of prompts to decide on `minimum`, if the mean stays and the interval narrows as 1 / √n."""
        value, low, high = self.separation
        if value == minimum:
            return math.inf
        doubt = value - low if value > minimum else high - value
        return len(self.times) * max(1.0, doubt / abs(value - minimum)) ** 2


def assess(observed: Sequence[Observed], true: torch.Tensor, keep: int, reference: Plan) -> list[MeasuredPlan]:
    """Cost and fidelity of each plan, compared with the reference, which is one of them.

    `true` are the true scores [prompts, N]; `keep` candidates of a group are selected, half from either end.
    """
    base = next(observation for observation in observed if observation.plan == reference)
    apart = np.stack([separations(observation.scores, true, keep) for observation in observed])
    lost = separations(base.scores, true, keep) - apart
    estimates = [IntervalEstimate(*interval) for interval in mean_intervals_together(np.concatenate([apart, lost]))]
    of_plans = zip(observed, estimates[: len(observed)], estimates[len(observed) :], strict=True)
    return [
        MeasuredPlan(
            observation.plan,
            observation.seconds,
            cost=times_as_long(observation.seconds, base.seconds),
            fidelity=rank_fidelity(observation.scores, true, keep),
            separation=separation,
            loss=loss,
        )
        for observation, separation, loss in of_plans
    ]


def times_as_long(times: npt.NDArray[np.float64], reference: npt.NDArray[np.float64]) -> IntervalEstimate:
    """Ratio of the times of the same prompts."""
    return IntervalEstimate(*median_interval(times / reference))


def cheapest(measured: Sequence[MeasuredPlan], minimum: float) -> MeasuredPlan | None:
    """The cheapest plan that surely has the `minimum` of separation; None if there is none."""
    return min((plan for plan in measured if plan.meets(minimum)), key=lambda plan: plan.seconds, default=None)


def verdict(
    measured: Sequence[MeasuredPlan], chosen: MeasuredPlan | None, reference: Plan, minimum: float
) -> list[str]:
    """How sure the decision is, in sentences."""
    caution = few_prompts_text(len(measured[0].times))
    lines = _none_chosen(measured, minimum) if chosen is None else _chosen(measured, chosen, reference, minimum)
    return [*lines, *([caution] if caution else [])]


def _chosen(measured: Sequence[MeasuredPlan], chosen: MeasuredPlan, reference: Plan, minimum: float) -> list[str]:
    lines = [
        f"{name(chosen.plan)} has a separation of {chosen.separation.text('.3f')}, {chosen.loss.text('.3f')} less than "
        f"{name(reference)}, and takes {chosen.cost.text('.2f')} of its time"
    ]
    cheaper = [plan for plan in measured if plan.seconds < chosen.seconds]
    if undecided := [plan for plan in cheaper if not plan.misses(minimum)]:
        lines.append(_undecided(undecided, minimum, "cheaper, but not sure to be good enough"))
    elif cheaper:
        lines.append("every cheaper plan surely selects worse than required")
    return lines


def _none_chosen(measured: Sequence[MeasuredPlan], minimum: float) -> list[str]:
    if undecided := [plan for plan in measured if not plan.misses(minimum)]:
        return [_undecided(undecided, minimum, "not sure to be good enough")]
    best = max(measured, key=lambda plan: plan.separation.value)
    return [
        f"every plan surely selects worse than required; the best, {name(best.plan)}, has a separation of "
        f"{best.separation.text('.3f')}, {best.loss.text('.3f')} less than the reference"
    ]


def _undecided(plans: Sequence[MeasuredPlan], minimum: float, what: str) -> str:
    """Plans between met and missed, and the prompts that would decide about the one decided first."""
    first = min(plans, key=lambda plan: plan.prompts_to_decide(minimum))
    prompts = first.prompts_to_decide(minimum)
    count = f"about {round(prompts)}" if prompts <= _MANY_PROMPTS else f"more than {_MANY_PROMPTS:,}"
    more_plans = f", and {len(plans) - 1} other plans" if len(plans) > 1 else ""
    return (
        f"{what}: {name(first.plan)} with a separation of {first.separation.text('.3f')}{more_plans}; "
        f"{count} prompts would decide about it"
    )
