"""Our trainer beside peers' own: `python benchmarks/peers.py CLONE...` on a GPU, with clones of their repositories.

Their code runs unedited from the clones; benchmarks/peer_drives says what is replaced around it. Clones: NVlabs/Sana
(Sol-RL), X-GenGroup/Flow-Factory, NVlabs/DiffusionNFT, yifan123/flow_grpo. All trainers of a model do the same work, in
processes of their own and in turns: a prompt's samples are generated with all steps, and trained on. Models have random
weights at true size. Sol-RL's SANA imports timm 0.6.13, einops, termcolor and pyrallis. Writes
benchmarks/results/peers.{json,md}, the JSON after each part.

`--tiny` tries all out on a CPU, with the miniatures. `--learn` compares rewards instead of times: there, two trainers
start from mini-sd3 and train on the same prompts with the same settings.
"""

import argparse
import importlib
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
from peer_drives import ours
from peer_drives.stubs import COMMON
from peer_drives.turns import BEHAVIOUR, LEARNINGS, WARM_UP, Turns, TurnsOverError, Work
from peer_rewards import FAST_SAMPLES, OURS, OWN, PROMPTS, SAMPLES, fast_section, learning_section, same_draws_section
from support.results import Results, Row, device_name, options, table
from training_phase import NAMES

