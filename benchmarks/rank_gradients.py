"""First gradient of a run on several GPUs against one: `python benchmarks/rank_gradients.py --gpus 2`.

Trains mini-sana for one update per row. AdamW's first moment after it is the summed gradient times a constant. Rows say
where a difference begins:

- the same run again on one GPU, and one that evaluates as few held-out prompts as each of several ranks, in case
  compiled code depends on the batches before it;
- several GPUs, with a replicated and with a sharded base, on their own samples;
- several GPUs on the samples of one GPU, in which only training can differ.

Writes docs/results/rank_gradients.{json,md}; exits with 1 if a gradient differs by more than 1e-3 in relative norm.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rank_recording import OWN
from safetensors.torch import load_file

LIMIT = 1e-3
HELD_OUT = 8
SETTINGS = (
    *("explore.prompts=4", "optimizer.updates=1", "evaluate.rewards=[]", "evaluate.seeds=1", "evaluate.steps=2"),
    f"evaluate.prompts={HELD_OUT}",
)
SAMPLES = ("latents", "scores", "advantages", "conditioning")
RECORDER = Path(__file__).with_name("rank_recording.py")

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Recorded:
    """A finished run.

    Attributes:
        samples: what it drew, on one GPU or on all.
        moments: AdamW's first moments after the update.
        gradients: of each micro-batch.
        file: file of the samples.
    """

    samples: Tensors
    moments: Tensors
    gradients: Tensors
    file: Path


@dataclass(frozen=True)
class Row:
    """Differences from the run on one GPU, relative to its norm.

    Attributes:
        gradient: of the summed gradient.
        samples: of latents, scores, advantages and conditioning, as the run drew them.
        micro_batches, equal: number of micro-batches, and of those whose gradient has the same bits.
        largest: largest of a micro-batch's gradient.
    """

    gradient: float
    samples: dict[str, float]
    micro_batches: int
    equal: int
    largest: float


def main() -> None:
    """Train, compare, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[2])
    parser.add_argument("--device", default="cuda", help="cpu tries it out; without difference")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of all runs")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    device = "CPU" if args.device == "cpu" else torch.cuda.get_device_name()
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, settings = Path(name), (*SETTINGS, f"device={args.device}", *args.set)

        def measure(row: str, gpus: int, *more: str, samples: str = OWN) -> None:
            found = train(folder / str(len(rows)), gpus, (*settings, *more), samples)
            rows[row] = compare(alone, found)
            print(row, rows[row], file=sys.stderr, flush=True)

        alone = train(folder / "alone", 1, settings)
        measure("1, again", 1)
        for gpus in args.gpus:
            own = -(-HELD_OUT // gpus)
            measure(f"1, evaluates {own} prompts instead of {HELD_OUT}", 1, f"evaluate.prompts={own}")
            measure(f"{gpus}, replicated", gpus)
            measure(f"{gpus}, sharded", gpus, "optimizer.shard_base=true")
            measure(f"{gpus}, replicated, on the samples of one GPU", gpus, samples=str(alone.file))
    args.out.mkdir(parents=True, exist_ok=True)
    result = {"device": device, "torch": torch.__version__, "rows": {name: asdict(row) for name, row in rows.items()}}
    (args.out / "rank_gradients.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "rank_gradients.md").write_text(table(device, rows))
    print(table(device, rows))
    sys.exit(int(max(row.gradient for row in rows.values()) > LIMIT))


def train(folder: Path, gpus: int, settings: Sequence[str], samples: str = OWN) -> Recorded:
    """Train for one update, on the run's own samples or on those of a file."""
    folder.mkdir()
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(gpus)] if gpus > 1 else []
    command = [sys.executable, *launch, str(RECORDER), str(folder), samples]
    command += ["run", "--preset", "mini-sana/diffusionnft/clipscore", "--output", str(folder / "run")]
    command += ["--iterations", "1", *(word for setting in settings for word in ("--set", setting))]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    if done.returncode:
        sys.exit(f"the run on {gpus} GPUs ended with {done.returncode}; its messages are above")
    state = load_file(folder / "run" / "checkpoints" / "000001" / "state.safetensors")
    file = folder / "samples.safetensors"
    gradients = [load_file(path) for path in sorted(folder.glob("gradients-*.safetensors"))]
    return Recorded(
        samples=load_file(file),
        moments={name: value for name, value in state.items() if "exp_avg" in name and "exp_avg_sq" not in name},
        gradients={name: value for part in gradients for name, value in part.items()},
        file=file,
    )


def compare(alone: Recorded, other: Recorded) -> Row:
    """Differences of a run from that on one GPU.

    Raises:
        ValueError: the runs did not train the same parameters on the same micro-batches.
    """
    apart = [difference(part(alone.gradients, name), part(other.gradients, name)) for name in alone.gradients]
    return Row(
        gradient=difference(alone.moments, other.moments),
        samples={name: difference(part(alone.samples, name), part(other.samples, name)) for name in SAMPLES},
        micro_batches=len(apart),
        equal=apart.count(0.0),
        largest=max(apart),
    )


def part(tensors: Mapping[str, torch.Tensor], name: str) -> Tensors:
    """The tensors of this name, or of the section of this name."""
    return {key: value for key, value in tensors.items() if key == name or key.startswith(f"{name}/")}


def difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Norm of the difference, relative to the norm of `one`."""
    if one.keys() != other.keys() or not one:
        raise ValueError(f"got tensors {sorted(other)[:4]} and others; expected those of one GPU: {sorted(one)[:4]}")
    apart, whole = (
        sum(float(value.double().square().sum()) for value in values)
        for values in ((one[name].double() - other[name].double() for name in one), one.values())
    )
    return float((apart / whole) ** 0.5)


def table(device: str, rows: Mapping[str, Row]) -> str:
    """Markdown page."""
    lines = [
        "# First gradient on several GPUs against one",
        "",
        f"By `python benchmarks/rank_gradients.py` on {device}: mini-sana, one update of 4 prompts. Differences are",
        f"relative to the norm on one GPU, of the gradient at most {LIMIT:g}. Samples are those that each run drew.",
        "",
        f"| GPUs | gradient | {' | '.join(SAMPLES)} | micro-batches with the same bits | most of a micro-batch |",
        "|---" * (len(SAMPLES) + 4) + "|",
    ]
    for name, row in rows.items():
        samples = " | ".join(f"{row.samples[sample]:.1e}" for sample in SAMPLES)
        bits = f"{row.equal} of {row.micro_batches}"
        lines.append(f"| {name} | {row.gradient:.1e} | {samples} | {bits} | {row.largest:.1e} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
