"""Milliseconds of a training micro-batch, against a baseline: `python benchmarks/training_phase.py`, on a GPU.

The baseline has diffusers' uncompiled blocks, PEFT's layers, flash attention, and recomputes every block of FLUX.1 and
SD3.5-L. Both train the same random weights of the true shapes with the presets' settings, and are measured in turns.
Also measured: options, one at a time; planned and used memory. Each model is measured in a separate process. Writes
benchmarks/results/training_phase.{json,md}.
"""

import copy
import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from solrl_core.families import Backbone, load_backbone
from solrl_core.families.skeleton import Meta
from solrl_core.kernels import attention
from solrl_core.lora import target_modules
from solrl_core.sampling.generator import Generator
from solrl_trainer.algorithms.registry import ALGORITHMS
from solrl_trainer.algorithms.training_data import TrainingSamples
from solrl_trainer.memory.training_memory import plan_training
from solrl_trainer.policy.policy import CURRENT, OLD, Policy
from solrl_trainer.policy.update import Updater
from solrl_trainer.settings.config import Lora, RunConfig
from solrl_trainer.settings.presets import resolve
from step_time import TOKENS
from support.own_process import rows_of
from support.random_weights import materialize
from support.results import Results, Row, device_name, options, table
from support.true_size import MINIATURES, skeleton
from torch import nn

PRESETS = {"flux": "flux1", "sd3": "sd3", "sana": "sana", "sd3-medium": "sd3-medium"}
RECOMPUTED = {"flux": True, "sd3": True, "sana": False, "sd3-medium": False}
"""Whether the baseline recomputes its blocks."""
NAMES = {"flux": "FLUX.1 512²", "sd3": "SD3.5-L 1024²", "sana": "SANA 1.6B 1024²", "sd3-medium": "SD3.5-M 512²"}
WANTED = {"flux": 1.8, "sd3": 1.6, "sana": 1.5}
ROUNDS = 3
MICRO_BATCHES = 2
PARTS = ("reference", "old", "current", "optimizer")


