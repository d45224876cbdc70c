"""Three ideas for cheaper exploring: `python benchmarks/cheaper_exploring.py [--device cuda] [--models mini-sana …]`.

Evaluates each on the scores of `plan_fidelity.py`, which it measures where they are missing, against the plan of four
fitted steps, pruned to half after the third. Sure candidates: the most extreme halfway are selected without their last
step. Uneven halves: more of the best than of the worst are kept halfway, or fewer. Adaptive groups: only some prompts
get all candidates. Writes docs/results/cheaper_exploring.{json,md}.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import numpy.typing as npt
import torch
from cheaper_exploring_table import ALIKE, HALF, KNOWN, REFERENCE, SAVED, SELECTED, SHARE, table
from plan_fidelity import Scores, held_out, measure_all, options, pruned, ranks, worse_than
from plan_fidelity_table import ALLOWED, FITTED, STEPS
from rank_tables import command
from solrl_proto.selection import best_worst
from solrl_trainer.evaluation import mean_interval

NAME = "cheaper_exploring"
KEEP, SURE = (32, 40, 48, 56, 64), (0, 2, 4, 6, 8)
"""Candidates kept halfway, and how many of them at either end are sure."""
BEST = {40: (14, 17, 20, 23, 26), 48: (16, 20, 24, 28, 32)}
"""By number of candidates kept halfway: how many of them are the best."""
FIRST = (48, 64)
"""Candidates that every prompt gets in an adaptive group."""
ORDERS = 16
"""Random orders of the candidates, over which adaptive groups are averaged."""
RESAMPLES = 10_000

Interval = tuple[float, float, float]
"""Mean, and its 95 % interval over prompts."""
Rule = Callable[["Explored", int], torch.Tensor]
"""Values [settings, prompts] from the first candidates of each group; the prompts with the largest get the others."""


@dataclass(frozen=True)
class Explored:
    """Scores [settings, prompts, candidates] of the same prompts; a setting is a model and a reward.

    Attributes:
        true: BF16 at ten steps.
        exact: six unpruned steps.
        halfway: the images predicted after three of four fitted steps.
        final: after the fourth.
    """

    true: torch.Tensor
    exact: torch.Tensor
    halfway: torch.Tensor
    final: torch.Tensor

    @staticmethod
    def of(scores: Sequence[Scores], precision: str, prompts: int) -> "Explored":
        """The scores of all models at a precision."""
        keys = ("true", *(f"{precision}/{at}" for at in (f"{STEPS}/{STEPS}", f"{FITTED}/{HALF}", f"{FITTED}/{FITTED}")))
        return Explored(*(torch.cat([each[key][:prompts].transpose(0, 1) for each in scores]) for key in keys))

    def in_order(self, order: torch.Tensor) -> "Explored":
        """The same with the candidates in another order."""
        return Explored(self.true[..., order], self.exact[..., order], self.halfway[..., order], self.final[..., order])

    def proxies(self, plan: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Proxy scores by which a plan selects, from the halfway and the final scores [candidates] of each group."""
        groups = zip(self.halfway.flatten(0, 1), self.final.flatten(0, 1), strict=True)
        return torch.stack([plan(halfway, final) for halfway, final in groups]).view_as(self.final)

    def ranks(self, proxies: torch.Tensor) -> dict[str, torch.Tensor]:
        """Mean true ranks [settings, prompts] of the best and of the worst that the proxies select."""
        found = ranks(proxies.flatten(0, 1), self.true.flatten(0, 1))
        return {half: found[half].view(self.true.shape[:2]) for half in ("top", "bottom")}


def main() -> None:
    """Measure the missing scores, evaluate the ideas, print the page and write it."""
    args = options(__doc__).parse_args()
    prompts = held_out(args.prompts)
    measured = {model: measure_all(model, prompts, args) for model in args.models}
    names = ("models", "prompts", "candidates", "precisions", "chosen_on", "device")
    settings = {name: getattr(args, name) for name in names}
    ideas: dict[str, Any] = {"sure": sure_candidates, "uneven": uneven_halves, "adaptive": adaptive_groups}
    result: dict[str, Any] = {
        "command": command(NAME, options(__doc__), settings | {"solver": args.solver}),
        **settings,
        "orders": ORDERS,
        "solver": {model: solver for model, (_, _, solver, _) in measured.items()},
        "numerics": next(iter(measured.values()))[3],
        "solvers": {model: fitted.model_dump(mode="json") for model, (_, fitted, _, _) in measured.items()},
    }
    for precision in args.precisions:
        explored = Explored.of([scores for scores, *_ in measured.values()], precision, args.prompts)
        for name, idea in ideas.items():
            result.setdefault(name, []).extend({"precision": precision, **row} for row in idea(explored))
    deviations = explored.true.std(2)
    result["varies"] = float((deviations.std(1) / deviations.mean(1)).mean())
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{NAME}.json").write_text(json.dumps(result, indent=1) + "\n")
    text = table(result)
    (args.out / f"{NAME}.md").write_text(text)
    print(text)


