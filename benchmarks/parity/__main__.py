"""Our algorithms against their public code, on fixed tensors: `python benchmarks/parity NAME CLONE`.

CLONE is a clone of the repository that NAME.py names. Its functions are read and executed from the
clone; none of its code is in this repository. Writes the public code's values to benchmarks/parity/data, for the
tests, and the comparison to algorithm_parity.json in benchmarks/results; exits with 1 if a value differs by more
than 1e-5.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from parity.published import Published, of_cases

LIMIT = 1e-5
RESULT = Path(__file__).parents[1] / "results/algorithm_parity.json"
DATA = Path(__file__).parent / "data"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="algorithm, a module of benchmarks/parity")
    parser.add_argument("clone", type=Path, help="clone of its public code")
    arguments = parser.parse_args()
    algorithm = importlib.import_module(f"parity.{arguments.name}")
    published = Published(arguments.clone)
    theirs = of_cases(algorithm.CASES, partial(algorithm.theirs, published))
    differences = relative_differences(of_cases(algorithm.CASES, algorithm.ours), theirs)
    row = {
        "repository": algorithm.REPOSITORY,
        "commit": published.commit,
        "limit": LIMIT,
        "values": sum(value.numel() for value in theirs.values()),
        "largest_relative_difference": max(differences.values()),
        "relative_differences": differences,
    }
    print(json.dumps(row, indent=1))
    results = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    RESULT.write_text(json.dumps(results | {arguments.name: row}, indent=1) + "\n")
    store(DATA / f"{arguments.name}.json", row["repository"], row["commit"], theirs)
    return 0 if all(difference <= LIMIT for difference in differences.values()) else 1


def relative_differences(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Largest difference of each value's elements, relative to the value's largest element.

    Raises:
        ValueError: names or sizes differ.
    """
    sizes = [{name: value.numel() for name, value in values.items()} for values in (ours, theirs)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"got values {sizes[0]}; expected those of the public code, {sizes[1]}")
    differences = {}
    for name, value in theirs.items():
        off = (ours[name].double().flatten() - value.double().flatten()).abs().max()
        # Where the public value is 0 throughout, any difference is infinite.
        differences[name] = float(off / value.double().abs().max()) if off else 0.0
    return differences


def store(path: Path, repository: str, commit: str, values: Mapping[str, torch.Tensor]) -> None:
    """Write values of public code as JSON with a line for each, in nine digits."""
    rounded = {name: [float(f"{one:.9g}") for one in value.flatten().tolist()] for name, value in values.items()}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in rounded.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n "repository": "{repository}",\n "commit": "{commit}",\n "values": {{\n{lines}\n }}\n}}\n')


if __name__ == "__main__":
    sys.exit(main())
