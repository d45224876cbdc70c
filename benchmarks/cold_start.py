"""Cold start of a service in this process, for `rollout_phase.py`: prints ["part", seconds] as each part ends.

Arguments: the device; the start time of the process, by `time.time`; "all" to include the work that a service does
between its first candidate and being ready.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def main() -> None:
    """Run the parts of a service's start in order. Weights are random instead of read from disk."""
    device, started = sys.argv[1], float(sys.argv[2])
    last = [started]

    @contextmanager
    def part(name: str) -> Iterator[None]:
        try:
            yield
            if device != "cpu":
                torch.cuda.synchronize()
        except Exception as error:  # parts after the first candidate may fail
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            if name not in LATER:
                raise
            return
        now = time.time()
        print(json.dumps([name, now - last[0]]), flush=True)
        last[0] = now

    import torch
    from rollout_path import ServedWay
    from solrl_core.families.skeleton import materialize
    from solrl_core.fingerprint import part_digests
    from solrl_core.generator import CHUNK_SIZE, Generator
    from solrl_core.precision import supported_tiers
    from solrl_core.rewards import RewardSet
    from solrl_proto.rollouts import Plan
    from true_size import random_hps, skeleton

    with part("import"):
        torch.ones(1, device=device)
    with part("build"), tempfile.TemporaryDirectory() as folder:
        backbone = materialize(skeleton("flux", Path(folder), device), device)
    with part("reward"):
        rewards = RewardSet({"hpsv2": random_hps(device)})
    with part("quantise"):
        way = ServedWay(Generator(backbone, "fp8" if device != "cpu" else "nvfp4"), rewards)
    with part("compile, first candidates"):
        way.explore("a", range(CHUNK_SIZE), Plan(steps=1))
    print(json.dumps(["first candidate", time.time() - started]), flush=True)
    with part(QUARTER):
        way.explore("a", range(1), Plan(steps=1))
    if sys.argv[3:] == ["all"]:
        with part(DIGESTS):
            part_digests(backbone.parts)
        with part(SHARES):
            for tier in supported_tiers(backbone.device):
                backbone.quantized_share(tier)


QUARTER = "compile, a quarter of a batch"
DIGESTS = "digests"
SHARES = "shares of what is quantised"
LATER = (QUARTER, DIGESTS, SHARES)

if __name__ == "__main__":
    main()
