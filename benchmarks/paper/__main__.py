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

from solrl_trainer.settings.presets import ConfigError
from support.results import table

from paper.arms import Context, needed
from paper.ceiling import measure_ceiling
from paper.experiments import Experiment, Programme
from paper.finished import ARCHIVE, MixedRunsError, read_finished, take_stored
from paper.page import write_page
from paper.runner import run_all
from paper.tables import TABLES
from paper.tables.quantised import write_damaged_models
from paper.words import read_words


def main() -> int:
    """Run what is missing and write the page; returns 1 if runs are still missing."""
    usual, asked = ([name for name, one in TABLES.items() if one.on_request == on] for on in (False, True))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "tables",
        nargs="*",
        default=usual,
        metavar="TABLE",
        help=f"any of {', '.join(TABLES)}; by default all but {' and '.join(asked)}",
    )
    parser.add_argument("--unprepared", help="model whose weights were not prepared for NVFP4, for tables 2 and 3")
    parser.add_argument("--runs", type=Path, default=Path("runs/paper"))
    parser.add_argument("--stored", action="store_true", help="begin with the finished runs that are stored in --out")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs, shared by all visible GPUs")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time limit; run again to continue")
    parser.add_argument("--ceiling", action="store_true", help="score true scenes of the prompts, too")
    parser.add_argument("--plan", action="store_true", help="print how many runs each table needs; run nothing")
    parser.add_argument("--show", action="store_true", help="write the tables from the finished runs; run nothing")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    if unknown := [name for name in args.tables if name not in TABLES]:
        sys.exit(f"got table {unknown[0]!r}; expected any of {', '.join(TABLES)}")
    if args.stored and not (archive := args.out / ARCHIVE).is_file():
        sys.exit(f"--stored: got no {archive}; expected the finished runs that an earlier command wrote there")
    try:
        return tables_of(args)
    except (ConfigError, MixedRunsError) as error:
        sys.exit(str(error))


def tables_of(args: argparse.Namespace) -> int:
    """Do what the options say."""
    programme, until = Programme(unprepared=args.unprepared), time.monotonic() + 60 * args.minutes
    if args.stored:
        take_stored(args.out, args.runs)
    context = read(programme, args.runs)
    if args.ceiling:
        held_out = programme.experiment("sol_rl", programme.seeds[0]).config.evaluate.prompts
        measure_ceiling(programme.model, programme.judged_by, held_out, args.out)
    if args.plan:
        print(plan(context))
        return 0
    if "damaged" in args.tables and not args.show:
        write_damaged_models()
    failed: set[str] = set()
    while not args.show and time.monotonic() < until:
        # Trials of learning rates come first; the runs that depend on them are known only afterwards.
        begin = [one for one in missing(context, args.tables) if one.name not in failed]
        if not begin:
            break
        failed |= run_all(begin, args.runs, jobs=args.jobs, until=until)
        context = read(programme, args.runs)
    if read_words(context.runs.values(), args.runs):
        context = read(programme, args.runs)
    words = ["python", "benchmarks/paper", *(["--unprepared", args.unprepared] if args.unprepared else [])]
    print(write_page(context, args.runs, args.out, shlex.join(words)))
    still = missing(context, args.tables, whole=True)
    if still:
        print(f"{len(still)} runs of {', '.join(args.tables)} are missing; run the command again", file=sys.stderr)
    return int(bool(still))


def read(programme: Programme, folder: Path) -> Context:
    """The finished runs of all tables, of which some are known only when the learning rates are chosen."""
    context = Context(programme, {})
    while True:
        found = Context(programme, read_finished(runs_of(context, TABLES), folder))
        if found.runs.keys() == context.runs.keys():
            return found
        context = found


def runs_of(context: Context, tables: Sequence[str], *, whole: bool = False) -> list[Experiment]:
    """The trials of these tables, and the runs whose learning rate is known; `whole`: all runs."""
    return needed([arm for name in tables for arm in TABLES[name].arms(context).values()], whole=whole)


def missing(context: Context, tables: Sequence[str], *, whole: bool = False) -> list[Experiment]:
    """Runs of these tables that are not finished: trials first, then seed by seed, so that tables fill evenly."""
    found = [one for one in runs_of(context, tables, whole=whole) if one.name not in context.runs]
    return sorted(found, key=lambda one: one.seed)


def plan(context: Context) -> str:
    """Runs that each table needs, how many of them are finished, and how many missing ones no table above needs."""
    rows, seen = [], set[str]()
    for name in TABLES:
        count, lacking = len(runs_of(context, [name], whole=True)), missing(context, [name], whole=True)
        rows.append((name, count, count - len(lacking), len({one.name for one in lacking} - seen)))
        seen |= {one.name for one in lacking}
    return "\n".join(table(("table", "runs", "finished", "missing, not in a table above"), rows))


if __name__ == "__main__":
    sys.exit(main())