class PeftPolicy:
    """The baseline's policy: PEFT's layers in diffusers' blocks, run operation by operation."""

    def __init__(self, backbone: Backbone, lora: Lora, checkpointing: bool) -> None:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        self.transformer = self.base = backbone.transformer
        if checkpointing:
            self.transformer.enable_gradient_checkpointing()  # type: ignore[operator]
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=int(lora.alpha),
            target_modules=backbone.lora_targets,
            init_lora_weights="gaussian",
        )
        self.layers = list(target_modules(self.transformer, backbone.lora_targets))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in (CURRENT, OLD):
                inject_adapter_in_model(config, self.transformer, adapter_name=name)
        self._tuners = [module for module in self.transformer.modules() if isinstance(module, BaseTunerLayer)]
        self.weights: dict[str, list[nn.Parameter]] = {CURRENT: [], OLD: []}
        for name, weights in self.weights.items():
            for layer in map(self.transformer.get_submodule, self.layers):
                for part in (layer.lora_A, layer.lora_B):
                    weight = part[name].weight  # type: ignore[index,union-attr]
                    weight.data = weight.data.float()
                    weights.append(weight)
        self.parameters = self.weights[CURRENT]
        self._activate(CURRENT)

    def _activate(self, name: str) -> None:
        for layer in self._tuners:
            layer.set_adapter(name, inference_mode=name != CURRENT)
            layer.enable_adapters(True)

    @contextmanager
    def old(self) -> Iterator[None]:
        """Within: the transformer is the behaviour policy, without gradient."""
        self._activate(OLD)
        with torch.no_grad():
            yield
        self._activate(CURRENT)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within: the transformer is the base model, without gradient."""
        for layer in self._tuners:
            layer.enable_adapters(False)
        with torch.no_grad():
            yield
        self._activate(CURRENT)

    def gradient_norm(self, limit: float) -> float:
        """Clip the gradient to norm `limit`; return its norm before clipping."""
        return float(torch.nn.utils.clip_grad_norm_(self.parameters, limit))


class Clock:
    """Times between marks on the GPU, by the part that ends at the later mark."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, Any]] = []

    def mark(self, part: str) -> None:
        """Count the work since the last mark as `part`."""
        event: Any = time.perf_counter()
        if torch.cuda.is_available():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._marks.append((part, event))

    def milliseconds(self) -> dict[str, float]:
        """Milliseconds by part; deletes all marks."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found: dict[str, float] = {}
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            between = before.elapsed_time(after) if torch.cuda.is_available() else 1000 * (after - before)
            found[part] = found.get(part, 0.0) + between
        self._marks.clear()
        return found


class Timed:
    """An updater whose work is timed by part."""

    def __init__(self, policy: Any, backbone: Backbone, config: RunConfig) -> None:
        self.clock = Clock()
        for name in ("reference", "old"):
            setattr(policy, name, self._timed(name, getattr(policy, name)))
        optimizer = torch.optim.AdamW(policy.parameters, lr=config.optimizer.learning_rate)
        norm = policy.gradient_norm

        def gradient_norm(limit: float) -> float:
            self.clock.mark("current")
            return float(norm(limit))

        policy.gradient_norm = gradient_norm
        self.policy = policy
        self.updater = Updater(
            backbone=backbone,
            policy=policy,
            optimizer=optimizer,
            algorithm=ALGORITHMS.find(config.algorithm.name)(config.algorithm),
            settings=config.optimizer,
            sigmas=backbone.sigmas(config.regenerate.steps),
            guidance=config.guidance,
            seed=config.seed,
        )

    def _timed(self, part: str, context: Callable[[], Any]) -> Callable[[], Any]:
        @contextmanager
        def within() -> Iterator[None]:
            self.clock.mark("current")  # of the previous micro-batch
            with context():
                yield
            self.clock.mark(part)

        return within

    def run(self, samples: TrainingSamples, iteration: int) -> dict[str, float]:
        """Milliseconds of a micro-batch, by part and in total."""
        self.clock.mark("")
        self.updater.update(samples, iteration)
        self.clock.mark("optimizer")
        each = {part: ms / MICRO_BATCHES for part, ms in self.clock.milliseconds().items()}
        return {part: each.get(part, 0.0) for part in PARTS} | {"all": sum(each.values())}


def main() -> None:
    """Measure each model in a separate process; write and print the tables."""
    parser = options(__doc__, device="cuda")
    parser.add_argument("--models", nargs="+", default=list(PRESETS), choices=list(PRESETS))
    args = parser.parse_args()
    results = Results("training_phase", args.out, page)
    if not args.render:
        results.keep(lambda row: row["model"] not in args.models)
        for model in args.models:
            for row in rows_of(measure, model, args.device, device=args.device):
                results.add(row)
    results.show()


def row_of(model: str, device: str, **values: Any) -> Row:
    """A row with these values."""
    return {"model": model, "device": device_name(device), "torch": torch.__version__} | values


def measure(model: str, device: str) -> Iterator[Row]:
    """Yield rows: baseline and solrl, options, and memory."""
    config = resolve(f"{PRESETS[model]}/sol_rl/hpsv2", overrides=["optimizer.updates=1"]).config
    backbone, samples = true_model(model, config, device)
    fraction = MICRO_BATCHES / (len(backbone.sigmas(config.regenerate.steps)) - 1)
    config = with_settings(config, {"algorithm.timestep_fraction": min(1.0, fraction + 1e-6)})
    old = Timed(
        PeftPolicy(beside(backbone), config.lora, RECOMPUTED[model]),
        backbone,
        with_settings(config, {"optimizer.activation_checkpointing": False}),
    )
    one = {name: value[:1] for name, value in samples.conditioning.items()}
    plan = plan_training(backbone, config.lora, config.optimizer.batch, one, config.guidance)
    fp8 = Generator(backbone, "fp8").transformer if device != "cpu" else None
    held = torch.cuda.memory_allocated() if device != "cpu" else 0
    policy = Policy(backbone, config.lora, config.seed)
    ways = {"baseline": old, "solrl": Timed(policy, backbone, config)}
    began = time.perf_counter()
    ways["solrl"].run(samples, 0)
    compiled = time.perf_counter() - began
    peak = 0
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        ways["solrl"].run(samples, 0)
        peak = torch.cuda.max_memory_allocated() - held
    old.run(samples, 0)
    times: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for turn in range(ROUNDS):
        for way, timed in ways.items():
            times[way].append(timed.run(samples, turn))
    for way, each in times.items():
        yield row_of(model, device, kind="way", way=way, batch=config.optimizer.batch, **medians(each))
    yield row_of(
        model, device, kind="memory", planned=plan.total(0), measured=peak, state=plan.state, compile_s=compiled
    )
    yield row_of(model, device, kind="equal", bits=equal_velocities(policy, backbone, samples))
    del old, ways["baseline"]
    gc.collect()
    for option, each in with_options(ways["solrl"], policy, backbone, config, samples, fp8):
        yield row_of(model, device, kind="option", way=option, **medians(each))


def equal_velocities(policy: Policy, backbone: Backbone, samples: TrainingSamples) -> bool:
    """Whether the current and the old policy have the same velocity, bit for bit, for the same adapter."""
    policy.restore(OLD, policy.tensors(CURRENT))
    count = len(samples.latents)
    rows = samples.conditioning_of(torch.arange(count))
    sigma = torch.full((count,), 0.7, device=backbone.device)

    def velocity() -> torch.Tensor:
        return backbone.velocity(policy.transformer, samples.latents, sigma, rows).detach()

    current = velocity()
    with policy.old():
        return torch.equal(velocity(), current)


def with_options(
    usual: Timed, policy: Policy, backbone: Backbone, config: RunConfig, samples: TrainingSamples, fp8: nn.Module | None
) -> Iterator[tuple[str, list[dict[str, float]]]]:
    """Yield each option and its times, one option at a time."""

    def measured(timed: Timed) -> list[dict[str, float]]:
        timed.run(samples, 0)
        return [timed.run(samples, 1)]

    policy.checkpoint_activations(len(policy.blocks))
    yield "every block recomputed", measured(usual)
    policy.checkpoint_activations(0)
    if fp8 is not None:
        policy.base = fp8
        yield "optimizer.reference=fp8", measured(usual)
        policy.base = policy.transformer
        chosen = attention.kernel_name
        attention.kernel_name = lambda *given: "efficient" if given[-1] else "flash"  # type: ignore[assignment]
        yield "flash attention", measured(usual)
        attention.kernel_name = chosen
    updater = usual.updater
    weightless = with_settings(config, {"algorithm.kl_weight": 0.0})
    object.__setattr__(updater, "algorithm", ALGORITHMS.find(config.algorithm.name)(weightless.algorithm))
    yield "algorithm.kl_weight=0", measured(usual)


def true_model(model: str, config: RunConfig, device: str) -> tuple[Backbone, TrainingSamples]:
    """A transformer of true size with random weights, and a micro-batch of samples of one prompt."""
    with tempfile.TemporaryDirectory() as folder:
        bare = skeleton(model, Path(folder), device)
        if device == "cpu":
            backbone: Backbone = load_backbone(MINIATURES[model])
            row = backbone.encode(["a"], config.guidance)
        else:
            with Meta():
                row = bare.encode(["a"], config.guidance)
            parts = {name: part for name, part in bare.parts.items() if name != "transformer"}
            bare.parts = {"transformer": bare.transformer}
            backbone = materialize(bare, device)
            backbone.parts = parts
            row = {name: random_row(value, TOKENS[model], device) for name, value in row.items()}
    count = config.optimizer.batch
    latents = torch.randn(count, *backbone.latent_shape, generator=torch.Generator().manual_seed(0)).to(device)
    advantages = torch.linspace(-2, 2, count)
    return backbone, TrainingSamples(latents, advantages, row, torch.zeros(count, dtype=torch.int64))


def random_row(value: torch.Tensor, tokens: int, device: str) -> torch.Tensor:
    """Random states with the model's number of tokens, none of them masked."""
    shape = (1, tokens, *value.shape[2:]) if value.ndim == 3 or not value.is_floating_point() else value.shape
    if not value.is_floating_point():
        return torch.ones(shape, dtype=value.dtype, device=device)
    return torch.randn(shape, device=device).to(value.dtype)


