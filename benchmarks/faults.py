"""Fault injection with real processes: `python benchmarks/faults.py [--only ROW …] [--trials N]`.

Writes benchmarks/results/faults.{json,md} and prints the page; rows that did not run this time keep their last result.
"""

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from fault_trials.findings import Findings, Row
from solrl_core.interrupts import unwinding
from support.results import Results, options, table

_HEAD = ("row", "guarantee", "trials", "findings", "passed")
_NOTES = """

- `--redis PATH` runs the rows of Redis with another server, here Valkey. With appendfsync always, every server must
  keep what it acknowledged. With everysec, Redis buffers writes in memory during an fsync, and a kill then leaves a
  complete older version, which the trainer notices and pushes again.
- In the row service-killed a batch is a prompt group, the unit in which answers stream. If a group was not sent, all
  its chunks of 24 are generated again.
- The trainer in the row service-killed is only the client and the explorer; complete trainers run in trainer-killed.
- Services and trainers are forked from a process that has imported them, and run the entry points of the commands.
- "Header byte, digest right" omits bytes whose change only gives another alpha, because that is a valid file.
"""


def rows() -> dict[str, Row]:
    from fault_trials import corrupted, explorations, redis_lost, trainings, two_fronts

    every = (two_fronts.ROW, *redis_lost.ROWS, corrupted.ROW, *explorations.ROWS, *trainings.ROWS)
    return {row.name: row for row in every}


def main() -> int:
    """Run the rows, print the page and write it; returns 1 if a guarantee was violated."""
    known = rows()
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=known, metavar="ROW", help=", ".join(known))
    parser.add_argument("--trials", type=int, help="trials per row, instead of the full count")
    parser.add_argument(
        "--redis", help="path of another redis-server; its rows are kept in addition to those of the default one"
    )
    args = parser.parse_args()
    if args.redis:
        os.environ["REDIS_SERVER"] = args.redis
    results = Results("faults", args.out, page)
    stored = results.found.setdefault("rows", {})
    passed = True
    for name in () if args.render else args.only or known:
        row, place = known[name], f"{name}, {_version(args.redis)}" if args.redis else name
        stored[place] = _measure(row, args.trials or row.full)
        passed &= stored[place]["passed"]
        order = [*known]
        stored = dict(sorted(stored.items(), key=lambda one: (order.index(one[0].split(",")[0]), one[0])))
        results.found = {"command": "make faults", "rows": stored}
        results.write()
    results.show()
    return 0 if passed else 1


def _version(program: str) -> str:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return f"{said.split()[0]} {said.split('v=')[1].split()[0]}"


def _measure(row: Row, trials: int) -> dict[str, Any]:
    findings, started = Findings(), time.monotonic()

    def tell(text: str) -> None:
        if sys.stderr.isatty() or findings.trials % max(1, trials // 50) == 0:
            seconds = time.monotonic() - started
            print(f"{row.name} {findings.trials}/{trials} {seconds:.0f} s: {text}", file=sys.stderr, flush=True)

    findings.tell = tell
    row.run(trials, findings)
    for broken in findings.broken[:20]:
        print(f"{row.name}: BROKEN {broken}", file=sys.stderr, flush=True)
    return {
        "promise": row.promise,
        "trials": findings.trials,
        "full": row.full,
        "counted": findings.counted,
        "found": "; ".join(f"{name}: {value}" for name, value in findings.counted.items()),
        "broken": findings.broken,
        "passed": findings.trials > 0 and not findings.broken,
        "minutes": round((time.monotonic() - started) / 60, 1),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
    }


def page(found: Mapping[str, Any]) -> str:
    cells = ((place, one["promise"], _count(one), one["found"], _verdict(one)) for place, one in found["rows"].items())
    lines = [
        "# Fault injection",
        "",
        "By `make faults` (one row: `python benchmarks/faults.py --only ROW`), with real processes on loopback,",
        "killed by SIGKILL. A row with fewer trials than its full count says so. The tests in benchmarks/tests",
        "use short counts.",
        "",
        *table(_HEAD, cells),
    ]
    return "\n".join(lines) + _NOTES


def _count(one: Mapping[str, Any]) -> str:
    return f"{one['trials']:,}" + ("" if one["trials"] >= one["full"] else f" of {one['full']:,}")


def _verdict(one: Mapping[str, Any]) -> str:
    return "yes" if one["passed"] else f"no: {len(one['broken'])} broken"


if __name__ == "__main__":
    with unwinding(signal.SIGTERM):  # so that all servers are stopped
        sys.exit(main())
