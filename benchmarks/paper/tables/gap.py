"""Table 5: what Sol-RL's final reward lacks to BF16 24-in-96, as a share of the gain."""

from support.results import table

from paper.experiments import Experiment
from paper.intervals import Estimate, over_seeds_and_prompts, ratio_of_means
from paper.published import GAP
from paper.tables.common import NOT_RUN, Context, Section, as_json, pairs, rate_text, signed

TITLE = "5. The gap to BF16"
RECIPES = ("naive_scaling", "sol_rl")
MARGIN = 0.1


def experiments(context: Context, *, whole: bool = False) -> list[Experiment]:
    """Sol-RL and BF16 24-in-96 at both lengths, and the trials that choose their learning rate."""
    lengths = (context.programme.iterations, context.programme.long)
    return context.after_trials(RECIPES, [(None, {"iterations": length}) for length in lengths], whole=whole)


def section(context: Context) -> Section:
    """The table."""
    programme = context.tuned
    rows, data = [], {}
    for iterations in (programme.iterations, programme.long):
        changes = {"iterations": iterations}
        bf16, ours = (programme.over_seeds(recipe, changes) for recipe in RECIPES)
        both = pairs(context, bf16, ours, programme.reward)
        if both is None:
            rows.append([str(iterations), NOT_RUN, NOT_RUN, NOT_RUN, NOT_RUN])
            continue
        share = ratio_of_means(both[0] - both[1], both[0])
        means = [over_seeds_and_prompts(values) for values in both]
        few = "" if share.seeds == len(bf16) else f" ({share.seeds} of {len(bf16)} seeds)"
        rows.append([f"{iterations}{few}", *map(signed, means), share_text(share), verdict(share)])
        data[str(iterations)] = {"share": as_json(share), "bf16": as_json(means[0]), "sol_rl": as_json(means[1])}
    lines = [
        *rate_text(context),
        f"Trained on {programme.reward}; gains in standard deviations of the base. Gap: the gain of BF16 less that of",
        "Sol-RL, as a share of the gain of BF16, paired by seed and prompt, with Fieller's interval. The paper reports",
        f"a gap of {GAP:.0%}.",
        "",
        *table(["iterations", "BF16 24-in-96", "Sol-RL", "gap", f"within {MARGIN:.0%}"], rows),
    ]
    return Section(TITLE, lines, {"gap": data})


def share_text(share: Estimate) -> str:
    """A share with its interval, in per cent."""
    if not share.known:
        return f"{share.mean:+.1%} [no limit: the gain itself, or its ratio, is not known well enough]"
    return f"{share.mean:+.1%} [{share.low:+.1%}, {share.high:+.1%}]"


def verdict(share: Estimate) -> str:
    """Whether the interval lies within the margin on both sides."""
    if share.low >= -MARGIN and share.high <= MARGIN:
        return "yes"
    if share.low > MARGIN or share.high < -MARGIN:
        return "no"
    return "not decided"