def beside(backbone: Backbone) -> Backbone:
    """The backbone with a copy of its transformer that shares all weights."""
    own = copy.copy(backbone)
    shared = (*backbone.transformer.parameters(), *backbone.transformer.buffers())
    own.transformer = copy.deepcopy(backbone.transformer, {id(tensor): tensor for tensor in shared})
    return own


def with_settings(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    """The settings with some values replaced."""
    raw = config.model_dump()
    for key, value in values.items():
        section, _, name = key.partition(".")
        raw[section][name] = value
    return RunConfig.model_validate(raw)


def medians(times: list[dict[str, float]]) -> dict[str, Any]:
    """Median of each part over the rounds, and all rounds."""
    return {part: statistics.median(each[part] for each in times) for part in (*PARTS, "all")} | {"rounds": times}


WAY = ("model, micro-batch", "", "reference, ms", "old", "current, forward and backward", "optimizer", "total", "ratio")
MEMORY = ("model", "planned, GiB", "measured", "difference", "first update, with compiling, s")


def page(found: Mapping[str, Any]) -> str:
    """Markdown page of the results."""
    rows = [row for model in NAMES for row in found["rows"] if row["model"] == model]
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in ("memory", "equal")}
    same = ", ".join(NAMES[row["model"]] for row in kinds["equal"] if row["bits"]) or "none"
    lines = [
        "# A training micro-batch against diffusers and PEFT",
        "",
        f"By `python benchmarks/training_phase.py` on one {rows[0]['device']}, torch {rows[0]['torch']}: random",
        "weights of the true shapes, the presets' settings (DiffusionNFT, a BF16 reference at weight 1e-4, rank 32),",
        f"both in turns, medians of {ROUNDS} rounds of {MICRO_BATCHES} micro-batches by the GPU's clock. The baseline",
        "has diffusers' uncompiled blocks, PEFT's layers and flash attention, and recomputes every block of FLUX.1 and",
        "SD3.5-L. Each option was measured once, after a warm-up.",
        "",
        *table(WAY, _way_cells(rows)),
        "",
        "The optimizer's time is half of a step: a step has two micro-batches here, and more in a run.",
        "",
        f"The current and the old policy give equal velocities, bit for bit, for equal adapters: {same}.",
        "",
        "Memory of training in addition to the weights, all activations kept, planned without a GPU and measured:",
        "",
        *table(MEMORY, map(_memory_cells, kinds["memory"])),
    ]
    return "\n".join(lines) + "\n"


def _way_cells(rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    whole: dict[str, float] = {}
    for row in rows:
        if row["kind"] not in ("way", "option"):
            continue
        model, first = row["model"], row["way"] == "baseline"
        baseline = whole.setdefault(model, row["all"]) if first else whole.get(model)
        ratio = f"{baseline / row['all']:.2f}" if baseline else ""
        if row["way"] == "solrl":
            ratio = f"**{ratio}**" + (f" (goal {WANTED[model]})" if model in WANTED else "")
        title = f"{NAMES[model]}, {row['batch']}" if first else ""
        option = f"with {row['way']}" if row["kind"] == "option" else row["way"]
        yield (title, option, *(f"{row[part]:.1f}" for part in (*PARTS, "all")), ratio)


def _memory_cells(row: Row) -> Sequence[str]:
    planned, measured = row["planned"] / 2**30, row["measured"] / 2**30
    off = f"{planned / measured - 1:+.1%}" if measured else ""
    return NAMES[row["model"]], f"{planned:.2f}", f"{measured:.2f}", off, f"{row['compile_s']:.0f}"


if __name__ == "__main__":
    main()
