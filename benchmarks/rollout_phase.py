"""Rollout phases at true size on a GPU: `python benchmarks/rollout_phase.py`.

All parts have true size and random weights, on which time does not depend: transformer, text encoders, autoencoder, and
HPSv2 with its CLIP ViT-H/14. Candidates are generated as in the service: 24 at a time, scored while the next 24 are
generated. The baseline generates every candidate as it is trained, in BF16 with diffusers' own modules, compiled.
Each model runs in its own process. Parts that do not run keep their last result, but a phase replaces all plans of an
earlier one. Writes benchmarks/results/rollout_phase.{json,md}.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from solrl_core.rewards import RewardSet
from solrl_core.sampling.batches import CHUNK_SIZE
from solrl_core.sampling.device_events import DeviceEvent
from solrl_core.sampling.fitting import SCHEDULES, identity_solver
from solrl_core.sampling.generator import Generator
from solrl_engine.batch_size import AdaptiveBatchSize
from solrl_engine.sampler import Sampler
from solrl_engine.scorer import Scorer
from solrl_engine.side_stream import SideStream
from solrl_proto.rollouts import Plan, PromptItem, RewardSpec
from solrl_trainer.rollouts.candidates import GroupSampler
from solrl_trainer.rollouts.sample_scorer import SampleScorer
from support.own_process import rows_of
from support.random_weights import materialize
from support.results import Results, Row, device_name, in_turns, options, shown_size, table, timed
from support.true_size import random_hps, size_of, skeleton

PARTS = ("share",)


class Sizes(NamedTuple):
    """What a phase is made of.

    Attributes:
        candidates: candidates of the prompt.
        kept: of them, those that are regenerated.
        explore_steps, regenerate_steps: steps of exploring and of regenerating.
        batch: candidates that are generated at a time.
        guidance: scale of classifier-free guidance; 1 is without.
    """

    candidates: int = 96
    kept: int = 24
    explore_steps: int = 6
    regenerate_steps: int = 10
    batch: int = CHUNK_SIZE
    guidance: float = 1.0


SIZES = {
    **dict.fromkeys(("flux", "sd3", "sana"), Sizes()),
    # The preset's, for a twelfth of its candidates: a batch.
    "wan": Sizes(8, 2, 10, 20, 8, 4.5),
}
FITTED_STEPS = 4
FEWER_STEPS = 6
"""Steps of clips, whose plans have no fitted steps."""
REWARD_DTYPE = "bfloat16"
"""Type of the reward's weights and products, as in a service on a GPU."""
SPENT = ("transformer", "encode", "decode", "reward", "other")
NAMES = {"flux": "FLUX.1", "sd3": "SD3.5-L", "sana": "SANA 1.6B", "wan": "Wan2.1 1.3B"}
REGENERATE, BASELINE = "regenerate", "baseline"


PAPER = {"flux": 2.33, "sd3": 2.41, "sana": 1.41}
"""Speed-ups of the paper, with FP4 units."""
PHASE = ("model", "exploring", "explore, s", "regenerate, s", "baseline, s", "speed-up", "paper, with FP4 units")
SHARE = ("model", "of", "whole, s", *(f"{part}, s" for part in SPENT), "outside transformer")


class Explorer:
    """Generates candidates in batches, as workers of the service and trainers do, and scores each beside the next."""

    def __init__(self, generator: Generator, rewards: RewardSet, batch: int) -> None:
        self.generator = generator
        self.rewards = rewards
        self.batch = batch

    def explore(self, text: str, candidates: int, plan: Plan, *, overlap: bool = True) -> None:
        """Explore a prompt; `overlap` is whether each batch is scored while the next is generated."""
        side = SideStream(self.generator.backbone.device, overlaps=None if overlap else False)
        trained = [RewardSpec(name=name) for name in self.rewards.names]
        scorer = SampleScorer(Scorer(self.rewards), self.rewards.names, trained, side)
        sampler = Sampler(self.generator, lambda: plan, batch=AdaptiveBatchSize(self.batch))
        prompts = [PromptItem(id="benchmark", text=text)] * candidates
        GroupSampler(sampler, scorer).scores(prompts, range(candidates))
        side.close()

    def shares(self, candidates: int, plan: Plan, times: Sequence[float]) -> dict[str, Any]:
        """Seconds of an exploration by part, without overlap.

        The share outside the transformer is 1 − (transformer's seconds without overlap) / total, of which `times` are
        measurements with overlap, as in the service.
        """
        device, backbone = self.generator.backbone.device, self.generator.backbone
        parts: dict[str, list[tuple[DeviceEvent, DeviceEvent]]] = {}
        with (
            watched(device, parts.setdefault("transformer", []), backbone, "velocity"),
            watched(device, parts.setdefault("encode", []), backbone, "encode"),
            watched(device, parts.setdefault("decode", []), self.generator, "decode"),
            watched(device, parts.setdefault("reward", []), self.rewards, "score"),
        ):
            before = DeviceEvent(device)
            self.explore("a blue square, apart", candidates, plan, overlap=False)
            after = DeviceEvent(device)
            after.wait()
        seconds = {name: sum(end.since(start) for start, end in marks) for name, marks in parts.items()}
        seconds["other"] = after.since(before) - sum(seconds.values())
        whole = statistics.median(times)
        return {"served_s": whole, "parts": seconds, "outside": {"served": 1 - seconds["transformer"] / whole}}


