"""Rewards along trainings of ours and of peers: which are equal, and their sections of the page of `peers.py`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from paper.intervals import Estimate, over_seeds
from peer_drives.turns import LEARNINGS, Learning
from support.results import Row, table

OURS = "ours"
TURNS_SHOWN = 5
FRESH = 21
"""First of the seeds that were drawn after the margin was set."""
MARGIN = 0.25
"""Rewards are equal if the interval of their difference lies within this share of our gain since the first turn."""
PROMPTS, SAMPLES = ("2 red circles", "3 blue squares"), 18
"""Prompts of every turn of trainings whose rewards are compared, and samples of each."""
OWN = Learning(timestep_fraction=0.99)
"""DiffusionNFT's own settings, at the learning rate of miniatures: its own, 3e-4, is for SD3.5-Medium."""
FAST_SAMPLES = 24
"""Samples of a prompt, as DiffusionNFT's own settings and `fast` have them."""


def learning_section(rows: Sequence[Row]) -> Iterator[str]:
    """Section of trainings with the same settings."""
    same = LEARNINGS["diffusionnft"]
    yield "## Rewards along trainings with the same settings"
    yield ""
    fresh, older = ([row for row in rows if (row["seed"] >= FRESH) == new] for new in (True, False))
    yield from _equal(fresh)
    yield "By `python benchmarks/peers.py CLONE --learn TURNS` on a CPU: mini-sd3 without guidance, learning rate"
    yield f"{same.learning_rate:g}. A turn has {len(PROMPTS)} prompts, {SAMPLES} samples of each, and one step at"
    yield f"{same.timestep_fraction:.0%} of the noise levels; with Flow-GRPO, two steps at all stochastic levels."
    yield ""
    yield f"- Reward: {same.reward}, the mean over these turns and seeds."
    yield "- Difference: theirs minus ours, with its 95 % interval over the seeds."
    yield f"- Margin: {MARGIN:.0%} of what our reward gained since the first turn."
    yield "- Equal: yes if the whole interval lies within the margin."
    yield "- CPU s: seconds of a turn. They are the CPU's, not a GPU's, since the miniatures train on a CPU."
    yield f"- Seeds below {FRESH} are older than this rule; their seconds are not stored."
    head = ("turns", "peer", "seeds", "reward, ours", "reward, theirs", "difference", "margin", "equal")
    cpu = ("CPU s, ours", "CPU s, theirs")
    for title, seeds, seconds in ((f"Seeds from {FRESH} on:", fresh, cpu), (f"Seeds below {FRESH}:", older, ())):
        yield from ("", title, "")
        yield from table((*head, *seconds), _curves(seeds, bool(seconds)))


def _equal(rows: Sequence[Row]) -> Iterator[str]:
    """What the table of fresh seeds says: beside whom rewards are equal, and whose turn is shorter."""
    peers = dict.fromkeys(row["beside"] for row in rows)
    spans_of = {peer: list(spans([row for row in rows if row["beside"] == peer])) for peer in peers}
    equal = {peer: all(span.equal for span in spans_of[peer]) for peer in peers}
    ratio = {peer: np.divide(*np.mean([span.cpu for span in spans_of[peer]], 0)) for peer in peers}
    for claim, names in (
        ("In these turns, our rewards equal those of {}.", [peer for peer in peers if equal[peer]]),
        ("Beside {}, it is open whether they do.", [peer for peer in peers if not equal[peer]]),
        ("Our turn takes more CPU seconds than that of {}.", [f"{p} ({x:.2f} ×)" for p, x in ratio.items() if x > 1]),
        ("Our turn takes fewer CPU seconds than that of {}.", [f"{p} ({x:.2f} ×)" for p, x in ratio.items() if x <= 1]),
    ):
        if names:
            yield f"**{claim.format(' and '.join(names))}**"
    if peers:
        yield ""


def same_draws_section(rows: Sequence[Row]) -> Iterator[str]:
    """Section of trainings in which the peer has our random draws."""
    yield "## Rewards with the same random draws"
    yield ""
    yield "By `--same-draws`: as above, but DiffusionNFT's code gets the initial noise, noise levels and training noise"
    yield "of our run. Small differences, as of rounding, grow from turn to turn."
    yield ""
    yield from table(("seed", "trainer", "rewards of each turn"), (_rewards(row) for row in rows))


