"""Fault injection with real processes: `python benchmarks/faults.py [--only ROW …] [--trials N] [--short] [--resume]`.

Prints a table and writes docs/results/faults.{json,md}; rows that did not run this time keep their last result. A long
row may run in pieces: `--resume` adds the missing trials to those of the last run.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from fault_trials.findings import Findings, Row
from rich.console import Console
from rich.table import Table
from solrl_core.interrupts import unwinding

_NOTES = """

- Redis 7.0 has no WAITAOF; `--redis PATH` runs the rows of Redis with another server, here Valkey, which has it.
  With appendfsync always, every server must keep what it acknowledged; with everysec, only one with WAITAOF. Without it
  Redis buffers writes in memory during an fsync, and a kill then leaves a complete older version.
- In the row service-killed a batch is a prompt group, the unit in which answers stream. If a group was not sent, all
  its chunks of 24 are generated again.
- The trainer in the row service-killed is only the client and the explorer; complete trainers run in trainer-killed.
- Services and trainers are forked from a process that has imported them, and run the entry points of the commands.
- "Header byte, digest right" omits bytes whose change only gives another alpha, because that is a valid file.
"""


def rows() -> dict[str, Row]:
    """All rows, cheap ones first."""
    from fault_trials import (
        abandoned,
        corrupted,
        judge_answers,
        judge_secret,
        nested_json,
        odd_images,
        races,
        rank_killed,
        ray_worker_killed,
        redis_killed,
        redis_restarted,
        reward_raises,
        reward_stalled,
        service_killed,
        trainer_killed,
        two_fronts,
        worker_killed,
        worker_stopped,
        workers_killed,
    )

    modules = (
        *(races, two_fronts, redis_killed, redis_restarted, corrupted, abandoned),
        *(judge_secret, judge_answers, odd_images, reward_stalled, reward_raises, nested_json),
        *(service_killed, worker_killed, worker_stopped, workers_killed, ray_worker_killed, trainer_killed),
        rank_killed,
    )
    return {module.ROW.name: module.ROW for module in modules}


def main() -> int:
    """Run the rows, print and write the table; returns 1 if a guarantee was violated."""
    known = rows()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=known, metavar="ROW", help=", ".join(known))
    parser.add_argument("--trials", type=int, help="trials per row, instead of the full count")
    parser.add_argument("--short", action="store_true", help="the short counts that the tests use")
    parser.add_argument("--resume", action="store_true", help="run only the trials that these rows lack")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument(
        "--redis", help="path of another redis-server; its rows are kept in addition to those of the default one"
    )
    args = parser.parse_args()
    if args.redis:
        os.environ["REDIS_SERVER"] = args.redis
    results: dict[str, dict[str, Any]] = _read(args.out)
    passed = True
    for name in args.only or known:
        place = f"{name}, {_version(args.redis)}" if args.redis else name

        def keep(result: dict[str, Any], place: str = place) -> None:
            results[place] = result
            _write(args.out, {one: results[one] for one in sorted(results, key=lambda one: _order(one, known))})

        row = known[name]
        before = _begun(row, results.get(place)) if args.resume else {}
        _measure(row, args.trials or (row.short if args.short else row.full), keep, before)
        passed &= results[place]["passed"]
    Console().print(_table(results))
    return 0 if passed else 1


def _begun(row: Row, last: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The last result, if its trials count: those of another promise do not."""
    return last if row.resumable and last is not None and last["promise"] == row.promise else {}


def _version(program: str) -> str:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return f"{said.split()[0]} {said.split('v=')[1].split()[0]}"


def _order(place: str, known: dict[str, Row]) -> tuple[int, str]:
    return list(known).index(place.split(",")[0]), place


def _measure(row: Row, trials: int, keep: Callable[[dict[str, Any]], None], before: Mapping[str, Any]) -> None:
    """Run a row, saving its findings also while it runs, since a long one may be interrupted.

    `before` is the row's result, of which the missing trials are run, or empty.
    """
    findings = Findings(**{name: before[name] for name in ("trials", "counted", "broken") if before})
    started, done = time.monotonic() - 60 * before.get("minutes", 0), findings.trials

    def result() -> dict[str, Any]:
        return {
            "promise": row.promise,
            "trials": findings.trials,
            "full": row.full,
            "counted": dict(findings.counted),
            "found": findings.found,
            "broken": list(findings.broken),
            "passed": findings.passed,
            "minutes": round((time.monotonic() - started) / 60, 1),
            "date": time.strftime("%Y-%m-%d"),
            "python": platform.python_version(),
        }

    def tell(text: str) -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty() or done % max(1, trials // 50) == 0:
            print(f"{row.name} {done}/{trials} {time.monotonic() - started:.0f} s: {text}", file=sys.stderr, flush=True)
            keep(result())

    row.run(trials, tell, findings)
    keep(result())
    for broken in findings.broken[:20]:
        print(f"{row.name}: BROKEN {broken}", file=sys.stderr, flush=True)


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / "faults.json"
    return json.loads(path.read_text())["rows"] if path.is_file() else {}


def _write(folder: Path, results: dict[str, dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    document = {"command": "make faults", "rows": results}
    (folder / "faults.json").write_text(json.dumps(document, indent=1) + "\n")
    lines = [
        "# Fault injection",
        "",
        "By `make faults` (one row: `python benchmarks/faults.py --only ROW`), with real processes on loopback,",
        "killed by SIGKILL. A row with fewer trials than its full count says so. The tests in tests/benchmarks",
        "use short counts.",
        "",
        "| row | guarantee | trials | findings | passed |",
        "|---|---|---|---|---|",
    ]
    for place, one in results.items():
        lines.append(f"| {place} | {one['promise']} | {_count(one)} | {one['found']} | {_verdict(one)} |")
    (folder / "faults.md").write_text("\n".join(lines) + _NOTES)


def _table(results: dict[str, dict[str, Any]]) -> Table:
    table = Table("row", "trials", "findings", "passed", title="Fault injection", show_lines=True)
    for place, one in results.items():
        table.add_row(place, _count(one), one["found"], _verdict(one))
    return table


def _count(one: dict[str, Any]) -> str:
    return f"{one['trials']:,}" + ("" if one["trials"] >= one["full"] else f" of {one['full']:,}")


def _verdict(one: dict[str, Any]) -> str:
    return "yes" if one["passed"] else f"no: {len(one['broken'])} broken"


if __name__ == "__main__":
    with unwinding(signal.SIGTERM):  # so that all servers are stopped
        sys.exit(main())