@contextmanager
def watched(
    device: torch.device, marks: list[tuple[DeviceEvent, DeviceEvent]], owner: Any, method: str
) -> Iterator[None]:
    """Record marks before and after every call of a method within the block."""
    call: Callable[..., Any] = getattr(owner, method)

    def marked(*args: Any, **kwargs: Any) -> Any:
        before = DeviceEvent(device)
        made = call(*args, **kwargs)
        marks.append((before, DeviceEvent(device)))
        return made

    with patch.object(owner, method, marked):
        yield


def main() -> None:
    parser = options(__doc__, device="cuda")
    parser.add_argument("--models", nargs="+", default=list(NAMES), choices=list(NAMES))
    further = "beside the phase: further plans of it, and shares of its time"
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS, help=further)
    parser.add_argument("--rounds", type=int, default=1, help="after one that is not counted, which compiles")
    args = parser.parse_args()
    results = Results("rollout_phase", args.out, page)
    models = results.found.setdefault("models", {})
    for model in () if args.render else args.models:
        own = models.setdefault(model, {})
        for parts in rows_of(measure, model, args, device=args.device):
            print(parts, file=sys.stderr, flush=True)
            if "setting" in parts and own.get("setting") != parts["setting"]:
                own.clear()  # the rest was measured with another setting
            own |= parts
            results.write()
    results.show()


def measure(model: str, args: argparse.Namespace) -> Iterator[Row]:
    """Yield parts of a model by name, some of them again with more values."""
    on_gpu, sizes = args.device != "cpu", SIZES[model]
    with tempfile.TemporaryDirectory() as folder:
        backbone = materialize(skeleton(model, Path(folder), args.device), args.device)
    rewards = RewardSet({"hpsv2": random_hps(args.device, REWARD_DTYPE)})
    cheap = Explorer(Generator(backbone, "fp8" if on_gpu else "nvfp4"), rewards, sizes.batch)
    setting = {"device": device_name(args.device), "reward": REWARD_DTYPE, "size": size_of(backbone)}
    setting |= {"precision": cheap.generator.precision, "baseline": "diffusers' modules"}
    yield {"setting": setting}
    plans, full = explored(sizes, backbone.frames), plan_of(sizes, steps=sizes.regenerate_steps)
    true = Explorer(Generator(backbone, "bf16"), rewards, sizes.batch)
    with diffusers_modules(backbone):
        baseline = Explorer(Generator(backbone, "bf16"), rewards, sizes.batch)

    def explored_in(name: str, turn: int) -> float:
        text = f"a red circle and {name}, {turn}"  # a new text each time, so that the prompt is not cached
        if name == REGENERATE:
            return timed(lambda: true.explore(text, sizes.kept, full))[0]
        if name in plans:
            return timed(lambda: cheap.explore(text, sizes.candidates, plans[name]))[0]
        with diffusers_modules(backbone):
            return timed(lambda: baseline.explore(text, sizes.candidates, full))[0]

    times = in_turns({name: partial(explored_in, name) for name in (BASELINE, REGENERATE, *plans)}, args.rounds)
    yield {"phase": {name: {"s": statistics.median(each), "times": each} for name, each in times.items()}}
    if "share" in args.parts:
        whole = f"{sizes.explore_steps} steps"
        found = {whole: cheap.shares(sizes.candidates, plans[whole], times[whole])}
        yield {"share": found, "regenerate": true.shares(sizes.kept, full, times[REGENERATE])}


