"""First gradient of a run on several GPUs against one: `python benchmarks/rank_gradients.py --gpus 2`.

Trains mini-sana for one update per number of GPUs, with a replicated and with a sharded base. AdamW's first moment
after the first update is the summed gradient times a constant. Writes docs/results/rank_gradients.{json,md}; exits with
1 if a gradient differs by more than 1e-3 in relative norm.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

LIMIT = 1e-3
SETTINGS = (
    *("explore.prompts=4", "optimizer.updates=1", "evaluate.rewards=[]", "evaluate.prompts=8", "evaluate.seeds=1"),
    "evaluate.steps=2",
)


def main() -> int:
    """Train, compare, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[2])
    parser.add_argument("--device", default="cuda", help="cpu tries it out; without difference")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    device = "CPU" if args.device == "cpu" else torch.cuda.get_device_name()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        alone = first_moments(Path(folder), 1, args.device, ())
        for gpus in args.gpus:
            for name, extra in (("replicated", ()), ("sharded", ("optimizer.shard_base=true",))):
                found[f"{gpus}, {name}"] = apart(alone, first_moments(Path(folder), gpus, args.device, extra))
    args.out.mkdir(parents=True, exist_ok=True)
    result = {"device": device, "torch": torch.__version__, "relative": found}
    (args.out / "rank_gradients.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "rank_gradients.md").write_text(table(device, found))
    print(table(device, found))
    return int(max(found.values()) > LIMIT)


def first_moments(folder: Path, gpus: int, device: str, extra: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """AdamW's first moments after one update."""
    output = folder / "-".join((str(gpus), *extra))
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(gpus)] if gpus > 1 else []
    command = [sys.executable, *launch, "-m", "solrl_trainer", "run", "--preset", "mini-sana/diffusionnft/clipscore"]
    command += ["--output", str(output), "--iterations", "1"]
    settings = (*SETTINGS, f"device={device}", *extra)
    command += [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    if done.returncode:
        sys.exit(f"the run on {gpus} GPUs ended with {done.returncode}; its messages are above")
    state = load_file(output / "checkpoints" / "000001" / "state.safetensors")
    return {name: value.double() for name, value in state.items() if "exp_avg" in name and "exp_avg_sq" not in name}


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Norm of the difference, relative to the norm of `one`."""
    if one.keys() != other.keys() or not one:
        raise ValueError(f"got first moments of {len(one)} and {len(other)} parameters; expected the same ones")
    difference, whole = (
        sum(float(value.square().sum()) for value in values)
        for values in ((one[name] - other[name] for name in one), one.values())
    )
    return float((difference / whole) ** 0.5)


def table(device: str, found: dict[str, float]) -> str:
    """Markdown page."""
    lines = [
        "# First gradient on several GPUs against one",
        "",
        f"By `python benchmarks/rank_gradients.py` on {device}: mini-sana, one update of 4 prompts.",
        "",
        f"| GPUs, base | relative difference (limit {LIMIT:g}) |",
        "|---|---|",
        *(f"| {name} | {value:.1e} |" for name, value in found.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
