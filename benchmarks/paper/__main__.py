"""Sol-RL's tables on the miniatures: `python benchmarks/paper TABLE… [--jobs 2] [--minutes 25]`.

Does the runs that the tables need and are missing, then writes all tables from whatever is finished. The command can be
stopped (`--minutes` stops it) and run again: finished runs are skipped, unfinished ones resume from their last
checkpoint. `--runs` has a small file for each finished run; folders of several machines of one kind are merged by
copying their files. `--plan` counts the runs, `--show` only writes the tables.
Writes benchmarks/results/paper.{json,md} and the folder paper beside them, with an archive of the finished runs:
`--stored` begins with those.
"""

import argparse
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parents[1]))

from solrl_trainer.settings.presets import MODELS, REWARD_WORDS, ConfigError, parse_override
from support.results import table

from paper.ceiling import measure_ceiling
from paper.compute import SHAPES
from paper.experiments import JUDGES, REWARDS, Experiment, Programme
from paper.finished import MixedRunsError, read_finished
from paper.page import write_page
from paper.runner import run_missing
from paper.stored import ARCHIVE, take_stored
from paper.tables import ON_REQUEST, TABLES
from paper.tables.common import Context
from paper.tables.damaged import write_damaged_models
from paper.tuning import SEED
from paper.words import read_words

_ELSEWHERE = ("runs", "stored", "out", "jobs", "minutes", "device", "ceiling", "plan", "show", "tables", "results")
"""Options that do not belong to the command that the page names."""


def main() -> int:
    """Run what is missing and write the page; returns 1 if runs are still missing."""
    args = _options().parse_args()
    try:
        return _main(args)
    except (ConfigError, MixedRunsError) as error:
        sys.exit(str(error))
    except FileNotFoundError as error:
        if not args.stored or error.filename != str(args.out / ARCHIVE):
            raise
        sys.exit(f"--stored: got no {error.filename}; expected the finished runs that an earlier command wrote there")


def _main(args: argparse.Namespace) -> int:
    programme = programme_of(args)
    until = time.monotonic() + 60 * args.minutes
    if args.stored:
        take_stored(args.out, args.runs)
    context = read(programme, args.runs, args.results)
    if args.ceiling:
        measure_ceiling(programme.model, programme.judged_by, programme.held_out, args.out)
    if args.plan:
        print(plan(context))
        return 0
    if "damaged" in args.tables and not args.show:
        write_damaged_models()
    failed: set[str] = set()
    while not args.show and time.monotonic() < until:
        # Trials of learning rates come first; the runs that depend on them are known only afterwards.
        needed = missing(context, args.tables)
        begin = [one for one in needed if one.name not in failed]
        if not begin:
            break
        outcomes = run_missing(
            begin, args.runs, jobs=args.jobs, until=until, device=args.device, shown_seed=programme.seeds[0]
        )
        failed |= {name for name, outcome in outcomes.items() if outcome != "done"}
        context = read(programme, args.runs, args.results)
    if read_words(context.runs.values(), args.runs):
        context = read(programme, args.runs, args.results)
    print(write_page(context, args.runs, args.out, command(args), args.tables))
    still = missing(context, args.tables, whole=True)
    if still:
        print(f"{len(still)} runs of {', '.join(args.tables)} are missing; run the command again", file=sys.stderr)
    return int(bool(still))


