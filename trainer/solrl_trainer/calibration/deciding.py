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
from solrl_core.fidelity import Fidelity, paces, rank_fidelity, separations
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
        times: seconds of each prompt's group, rewards included; their median is `seconds`, `quartiles` the middle half.
        cost: time relative to the reference plan, median over prompts.
        fidelity: rank fidelity, relative to the recipe's BF16 candidates of the same seeds.
        separation: difference in true rank between the selected best and worst: 1 perfect, 0 chance.
        loss: how much less that is than the reference plan's.
        pace: expected pace of learning, relative to that of exact ranks.
    """

    plan: Plan
    times: npt.NDArray[np.float64]
    cost: IntervalEstimate
    fidelity: Fidelity
    separation: IntervalEstimate
    loss: IntervalEstimate
    pace: float

    @property
    def seconds(self) -> float:
        """Median time of a group."""
        return float(np.median(self.times))

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile of the times of a group."""
        low, high = np.percentile(self.times, [25, 75])
        return float(low), float(high)


def assess(observed: Sequence[Observed], true: torch.Tensor, keep: int, reference: Plan) -> list[MeasuredPlan]:
    """Cost and fidelity of each plan, compared with the reference, which is one of them.

    `true` are the true scores [prompts, N], of which `keep` are selected from a group, half from either end.
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
            pace=float(paces(observation.scores, true, keep).mean()),
        )
        for observation, separation, loss in of_plans
    ]


def times_as_long(times: npt.NDArray[np.float64], others: npt.NDArray[np.float64]) -> IntervalEstimate:
    """Ratio of the times of the same prompts."""
    return IntervalEstimate(*median_interval(times / others))


@dataclass(frozen=True)
class Requirement:
    """Limits that a plan must keep with its whole interval.

    Attributes:
        separation: least separation.
        loss: largest loss of separation against the reference plan; None for any.
    """

    separation: float
    loss: float | None = None

    def met(self, plan: MeasuredPlan) -> bool:
        """Whether the plan surely is good enough."""
        return all(margin >= doubt for margin, doubt in self._margins(plan))

    def missed(self, plan: MeasuredPlan) -> bool:
        """Whether the plan surely is not good enough."""
        return any(margin < -doubt for margin, doubt in self._margins(plan))

    def prompts_to_decide(self, plan: MeasuredPlan) -> float:
        """Number of prompts at which the intervals would decide, if the means stay and intervals narrow as 1 / √n."""
        doubts = [math.inf if margin == 0 else doubt / abs(margin) for margin, doubt in self._margins(plan)]
        return len(plan.times) * max(1.0, *doubts) ** 2

    def _margins(self, plan: MeasuredPlan) -> list[tuple[float, float]]:
        """For each limit: how far inside it the plan is, and the width of the interval towards the limit."""
        margins = [_margin(plan.separation, self.separation)]
        if self.loss is not None:
            lost = plan.loss
            margins.append(_margin(IntervalEstimate(-lost.value, -lost.high, -lost.low), -self.loss))
        return margins

    def text(self) -> str:
        """Such as "a separation of at least 0.8, at most 0.02 less than the reference's"."""
        lost = "" if self.loss is None else f", at most {self.loss:g} less than the reference's"
        return f"a separation of at least {self.separation:g}{lost}"


def _margin(estimate: IntervalEstimate, least: float) -> tuple[float, float]:
    margin = estimate.value - least
    return margin, estimate.value - estimate.low if margin >= 0 else estimate.high - estimate.value


def cheapest(measured: Sequence[MeasuredPlan], requirement: Requirement) -> MeasuredPlan | None:
    """The cheapest plan that meets the requirement; None if there is none."""
    good = [one for one in measured if requirement.met(one)]
    return min(good, key=lambda one: one.seconds) if good else None


def as_cheap(measured: Sequence[MeasuredPlan], chosen: MeasuredPlan, requirement: Requirement) -> list[MeasuredPlan]:
    """Other good plans whose time differs from the chosen plan's by less than the interval, the cheapest first."""
    good = [one for one in measured if one is not chosen and requirement.met(one)]
    equal = [one for one in good if times_as_long(one.times, chosen.times).low <= 1]
    return sorted(equal, key=lambda one: one.seconds)


def verdict(
    measured: Sequence[MeasuredPlan], chosen: MeasuredPlan | None, reference: Plan, requirement: Requirement
) -> list[str]:
    """How sure the decision is, in sentences."""
    prompts = len(measured[0].times)
    few = few_prompts_text(prompts)
    lines = _none_chosen(measured, requirement) if chosen is None else _chosen(measured, chosen, reference, requirement)
    return [*lines, *([few] if few else [])]


def _chosen(
    measured: Sequence[MeasuredPlan], chosen: MeasuredPlan, reference: Plan, requirement: Requirement
) -> list[str]:
    lines = [
        f"{name(chosen.plan)} has a separation of {chosen.separation.text('.3f')}, {chosen.loss.text('.3f')} less than "
        f"{name(reference)}, and takes {chosen.cost.text('.2f')} of its time"
    ]
    others = [one for one in measured if one is not chosen and requirement.met(one)]
    if equal := as_cheap(measured, chosen, requirement):
        lines.append(f"within the interval as cheap: {'; '.join(_compared(one, chosen) for one in equal)}")
    elif others:
        following = min(others, key=lambda one: one.seconds)
        lines.append(f"surely cheaper than the next good plan, {_compared(following, chosen)}")
    else:
        lines.append(f"no other plan reaches {requirement.text()}")
    cheaper = [one for one in measured if one.seconds < chosen.seconds]
    if open_ones := [one for one in cheaper if not requirement.missed(one)]:
        lines.append(_undecided(open_ones, requirement, "cheaper, but not sure to be good enough"))
    elif cheaper:
        lines.append("every cheaper plan surely selects worse than required")
    return lines


def _compared(plan: MeasuredPlan, chosen: MeasuredPlan) -> str:
    ratio = times_as_long(plan.times, chosen.times)
    return f"{name(plan.plan)} ({ratio.text('.2f')} of the time, separation {plan.separation.text('.3f')})"


def _none_chosen(measured: Sequence[MeasuredPlan], requirement: Requirement) -> list[str]:
    if open_ones := [one for one in measured if not requirement.missed(one)]:
        return [_undecided(open_ones, requirement, "not sure to be good enough")]
    best = max(measured, key=lambda one: one.separation.value)
    return [
        f"every plan surely selects worse than required; the best, {name(best.plan)}, has a separation of "
        f"{best.separation.text('.3f')}, {best.loss.text('.3f')} less than the reference"
    ]


def _undecided(plans: Sequence[MeasuredPlan], requirement: Requirement, what: str) -> str:
    """Plans between met and missed, and the prompts that would decide about the one decided first."""
    first = min(plans, key=requirement.prompts_to_decide)
    needed = requirement.prompts_to_decide(first)
    count = f"about {round(needed)}" if needed <= _MANY_PROMPTS else f"more than {_MANY_PROMPTS:,}"
    others = f", and {len(plans) - 1} other plans" if len(plans) > 1 else ""
    return (
        f"{what}: {name(first.plan)} with a separation of {first.separation.text('.3f')}{others}; "
        f"{count} prompts would decide about it"
    )