DRIVES = ("sol_rl", "flow_factory", "diffusion_nft", "flow_grpo")
MODELS = ("flux", "sd3", "sd3-medium", "sana")
RECIPES = ("diffusionnft", "flowgrpo")
TINY = 4
"""Samples of a prompt on a CPU."""
PARTS = ("sample", "train")
COMPILED = "sample compiled"
LEARNING, SAME_DRAWS, FAST = "learning", "learning, same draws", "learning, fast"
FAST_TURNS = 3
"""Turns of `fast` for each of DiffusionNFT's, which take about as long."""
WIDE = 1.1
"""Turns that differ by this factor are shown."""
COLUMNS = (
    *("levels", "solver", "steps", "guidance", "attention", BEHAVIOUR, "compiled", "weights", "autocast", "recomputed"),
    *("decoder", "sampled at once", "trained at once"),
)
NOT_DRIVEN = {
    "verl-omni": "Its trainer and the workers that train are Ray actors, and vLLM-Omni's servers sample for it",
    "UniRL": "Ray actors sample and train, also on one GPU",
}
"""Peer, verl-project/verl-omni and Tencent-Hunyuan/UniRL → reason in its source."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("clones", nargs="*", type=Path, metavar="CLONE", help="clone of a peer's repository")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--samples", type=int, default=24, help="samples of a prompt")
    parser.add_argument(
        "--compiled", action="store_true", help="time sampling alone, peers' with their compiled copy of the model"
    )
    parser.add_argument("--turns", type=int, default=2, help="measured turns of each trainer")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no turn after so many seconds")
    parser.add_argument(
        "--learn", type=int, default=0, metavar="TURNS", help="turns of trainings on a CPU, with rewards"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4], help="of these trainings")
    parser.add_argument(
        "--same-draws", action="store_true", help="in these trainings, DiffusionNFT gets our noise and noise levels"
    )
    parser.add_argument(
        "--fast",
        action="store_true",
        help="in these trainings, DiffusionNFT has its own settings, ours are `fast`; one rate",
    )
    parser.add_argument("--tiny", action="store_true", help="on a CPU, with the miniatures and few samples")
    args = parser.parse_args()
    if not args.clones and not args.render:
        parser.error("got no CLONE; expected the folders of clones of peers' repositories")
    results = Results("peers", args.out, page)
    ended = args.render or (learn if args.learn else compare)(args, results)
    results.show()
    if not ended:
        sys.exit("a trainer failed, or the time was over; the rows so far are written")


def compare(args: argparse.Namespace, results: Results) -> bool:
    """Add the rows of all models and recipes; False if some are missing."""
    drives = {clone.resolve(): drive_of(clone) for clone in args.clones}
    if args.compiled and not all(drive.COMPILES for drive in drives.values()):
        names = ", ".join(drive.NAME for drive in drives.values() if not drive.COMPILES)
        able = ", ".join(drive.NAME for drive in map(imported, DRIVES) if drive.COMPILES)
        raise SystemExit(f"got --compiled with {names}; expected a peer that has a compiled copy of its model: {able}")
    deadline = time.monotonic() + args.seconds
    complete = True
    for model, recipe in product(args.models, RECIPES):
        peers = {clone: drive for clone, drive in drives.items() if model in drive.MODELS and recipe in drive.RECIPES}
        if peers:
            device, samples = ("cpu", TINY) if args.tiny else ("cuda", args.samples)
            work = Work(model, recipe, device, samples, compiled=args.compiled)
            complete &= compare_trainers(work, peers, args.turns, deadline, results)
    return complete


def learn(args: argparse.Namespace, results: Results) -> bool:
    """Add the rewards of our trainer and of peers along trainings with the same settings; False if some are missing."""
    complete = True
    for clone, seed in product(args.clones, args.seeds):
        drive = drive_of(clone)
        if (args.same_draws or args.fast) and drive is not imported("diffusion_nft"):
            raise SystemExit(f"got --same-draws or --fast with {clone}; expected a clone of DiffusionNFT, or neither")
        model = next((model for model in ("sd3-medium", "sd3") if model in drive.MODELS), None)
        if model is None:
            raise SystemExit(f"got --learn with {clone}; expected a clone of a peer that trains SD3.5")
        (recipe,) = drive.RECIPES
        learning = replace(LEARNINGS[recipe], same_draws=args.same_draws)
        samples = SAMPLES
        if args.fast:
            learning, samples = OWN, FAST_SAMPLES
        work = Work(model, recipe, "cpu", samples, PROMPTS, seed, learning)
        common = {
            "model": work.model,
            "recipe": work.recipe,
            "part": FAST if args.fast else SAME_DRAWS if args.same_draws else LEARNING,
            "beside": drive.NAME,
            "seed": seed,
        }
        with (
            Trainer(None, replace(work, recipe="fast") if args.fast else work) as our_trainer,
            Trainer(clone, work) as peer,
        ):
            curves: dict[str, list[float]] = {OURS: [], drive.NAME: []}
            seconds: dict[Trainer, list[float]] = {our_trainer: [], peer: []}
            takes = {our_trainer: FAST_TURNS if args.fast else 1, peer: 1}
            for turn in range(args.learn):
                for trainer, number in takes.items():
                    for _ in range(number):
                        trainer.begin(turn)
                for (trainer, number), curve in zip(takes.items(), curves.values(), strict=True):
                    for _ in range(number):
                        list(trainer.parts())
                        curve.append(trainer.score)
                        seconds[trainer].append(trainer.cpu)
                if our_trainer.failed or peer.failed:
                    complete = False
                    break
                for (name, curve), (trainer, cpu) in zip(curves.items(), seconds.items(), strict=True):
                    row = {"trainer": name, "rewards": curve, "cpu": cpu, "facts": trainer.facts}
                    results.add(common | row, *common, "trainer")
    return complete


def drive_of(clone: Path) -> Any:
    """The drive of a clone, by a file of it."""
    for drive in map(imported, DRIVES):
        if (clone / drive.MARK).is_file():
            return drive
    marks = ", ".join(f"{drive.NAME} ({drive.MARK})" for drive in map(imported, DRIVES))
    raise SystemExit(f"got {clone}; expected the folder of a clone, which has one of these files: {marks}")


def commit_of(clone: Path) -> str:
    """Commit of a clone; empty if it is no git folder, or git is missing."""
    if not (clone / ".git").exists():
        return ""
    with suppress(OSError):
        command = ["git", "-C", str(clone), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def imported(name: str) -> Any:
    return importlib.import_module(f"peer_drives.{name}")


def compare_trainers(work: Work, peers: Mapping[Path, Any], turns: int, deadline: float, results: Results) -> bool:
    """Add the rows of our trainer and of peers, in turns; False if a trainer failed, or the time was over."""
    common = {"model": work.model, "recipe": work.recipe}
    common |= {"device": device_name(work.device), "torch": torch.__version__}
    with ExitStack() as stack:
        trainers = {OURS: stack.enter_context(Trainer(None, work))}
        trainers |= {drive.NAME: stack.enter_context(Trainer(clone, work)) for clone, drive in peers.items()}
        for turn in range(WARM_UP, turns):
            for name in list(trainers)[:: 1 if turn % 2 else -1]:
                if time.monotonic() > deadline:
                    return False
                trainers[name].begin(turn)
                for part in trainers[name].parts():
                    if work.compiled and part == "train":
                        continue
                    for row in rows_of_part(trainers, part):
                        row |= {"part": COMPILED} if work.compiled else {}
                        results.add(common | row, "model", "recipe", "trainer", "part")
        return not any(trainer.failed for trainer in trainers.values())


def rows_of_part(trainers: Mapping[str, "Trainer"], part: str) -> Iterator[Row]:
    """Rows of a part, of the trainers that have been timed; "ours" has our seconds of the same call."""
    timed = {name: trainer for name, trainer in trainers.items() if trainer.seconds[part]}
    medians = {name: statistics.median(trainer.seconds[part]) for name, trainer in timed.items()}
    for name, trainer in timed.items():
        figures = {"s": medians[name], "ours": medians.get(OURS), "turns": trainer.seconds[part], **trainer.last[part]}
        yield {"trainer": name, "part": part, **figures, "facts": trainer.facts}


class Trainer:
    """A trainer in a process of its own.

    Attributes:
        facts: how it works, by column; known after its warm-up.
        seconds: of a sample, by part and turn.
        last: number of samples and peak memory of the newest turn, by part.
        score: mean reward of the last turn's samples.
        cpu: its CPU seconds.
        failed: whether its process ended early.
    """

    def __init__(self, clone: Path | None, work: Work) -> None:
        self.facts: dict[str, Any] = {}
        self.seconds: dict[str, list[float]] = {part: [] for part in PARTS}
        self.last: dict[str, Row] = {}
        self.score = self.cpu = 0.0
        self.failed = False
        context = multiprocessing.get_context("spawn")
        self._pipe, pipe = context.Pipe()
        self._process = context.Process(target=train, args=(clone, work, pipe))
        self._process.start()
        pipe.close()

    def __enter__(self) -> Self:
        return self

    def begin(self, turn: int) -> None:
        """Let it take a turn."""
        with suppress(OSError):
            self._pipe.send(turn)

    def parts(self) -> Iterator[str]:
        """Yield each part of the turn once it is timed; none if its process has failed, with a traceback on stderr."""
        try:
            while "part" in (found := self._pipe.recv()):
                self.seconds[found["part"]].append(found["s"])
                self.last[found["part"]] = {name: found[name] for name in ("samples", "peak")}
                yield found["part"]
            self.facts, self.score, self.cpu = found["facts"], found["score"], found["cpu"]
        except (EOFError, OSError):
            self.failed = True

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._pipe.send(None)
        self._process.join(10)
        self._process.kill()


def train(clone: Path | None, work: Work, pipe: Connection) -> None:
    """Take turns until there are no more."""
    turns = Turns(pipe, work.device)
    with suppress(TurnsOverError):
        if clone is None:
            ours.run(work, turns)
        else:
            turns.facts["commit"] = commit_of(clone)
            drive_of(clone).run(clone, work, turns)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


HEAD = (
    *("model, samples", "trainer", "sample, s", "× ours", "train, s", "× ours"),
    *("24 of 24, s", "24 of 96, s", "GiB"),
)


def page(found: Mapping[str, Any]) -> str:
    lines = ["# Beside peers' own trainers", ""]
    timed = [row for row in found.get("rows", ()) if not row["part"].startswith(LEARNING)]
    learned, same, quick = (
        [row for row in found.get("rows", ()) if row["part"] == part] for part in (LEARNING, SAME_DRAWS, FAST)
    )
    sections = [*([_times(timed)] if timed else ()), *([learning_section(learned)] if learned else ())]
    sections += [same_draws_section(same)] if same else []
    sections += [fast_section(quick)] if quick else []
    for section in sections:
        lines += section
        lines += [""]
    lines += ["## What is replaced around peers' code", "", *(f"- {stub}" for stub in COMMON)]
    lines += [f"- of {drive.NAME}, {stub}" for drive in map(imported, DRIVES) for stub in drive.STUBS]
    commits = "; ".join(_commits(found.get("rows", ())))
    lines += ["", f"Commits of the clones: {commits}."] if commits else []
    lines += ["", "## Not timed", "", *(f"- {run}, which the command can time" for run in _not_timed(timed))]
    lines += [f"- {peer}: one process cannot drive it. {reason}." for peer, reason in NOT_DRIVEN.items()]
    return "\n".join(lines) + "\n"


def _times(rows: list[Row]) -> Iterator[str]:
    """Section of seconds and memory."""
    runs: dict[tuple[int, int, bool, bool, str], dict[str, Row]] = {}
    for row in sorted(rows, key=_place):
        runs.setdefault(_place(row), {})["train" if row["part"] == "train" else "sample"] = row
    devices = ", ".join(dict.fromkeys(f"{row['device']}, torch {row['torch']}" for row in rows))
    yield from _claims(rows)
    yield f"By `python benchmarks/peers.py CLONE...` on one {devices}: peers' unedited code and ours, with random"
    yield "weights of the true shapes. In its turn, a trainer generates one prompt's samples with all steps, and trains"
    yield "on them. Trainers take turns after a warm-up. Rewards cost nothing, and text encoders are absent."
    yield ""
    yield from table(HEAD, (_cells(run.get("sample"), run.get("train")) for run in runs.values()))
    yield ""
    yield "- Seconds: of one sample, the median of the turns, with the range of turns that differ."
    yield "- × ours: over our seconds in the same call of the command."
    yield "- 24 of 24: seconds of a prompt, computed, if 24 samples are generated and trained. 24 of 96: if 96 are"
    yield "  generated in BF16, and 24 trained."
    yield "- GiB: the largest peak of allocated tensors."
    yield "- `--compiled`: the peer generates with its compiled copy of the model. Training is not timed then."
    yield "- An empty cell: not timed."
    yield ""
    yield "### What differs"
    yield ""
    yield from table(("model", "trainer", *COLUMNS), (_facts(next(iter(run.values()))) for run in runs.values()))
    yield ""
    yield "- Guidance 1: none; FLUX.1 has it as an input."
    yield "- Attention: *torch's*, the kernel that torch chooses; *fastest correct*, the first of cuDNN's, flash and"
    yield "  memory-efficient attention whose gradients agree with float32."
    yield "- Behaviour policy: what the loss compares with. *Computed*: by a pass at every trained point. *Once it"
    yield "  differs*: no pass while the policies are equal. *Recorded*: log-probabilities, while sampling."
    yield "- Weights: of the frozen transformer. Autocast: what they are converted to. Recomputed: activations, in the"
    yield "  backward pass. Decoder: weights of the autoencoder."


def _place(row: Row) -> tuple[int, int, bool, bool, str]:
    """Place of a row's line in the tables."""
    of_peer = row["trainer"] != OURS
    return MODELS.index(row["model"]), RECIPES.index(row["recipe"]), row["part"] == COMPILED, of_peer, row["trainer"]