def _options() -> argparse.ArgumentParser:
    usual = Programme()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "tables",
        nargs="*",
        default=[one for one in TABLES if one not in ON_REQUEST],
        metavar="TABLE",
        help=f"any of {', '.join(TABLES)}; by default all but {' and '.join(ON_REQUEST)}",
    )
    parser.add_argument("--model", choices=[name for name in MODELS if name.startswith("mini")], default=usual.model)
    parser.add_argument("--reward", choices=list(REWARD_WORDS), default=usual.reward, help="of tables with one reward")
    parser.add_argument("--rewards", nargs="+", choices=list(REWARD_WORDS), default=list(REWARDS))
    parser.add_argument("--judges", nargs="*", default=list(JUDGES), help="rewards that only judge")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(usual.seeds))
    parser.add_argument("--iterations", type=int, default=usual.iterations, help="of a Sol-RL run")
    parser.add_argument("--long", type=int, default=usual.long, help="iterations of the long runs")
    parser.add_argument("--every", type=int, default=usual.every, help="iterations between evaluations")
    parser.add_argument("--shape", choices=list(SHAPES), default=usual.shape, help="model whose times weigh passes")
    parser.add_argument("--unprepared", help="model whose weights were not prepared for NVFP4, for tables 2 and 3")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of all runs")
    parser.add_argument("--runs", type=Path, default=Path("runs/paper"))
    parser.add_argument("--stored", action="store_true", help="begin with the finished runs that are stored in --out")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs, shared by all visible GPUs")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time limit; run again to continue")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--ceiling", action="store_true", help="score true scenes of the prompts, too")
    parser.add_argument("--plan", action="store_true", help="print how many runs each table needs; run nothing")
    parser.add_argument("--show", action="store_true", help="write the tables from the finished runs; run nothing")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument(
        "--results", type=Path, default=Path("benchmarks/results"), help="stored results of other benchmarks"
    )
    return parser


def programme_of(args: argparse.Namespace) -> Programme:
    """The programme of these options.

    Raises:
        ConfigError: a table, a seed or a setting that cannot be used.
    """
    if unknown := [name for name in args.tables if name not in TABLES]:
        raise ConfigError(f"got table {unknown[0]!r}; expected any of {', '.join(TABLES)}")
    if SEED in args.seeds:
        raise ConfigError(f"got seed {SEED}, which the learning rates are chosen with; expected others")
    return Programme(
        model=args.model,
        reward=args.reward,
        rewards=tuple(args.rewards),
        judges=tuple(args.judges),
        seeds=tuple(args.seeds),
        iterations=args.iterations,
        long=args.long,
        every=args.every,
        shape=args.shape,
        unprepared=args.unprepared,
        changes=dict(map(parse_override, args.set)),
    )


def read(programme: Programme, folder: Path, results: Path) -> Context:
    """The finished runs of all tables, of which some are known only when the learning rates are chosen."""
    context = Context(programme, {}, results)
    while True:
        needed = [one for module in TABLES.values() for one in module.experiments(context)]
        found = Context(programme, read_finished(list(dict.fromkeys(needed)), folder), results)
        if found.runs.keys() == context.runs.keys():
            return found
        context = found


def missing(context: Context, tables: Sequence[str], *, whole: bool = False) -> list[Experiment]:
    """Runs of these tables that are not finished: trials first, then seed by seed, so that tables fill evenly."""
    needed = dict.fromkeys(one for name in tables for one in TABLES[name].experiments(context, whole=whole))
    return sorted((one for one in needed if one.name not in context.runs), key=lambda one: _place(one, context))


def plan(context: Context) -> str:
    """Runs that each table needs, how many of them are finished, and how many missing ones no table above needs."""
    rows, seen = [], set[str]()
    for name in TABLES:
        needed = list(dict.fromkeys(TABLES[name].experiments(context, whole=True)))
        lacking = {one.name for one in missing(context, [name], whole=True)}
        rows.append((name, len(needed), len(needed) - len(lacking), len(lacking - seen)))
        seen |= lacking
    return "\n".join(table(("table", "runs", "finished", "missing, not in a table above"), rows))


def _place(experiment: Experiment, context: Context) -> int:
    seeds = context.programme.seeds
    return seeds.index(experiment.seed) if experiment.seed in seeds else -1


def command(args: argparse.Namespace) -> str:
    """Command line that gives the settings of these options."""
    words = ["python", "benchmarks/paper"]
    for name, default in vars(_options().parse_args([])).items():
        value = getattr(args, name)
        if name not in _ELSEWHERE and value != default:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


if __name__ == "__main__":
    sys.exit(main())
