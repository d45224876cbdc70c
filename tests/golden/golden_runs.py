"""Two small training runs and everything about them that must not change, read from files and from the wire alone.

`python -m tests.golden.golden_runs` records them for this processor type. Record anew only
in a commit that means to change results, and name in it what changed and why.
"""

import json
import os
import platform
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from solrl_proto.noise import expand_seeds
from solrl_trainer.__main__ import main as solrl_train
from tests.support.programs import Program, command
from tests.support.service_helpers import MODEL, running_service

RECORDED = Path(__file__).parent / "recorded.json"
ITERATIONS = 2
CANDIDATES = 16
SEED = 42
SETTINGS = {
    **{"iterations": ITERATIONS, "seed": SEED, "optimizer.updates": 2, "optimizer.batch": 16},
    **{"explore.prompts": 2, "explore.candidates": CANDIDATES, "explore.keep": 8, "explore.precision": "nvfp4"},
    **{"explore.lag": 0, "evaluate.prompts": 4, "evaluate.seeds": 2, "evaluate.steps": 4},
}
RUNS = {
    "sol_rl": {**SETTINGS, "evaluate.fidelity_prompts": 1},
    "diffusionnft": {**SETTINGS, "explore.precision": "bf16"},
}
REWARD = "clipscore"
PROMPTS = ("a red circle", "a blue square above a green triangle")
CLOCKED = ("time", "elapsed", "seconds", "scoring")
"""Fields of metrics.jsonl that differ from run to run."""


def processor() -> str:
    """The type of processor and torch on which bits are equal."""
    found = {"vendor_id": platform.machine(), "cpu family": "?", "model": "?"}
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else ():
        name, _, value = line.partition(":")
        if name.strip() in found:
            found[name.strip()] = value.strip()
    vendor, family, model = found.values()
    return f"{vendor} {family}/{model} {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def run_all(folder: Path) -> dict[str, Any]:
    """Serve, train both runs, and read back what they came to."""
    with pytest.MonkeyPatch.context() as patch:
        # Because the number of threads decides where batches are cut.
        patch.setenv("OMP_NUM_THREADS", "2")
        patch.setenv("OMP_WAIT_POLICY", "passive")
        with running_service("--rewards", REWARD) as service:
            scores = _bf16_scores(service.client)
            runs = {}
            for recipe, settings in RUNS.items():
                served = {"rollout_url": service.url} if recipe == "sol_rl" else {}
                _train(recipe, settings | served, folder / recipe)
                runs[recipe] = _read(folder / recipe)
            runs["sol_rl"]["groups"] = _groups(service.client)
    return {"bf16_scores": scores, "runs": runs}


def _train(recipe: str, settings: dict[str, Any], output: Path) -> None:
    words = ["solrl-train", "run", "--preset", f"{MODEL}/{recipe}/{REWARD}", "--output", str(output), "--run", recipe]
    for name, value in settings.items():
        words += ["--set", f"{name}={value}"]
    log = output.with_suffix(".log")
    assert Program(command, (solrl_train, words, os.getcwd(), dict(os.environ)), log).wait() == 0, log.read_text()


def _read(folder: Path) -> dict[str, Any]:
    """Metrics without clocks, digests of the last checkpoint and of the exported LoRA, rewards, and some kept seeds."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (checkpoint,) = (folder / "checkpoints").glob(f"*{ITERATIONS}")
    state = {name: _digest(tensor) for name, tensor in sorted(load_file(checkpoint / "state.safetensors").items())}
    return {
        "metrics": [{name: value for name, value in line.items() if name not in CLOCKED} for line in lines],
        "state": sha256(json.dumps(state).encode()).hexdigest(),
        "lora": sha256((folder / "lora.safetensors").read_bytes()).hexdigest(),
        "rewards": json.loads((folder / "result.json").read_text())["rewards"],
        "kept": json.loads((folder / "gallery.json").read_text())["pairs"],
        "files": sorted(path.name for path in folder.iterdir()),
    }


def _digest(tensor: torch.Tensor) -> str:
    return sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def _groups(client: httpx.Client) -> list[dict[str, Any]]:
    """Seeds and scores of two prompts under every version that the run pushed."""
    return [
        {
            "version": version,
            "groups": _explore(
                client,
                adapter={"run": "sol_rl", "version": version},
                candidates={"count": 4, "seed_root": expand_seeds(SEED, f"golden/{version}", 1)[0]},
                plan={"steps": 6, "precision": "nvfp4"},
            ),
        }
        for version in range(ITERATIONS + 1)
    ]


def _bf16_scores(client: httpx.Client) -> list[list[float]]:
    """Scores of the base at BF16."""
    more = {"candidates": {"count": 8, "seed_root": SEED}, "plan": {"steps": 10, "precision": "bf16"}}
    groups = _explore(client, adapter=None, **more)
    return [group["scores"] for group in groups]


def _explore(client: httpx.Client, **request: Any) -> list[dict[str, Any]]:
    prompts = [{"id": f"p{index}", "text": text} for index, text in enumerate(PROMPTS)]
    body = {"model": MODEL, "prompts": prompts, "rewards": [{"name": REWARD}], **request}
    answer = client.post("/v1/rollouts", json=body)
    assert answer.status_code == 200, answer.text
    return [{"seeds": group["seeds"], "scores": group["scores"]} for group in answer.json()["groups"]]


def main() -> None:
    """Record this processor type."""
    with tempfile.TemporaryDirectory(prefix="solrl-golden-") as folder:
        found = run_all(Path(folder))
    recorded = json.loads(RECORDED.read_text()) if RECORDED.is_file() else {"processors": {}}
    recorded["bf16_scores"] = found["bf16_scores"]
    recorded["processors"][processor()] = found["runs"]
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
    print(f"recorded {processor()} in {RECORDED}")


if __name__ == "__main__":
    main()