def _claims(rows: Sequence[Row]) -> Iterator[str]:
    """What the table says, in a few sentences."""
    works = {"sample": "to generate", "train": "to train", COMPILED: "to generate with its compiled model"}
    theirs = [row for row in rows if row["trainer"] != OURS and row["ours"]]
    ratios = {part: sorted(row["s"] / row["ours"] for row in theirs if row["part"] == part) for part in works}
    times = [f"{_range(ratios[part])} × {work}" for part, work in works.items() if ratios[part]]
    if times:
        yield f"**A peer's own code takes {', '.join(times).replace('×', '× our time', 1)}.**"
    peaks: dict[str, dict[str, int]] = {}
    for row in sorted(rows, key=_place):
        if row["part"] in PARTS and row["peak"]:
            trainers = peaks.setdefault(_title(row), {})
            trainers[row["trainer"]] = max(row["peak"], trainers.get(row["trainer"], 0))
    compared = {model: trainers for model, trainers in peaks.items() if OURS in trainers and len(trainers) > 1}
    for amount, extreme in (("most", max), ("least", min)):
        models = [model for model, trainers in compared.items() if trainers[OURS] == extreme(trainers.values())]
        if models:
            yield f"**Ours needs the {amount} memory on {'; '.join(models)}.**"
    yield "No row is between equals: the second table says what differs."
    yield ""