def sure_candidates(explored: Explored) -> list[dict[str, Any]]:
    """A row per number kept, number of sure ones and use of their scores; `SAVED` and more are proposed."""
    size = explored.true.shape[2]
    exact = explored.ranks(explored.exact)
    reference = explored.ranks(explored.proxies(partial(pruned, keep=REFERENCE)))
    spent = HALF * size + REFERENCE
    rows = []
    for keep, sure, selected in [(k, s, way) for k in KEEP for s in SURE for way in (True, False) if s or way]:
        found = explored.ranks(explored.proxies(partial(with_sure, keep=keep, sure=sure, selected=selected)))
        refined = keep - 2 * sure
        steps, change = HALF * size + refined, pooled(reference, found)
        enough = refined >= 2 * SELECTED
        alike = explored.ranks(explored.proxies(partial(pruned, keep=refined))) if enough else None
        rows.append(
            {
                "keep": keep,
                "sure": sure,
                "selected": selected,
                "cost": steps / (STEPS * size),
                "saved": 1 - steps / spent,
                "images": (size + refined) / (size + REFERENCE),
                **worse(exact, found),
                "change": change,
                "than_pruning": pooled(alike, found) if alike else None,
                "proposed": 1 - steps / spent >= SAVED and change["both"][1] <= 0,
            }
        )
    return rows


def with_sure(halfway: torch.Tensor, final: torch.Tensor, keep: int, sure: int, selected: bool) -> torch.Tensor:
    """Scores [candidates] of a plan that refines, of the `keep` most extreme halfway, all but the `sure` at either end.

    The sure ones are selected before all others or, if not `selected`, compared by their score halfway. NaN for pruned
    candidates.
    """
    scores, order = pruned(halfway, final, keep), best_worst(halfway, keep)
    best, doubtful, worst = order[:sure], order[sure : keep - sure], order[keep - sure :]
    refined = final[doubtful]
    scores[best] = refined.max() + 1 if selected else halfway[best]
    scores[worst] = refined.min() - 1 if selected else halfway[worst]
    return scores