@contextmanager
def diffusers_modules(backbone: Any) -> Iterator[None]:
    """Within it, generators are made of diffusers' own modules, compiled, and the decoder has its own, too."""
    with (
        patch.object(backbone, "fuse", lambda transformer: None),
        patch.object(backbone, "_vae", backbone.parts["vae"]),
        patch("solrl_core.families.pipeline.fused_decoder", lambda vae: vae),
    ):
        yield


def explored(sizes: Sizes, frames: int) -> dict[str, Plan]:
    """Exploration plans by name: all steps and fewer, fitted ones.

    Of clips, the fewer steps are not fitted. The coefficients of fitted steps do not affect the time.
    """
    plans = {f"{sizes.explore_steps} steps": plan_of(sizes, steps=sizes.explore_steps)}
    if frames > 1:
        plans[f"{FEWER_STEPS} steps"] = plan_of(sizes, steps=FEWER_STEPS)
    else:
        fitted = identity_solver(SCHEDULES[-1])
        plans[f"{FITTED_STEPS} fitted steps"] = plan_of(sizes, steps=FITTED_STEPS, fitted=fitted)
    return plans


def plan_of(sizes: Sizes, **settings: Any) -> Plan:
    return Plan(guidance=sizes.guidance, **settings)


def page(result: Mapping[str, Any]) -> str:
    models = {name: result["models"][name] for name in NAMES if name in result["models"]}
    devices = {one["setting"]["device"] for one in models.values()}
    lines = [
        "# Rollout phase",
        "",
        f"By `python benchmarks/rollout_phase.py` on one {' or '.join(sorted(devices))}: models at true size",
        "with their text encoders and autoencoders, and HPSv2 with its CLIP ViT-H/14. The weights are random; time",
        "does not depend on them. Candidates are generated as in the service, without its queue and HTTP: 24 at a",
        "time, scored while the next 24 are generated; clips 8 at a time, with guidance.",
        "",
        "## Rollout phase",
        "",
        "A phase explores 96 candidates and regenerates 24 of them in BF16 at 10 steps. The baseline generates all 96",
        "in BF16 at 10 steps. Of clips there are 8 and 2, at 20 steps. Of several rounds, times are",
        "medians. Rows of 17 frames are of an earlier version, which could explore the first frames of clips alone.",
        "Pruned rows are of an earlier version, too: after k steps, only the N most extreme candidates continued.",
        "",
        *table(PHASE, (cells for name, one in models.items() for cells in _phase(name, one))),
        "",
        *(_setting(name, one) for name, one in models.items()),
        "",
        "## Time of an exploration by part",
        "",
        "Encode: the prompt's text. Later rows of a model repeat the prompt: its encoding and the reward's features",
        "of it are cached, so encode is 0 and reward is shorter. Parts are measured without overlap. The share outside",
        "the transformer is of the whole time, with a new prompt, and with overlapped scoring as in the service.",
        "",
        *table(SHARE, (cells for name, one in models.items() for cells in _share(name, one))),
    ]
    return "\n".join(lines) + "\n"


def _phase(name: str, one: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    seconds = {plan: each["s"] for plan, each in one["phase"].items()}
    regenerate, whole = seconds.pop(REGENERATE), seconds.pop(BASELINE)
    for plan, explore in seconds.items():
        figures = explore, regenerate, whole, whole / (explore + regenerate)
        paper = PAPER.get(name, "") if plan == f"{SIZES[name].explore_steps} steps" else ""
        title = f"{NAMES[name]} {shown_size(one['setting']['size'])}"
        yield title, plan, *(f"{figure:.2f}" for figure in figures), str(paper)


def _setting(name: str, one: Mapping[str, Any]) -> str:
    setting, rounds = one["setting"], len(one["phase"][REGENERATE]["times"])
    timed = "once" if rounds == 1 else f"in {rounds} rounds"
    return (
        f"- {NAMES[name]}: explored in {setting['precision'].upper()}, scored in {setting['reward']}, timed {timed}. "
        f"The baseline has {setting['baseline']}, compiled."
    )


def _share(name: str, one: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    found = [(NAMES[name], plan, share) for plan, share in one.get("share", {}).items()]
    found += [("", "regenerate", one["regenerate"])] if "regenerate" in one else []
    for model, plan, share in found:
        parts = (f"{share['parts'][part]:.3f}" for part in SPENT)
        yield model, plan, f"{share['served_s']:.2f}", *parts, f"{share['outside']['served']:.1%}"


if __name__ == "__main__":
    main()