def _range(ascending: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{end:.2f}" for end in (ascending[0], ascending[-1])))


def _cells(sample: Row | None, train: Row | None) -> Iterator[str]:
    measured = next(filter(None, (sample, train)))
    yield f"{_title(measured)}, {measured['samples']}"
    yield _trainer(measured)
    for row in (sample, train):
        yield _seconds(row["s"], row["turns"]) if row else ""
        yield f"{row['s'] / row['ours']:.2f}" if row and row["ours"] else ""
    for candidates in (24, 96):
        yield f"{candidates * sample['s'] + 24 * train['s']:.1f}" if sample and train else ""
    peaks = [row["peak"] for row in (sample, train) if row and row["peak"]]
    yield f"{max(peaks) / 2**30:.1f}" if peaks else ""


def _trainer(row: Row) -> str:
    return f"{row['trainer']}, `--compiled`" if row["part"] == COMPILED else str(row["trainer"])


def _seconds(median: float, turns: Sequence[float]) -> str:
    """The median; with the range, if that is wide."""
    between = f" ({min(turns):.3f} to {max(turns):.3f})" if max(turns) > WIDE * min(turns) else ""
    return f"{median:.3f}{between}"


def facts_of(row: Row) -> dict[str, Any]:
    """How a row's trainer works, by column: what was measured, and what its drive fixes."""
    drive = ours if row["trainer"] == OURS else _drive_named(row["trainer"])
    return row["facts"] | drive.constants(row["model"], row["recipe"])


def _facts(row: Row) -> Sequence[str]:
    facts = facts_of(row)
    return _title(row), _trainer(row), *(str(facts[name]) for name in COLUMNS)


def _drive_named(name: str) -> Any:
    return next(drive for drive in map(imported, DRIVES) if name == drive.NAME)


def _not_timed(rows: Sequence[Row]) -> Iterator[str]:
    """What drives can train, without a row."""
    timed = {(row["trainer"], row["model"], row["recipe"]) for row in rows}
    for drive in map(imported, DRIVES):
        for model, recipe in product(drive.MODELS, drive.RECIPES):
            if (drive.NAME, model, recipe) not in timed:
                yield f"{drive.NAME} on {_title({'model': model, 'recipe': recipe})}"


def _commits(rows: Sequence[Row]) -> Iterator[str]:
    """Each peer and the commits of its rows: those that are stored, else the drive's."""
    for drive in map(imported, DRIVES):
        facts = [row.get("facts", {}) for row in rows if row["trainer"] == drive.NAME]
        commits = (fact["commit"][:7] or "not known" if "commit" in fact else drive.COMMIT for fact in facts)
        if facts:
            yield f"{drive.NAME} {' and '.join(dict.fromkeys(commits))}"


def _title(row: Row) -> str:
    return NAMES[row["model"]] + (", FlowGRPO" if row["recipe"] == "flowgrpo" else "")


if __name__ == "__main__":
    main()