def uneven_halves(explored: Explored) -> list[dict[str, Any]]:
    """A row per number of the best among those kept halfway."""
    exact = explored.ranks(explored.exact)
    rows = []
    for keep, numbers in BEST.items():
        found = {n: explored.ranks(explored.proxies(partial(split, best=n, worst=keep - n))) for n in numbers}
        even = increases(exact, found[keep // 2])
        for best, each in found.items():
            own = increases(exact, each)
            changes = {
                "larger_change": larger_change(even, own),
                "overall_change": larger_change(even.mean(1, keepdim=True), own.mean(1, keepdim=True)),
            }
            rows.append({"keep": keep, "best": best, **worse(exact, each), **changes})
    return rows


def split(halfway: torch.Tensor, final: torch.Tensor, best: int, worst: int) -> torch.Tensor:
    """Scores [candidates] of a plan that keeps this many of the best and of the worst halfway; NaN for the others."""
    order = best_worst(halfway, len(halfway))
    scores, kept = torch.full_like(final, torch.nan), [*order[:best], *order[len(order) - worst :]]
    scores[kept] = final[kept]
    return scores


def worse(exact: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Increase in true rank over the exact plan, over all settings and at most, and settings that are within bounds."""
    each = increases(exact, found).mean(2)
    return {
        "worse": pooled(exact, found),
        "most_worse": float(each.max()),
        "within": int((each.amax(0) <= ALLOWED).sum()),
        "settings": each.shape[1],
    }


def increases(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Increase in true rank of the best and of the worst, [2, settings, prompts]."""
    return torch.stack([after["top"] - before["top"], before["bottom"] - after["bottom"]]).double()


def pooled(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> dict[str, Interval]:
    """Increase in true rank of the best, the worst and both, mean over settings."""
    halves = worse_than(*({half: each.mean(0) for half, each in found.items()} for found in (before, after)))
    return {**halves, "both": mean_interval(increases(before, after).mean((0, 1)).numpy())}


def larger_change(before: torch.Tensor, after: torch.Tensor) -> Interval:
    """Change of the larger of two increases [2, settings, prompts], mean over settings, resampled over prompts."""
    count = before.shape[2]
    drawn = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    weights = torch.stack([torch.bincount(torch.from_numpy(row), minlength=count) for row in drawn]).double() / count

    def larger(values: torch.Tensor, by: torch.Tensor) -> npt.NDArray[np.float64]:
        means: npt.NDArray[np.float64] = (values @ by.T).amax(0).mean(0).numpy()
        return means

    low, high = np.percentile(larger(after, weights) - larger(before, weights), [2.5, 97.5])
    once = torch.full((1, count), 1 / count, dtype=torch.float64)
    return float((larger(after, once) - larger(before, once))[0]), float(low), float(high)


def contrast(proxy: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """True score of the 12 best minus that of the 12 worst that the proxy selects in each group [..., candidates]."""
    best_first = true.gather(-1, proxy.argsort(dim=-1, descending=True, stable=True)).double()
    return best_first[..., :SELECTED].mean(-1) - best_first[..., -SELECTED:].mean(-1)


def _spread(explored: Explored, first: int) -> torch.Tensor:
    return explored.final[..., :first].std(-1)


def _standardised(explored: Explored, first: int) -> torch.Tensor:
    proxy = explored.final[..., :first]
    return contrast(proxy, proxy) / proxy.std(-1)


def _moved(explored: Explored, first: int) -> torch.Tensor:
    """Movement of the scores in the last step, in standard deviations: how unsettled a group is."""
    return (explored.final - explored.halfway)[..., :first].std(-1) / _spread(explored, first)


def _true_gain(explored: Explored, first: int) -> torch.Tensor:
    few = contrast(explored.final[..., :first], explored.true[..., :first])
    return contrast(explored.final, explored.true) - few


RULES: dict[str, Rule] = {
    "widest spread of scores": _spread,
    "narrowest spread of scores": lambda explored, first: -_spread(explored, first),
    "largest contrast in standard deviations": _standardised,
    "smallest contrast in standard deviations": lambda explored, first: -_standardised(explored, first),
    "scores moved most in the last step": _moved,
    "scores moved least in the last step": lambda explored, first: -_moved(explored, first),
    f"{KNOWN}largest gain": _true_gain,
    f"{KNOWN}largest gain in standard deviations": lambda e, first: _true_gain(e, first) / e.true.std(-1),
}
"""Rules for who gets the second batch."""


def adaptive_groups(explored: Explored) -> list[dict[str, Any]]:
    """A row per size of the first batch and rule: contrast over that of groups of `SHARE` of all candidates."""
    count, size = explored.true.shape[1:]
    equal = round(SHARE * size)
    orders = [torch.randperm(size, generator=torch.Generator().manual_seed(seed)) for seed in range(ORDERS)]
    shuffled = [explored.in_order(order) for order in orders]
    by_size = {
        n: torch.stack([contrast(one.final[..., :n], one.true[..., :n]) for one in shuffled])
        for n in (*FIRST, equal, size)
    }

    def row(rule: str, first: int, mean: float, contrasts: torch.Tensor) -> dict[str, Any]:
        change = gains((contrasts - by_size[equal]).mean(0), explored.true)
        return {"rule": rule, "first": first, "mean": mean, **change}

    rows = [row(ALIKE, n, float(n), found) for n, found in by_size.items()]
    for first in FIRST:
        more = round(count * (equal - first) / (size - first))
        mean = first + (size - first) * more / count
        for name, rule in RULES.items():
            chosen = torch.stack([largest(rule(one, first), more) for one in shuffled])
            rows.append(row(name, first, mean, torch.where(chosen, by_size[size], by_size[first])))
    return rows


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Whether each value is among the `count` largest of its row."""
    return torch.zeros_like(values, dtype=torch.bool).scatter(-1, values.topk(count).indices, True)


def gains(change: torch.Tensor, true: torch.Tensor) -> dict[str, Any]:
    """Change of a contrast [settings, prompts] in each unit, mean over settings, and settings it is better or worse in.

    Units are standard deviations of all images of the base, and of those of each prompt.
    """
    found: dict[str, Any] = {}
    for unit, by in (("base", true.flatten(1).std(1)[:, None]), ("group", true.std(2))):
        each = (change / by.double()).numpy()
        found[unit] = mean_interval(each.mean(0))
        found[f"{unit}_pairs"] = [sum(mean_interval(sign * one)[1] > 0 for one in each) for sign in (1, -1)]
    return found


if __name__ == "__main__":
    main()
