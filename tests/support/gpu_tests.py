"""Tests that need a GPU: what a machine lacks for them, and the record of their last run."""

import json
import os
import subprocess
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

PACKAGES = ("torch", "triton", "transformers", "diffusers", "peft")


@cache
def lacking(units: str = "any") -> str:
    """What this machine lacks for tests of some units of a GPU: fp8, hopper, nvfp4, or any; empty if nothing."""
    import torch

    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    from solrl_core.kernels.operation import has_descriptors
    from solrl_core.precision.fp8 import has_fp8
    from solrl_core.precision.te import nvfp4_obstacle

    device = torch.device("cuda")
    obstacles = {
        "any": "",
        "fp8": "" if has_fp8(device) else "needs a GPU with FP8 units",
        "hopper": "" if has_descriptors(device) else "needs a GPU from Hopper on",
        "nvfp4": nvfp4_obstacle(device) and "needs NVFP4 units and Transformer Engine",
    }
    return obstacles[units] or ""


class Record:
    """Shows failures as they happen; at the end, writes GPU, versions, commit and counts to a JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
        self.began = time.time()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            print(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.counts["failed"] += report.failed

    def pytest_sessionfinish(self) -> None:
        import torch

        if not torch.cuda.is_available():
            return
        head = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=False)
        record = {
            "date": time.strftime("%Y-%m-%d", time.gmtime(self.began)),
            "commit": head.stdout.strip() or os.environ.get("COMMIT", "unknown"),
            "gpu": torch.cuda.get_device_name(),
            "seconds": round(time.time() - self.began),
            "versions": {name: version(name) for name in PACKAGES},
            **self.counts,
        }
        self.path.write_text(json.dumps(record, indent=1) + "\n")