def fast_section(rows: Sequence[Row]) -> Iterator[str]:
    """Section of trainings with settings of their own."""
    yield "## `fast` beside DiffusionNFT's own settings"
    yield ""
    yield f"By `--fast`, on a CPU: both draw {FAST_SAMPLES} samples of each prompt in 10 steps in BF16, and have the"
    yield f"miniatures' learning rate, {OWN.learning_rate:g}. DiffusionNFT's code trains on all samples, ours on 4 with"
    yield "the update of `fast`. Rewards are means of turns that end within these CPU seconds of a trainer, over all"
    yield "drawn samples. The difference is theirs minus ours."
    yield ""
    yield from table(
        ("CPU seconds", "seeds", "turns, ours", "theirs", "reward, ours", "theirs", "difference"), halves(rows)
    )


def halves(rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    """Rewards in both halves of the CPU seconds that all trainings have reached."""
    last = min(sum(row["cpu"]) for row in rows)
    for begin, end in ((0, last / 2), (last / 2, last)):
        of_trainers = []
        for of_ours in (True, False):
            runs = [row for row in rows if (row["trainer"] == OURS) == of_ours]
            ends = [np.cumsum(row["cpu"]) for row in runs]
            within = [(begin < at) & (at <= end) for at in ends]
            of_trainers.append([np.array(row["rewards"])[at] for row, at in zip(runs, within, strict=True)])
        if not all(len(turns) for runs in of_trainers for turns in runs):
            continue
        mine, theirs = (np.array([turns.mean() for turns in runs]) for runs in of_trainers)
        turns = (f"{np.mean([len(each) for each in runs]):.1f}" for runs in of_trainers)
        means = (f"{rewards.mean():.4f}" for rewards in (mine, theirs))
        yield f"{begin:.0f} to {end:.0f}", str(len(mine)), *turns, *means, f"{over_seeds(theirs - mine):+.4f}"


def _rewards(row: Row) -> Sequence[str]:
    return str(row["seed"]), row["trainer"], " ".join(f"{reward:.3f}" for reward in row["rewards"])


def _curves(rows: Sequence[Row], with_cpu: bool) -> Iterator[Sequence[str]]:
    for each in spans(rows):
        yield (
            f"{each.first} to {each.last}",
            each.peer,
            str(len(each.ours)),
            *(f"{rewards.mean():.4f}" for rewards in (each.ours, each.theirs)),
            f"{each.difference:+.4f}",
            f"±{each.margin:.4f}",
            "yes" if each.equal else "open",
            *(f"{seconds:.1f}" for seconds in each.cpu if with_cpu),
        )


@dataclass(frozen=True)
class Span:
    """Rewards of trainings in five turns, the mean of each seed's: ours and a peer's.

    Attributes:
        first, last: turns.
        ours, theirs: [seeds].
        margin: for the difference of equal trainings.
        cpu: CPU seconds of a turn, ours and theirs; empty if they are not stored.
    """

    peer: str
    first: int
    last: int
    ours: np.ndarray
    theirs: np.ndarray
    margin: float
    cpu: tuple[float, ...]

    @property
    def difference(self) -> Estimate:
        """Peer minus ours, mean of seeds."""
        return over_seeds(self.theirs - self.ours)

    @property
    def equal(self) -> bool:
        """Whether the whole interval of the difference lies within the margin."""
        return max(-self.difference.low, self.difference.high) <= self.margin


def spans(rows: Sequence[Row]) -> Iterator[Span]:
    """The spans of five turns of each peer's trainings that reached them, and of ours beside it."""
    for peer in dict.fromkeys(row["beside"] for row in rows):
        of_peer = [row for row in rows if row["beside"] == peer]
        longest = max(len(row["rewards"]) for row in of_peer)
        for first in range(0, longest, TURNS_SHOWN):
            last = min(first + TURNS_SHOWN, longest)
            reached = [row for row in of_peer if len(row["rewards"]) >= last]
            ours, theirs = (
                np.array([np.mean(row["rewards"][first:last]) for row in reached if row["trainer"] == name])
                for name in (OURS, peer)
            )
            begun = np.mean([row["rewards"][0] for row in reached if row["trainer"] == OURS])
            cpu = [
                float(np.mean([row["cpu"][first:last] for row in reached if row["trainer"] == name]))
                for name in (OURS, peer)
                if all("cpu" in row for row in reached)
            ]
            margin = MARGIN * float(ours.mean() - begun)
            yield Span(peer, first + 1, last, ours, theirs, margin, tuple(cpu))
