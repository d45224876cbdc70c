"""Load tests of one service: `python benchmarks/load` (or `make load`).

Each row starts real services and clients on loopback and measures everything it compares in one run. Writes
docs/results/load.{json,md,png}; rows that did not run this time keep their last result.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parents[1]))

import scale
from common import Row
from lookahead import lookahead
from overload import overload
from pushing import pushing
from sharing import sharing, sharing_workers, small_beside_big
from soak import soak
from starving import starving

COMMAND = "python benchmarks/load"


def main() -> int:
    """Run the rows, print and write the table; returns 1 if a target was not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument(
        "--short", action="store_true", help="small counts, to check that the rows work; writes nothing"
    )
    rows: dict[str, Callable[[bool], Row]] = {
        "sharing": lambda short: sharing(2, 10) if short else sharing(8, 40),
        "sharing-workers": lambda short: sharing_workers(12 if short else 120),
        "small": lambda short: small_beside_big(3 if short else 20),
        "starving": lambda short: starving(12 if short else 240),
        "overload": lambda short: overload(96, 5) if short else overload(960, 60),
        "push": lambda short: pushing(),
        "lookahead": lambda short: lookahead(4 if short else 12),
        "scale": lambda short: scale.scale(1, {24: (1, 24), 96: (4, 24)}, (1, 2)) if short else scale.scale(),
        "soak": lambda short: soak(60 if short else 1200),
    }
    parser.add_argument("--only", nargs="+", choices=rows, default=list(rows))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "load.json"
    found = json.loads(file.read_text()) if file.is_file() else {}
    for name in args.only:
        start = time.perf_counter()
        made = rows[name](args.short)
        found[name] = asdict(made) | {"seconds": time.perf_counter() - start, "cores": len(os.sched_getaffinity(0))}
        print(f"{name}: {made.found}", file=sys.stderr, flush=True)
        if not args.short:
            file.write_text(json.dumps(found, indent=1) + "\n")
    table = [
        "# Load tests of one service",
        "",
        f"By `{COMMAND}`: the miniature SANA, real processes on loopback, clients on the same CPU.",
        "",
        "| test | target | result | met | cores |",
        "|---|---|---|---|---|",
    ]
    for name in rows:
        if name in found:
            r = found[name]
            table.append(
                f"| {r['name']} | {r['wanted']} | {r['found']} | {'yes' if r['met'] else 'no'} | {r['cores']} |"
            )
    if "scale" in found:
        table += ["", "![cost per candidate](load.png)"]
        if not args.short:
            scale.plot(found["scale"]["figures"], args.out / "load.png")
    if not args.short:
        (args.out / "load.md").write_text("\n".join(table) + "\n")
    print("\n".join(table))
    return 0 if all(found[name]["met"] for name in args.only) else 1


if __name__ == "__main__":
    sys.exit(main())
