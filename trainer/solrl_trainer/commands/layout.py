"""`solrl-train layout`: hours of a run on some GPUs, with and without a service, and the commands.

They are computed from seconds of the run's stages on one GPU.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from solrl_trainer.commands.options import Layout
from solrl_trainer.policy.update import trained_steps
from solrl_trainer.settings.config import RunConfig

_HOUR = 3600.0
_FITTED_STEPS = 4

PEAKS: Mapping[str, tuple[float, float]] = {
    "A100": (312, 0),
    "H100": (989, 1979),
    "H200": (989, 1979),
    "L40S": (362, 733),
    "RTX 3090": (71, 0),
    "RTX 4090": (165, 330),
}
"""GPU → dense TFLOPS in BF16 and FP8 that sum in float32, by NVIDIA's data sheets (A100, H100: SXM); 0 without FP8."""

_MEMORY: Mapping[str, int] = {"A100": 80, "H100": 80, "H200": 141, "L40S": 48, "RTX 3090": 24, "RTX 4090": 24}
"""GPU → gigabytes."""

_BLOCKS: Mapping[str, int] = {"flux1": 57, "sd3": 38, "sana": 20}
"""Model of the presets → blocks of its transformer."""

_SIDES: Mapping[str, int] = {"flux1": 512, "sd3": 1024, "sana": 1024}
"""Model of the presets → pixels of a side of the images whose rates were measured."""


@dataclass(frozen=True)
class Rates:
    """Seconds on one GPU.

    Attributes:
        bf16, fp8: a solver step of one candidate.
        image: decoding and scoring one candidate.
        point: training one sample at one timestep.
        reference: of `point`, the pass of the reference, which a run without a pull to it omits.
    """

    bf16: float
    fp8: float
    image: float
    point: float
    reference: float = 0.0


RATES = {
    "flux1": Rates(bf16=0.0275244, fp8=0.0152543, image=0.0128756, point=0.128892, reference=0.0293769),
    "sd3": Rates(bf16=0.0568993, fp8=0.0364518, image=0.0297731, point=0.294271, reference=0.0585514),
    "sana": Rates(bf16=0.006702, fp8=0.00396621, image=0.0217824, point=0.0369161, reference=0.00655572),
}
"""Model of the presets → its rates on an H200, by `benchmarks/equal_gpus.py`; the reference's share of a point is of
`training_phase.py`."""


@dataclass(frozen=True)
class Stages:
    """Seconds that the stages of one prompt take on one GPU."""

    explore: float
    regenerate: float
    train: float

    @property
    def total(self) -> float:
        """Seconds of all stages."""
        return self.explore + self.regenerate + self.train


@dataclass(frozen=True)
class GpuLayout:
    """Use of some GPUs.

    Attributes:
        serving: GPUs of the rollout service; 0: every GPU explores, regenerates and trains.
        training: GPUs of each run.
        runs: runs that share the service.
        share: share of the prompts that the service explores, `explore.share`; 0 without a service.
        seconds: per prompt of one run.
        idle: share of the GPUs' time that they wait.
    """

    serving: int
    training: int
    runs: int
    share: float
    seconds: float
    idle: float


def layout(config: RunConfig, options: Layout) -> None:
    """Print the layouts of runs with these settings, the fastest first, and commands with and without a service.

    A ValueError names numbers that give no layout, or a model without measured rates.
    """
    gpus, runs = options.gpus, options.runs
    for option, value in {"--gpus": gpus, "--runs": runs}.items():
        if value < 1:
            raise ValueError(f"got {option} {value}; expected at least 1")
    config.require_exploring("layout")
    rates = _rates(config, options.scaled_to, options.words)
    _note_size(config)
    _note_guidance(config)

    def sorted_layouts(config: RunConfig) -> list[GpuLayout]:
        return layouts(stages(config, rates), config.explore.prompts, gpus, runs=runs)

    every = sorted_layouts(config)
    if not every:
        raise ValueError(f"got --gpus {gpus} for {runs} runs; expected at least {runs}, and one more for a service")
    console = Console(markup=False)
    console.print(_table(config, rates, every))
    advice = []
    for name, served in (("without a service", False), ("with a service", True)):
        if best := next((candidate for candidate in every if bool(candidate.serving) == served), None):
            advice += [
                f"{name}, {_hours(config, rates, best):.3g} h per run:",
                *_commands(config, best, runs, options.words),
            ]
    alone, prompts = gpus // runs, config.explore.prompts
    if alone and prompts % alone:
        even = -(-prompts // alone) * alone
        now, then = (colocated(stages(config, rates), number, alone).seconds for number in (prompts, even))
        advice.append(
            f"{prompts} prompts do not divide by {alone} GPUs: without a service, a prompt takes {now:.3g} s, and "
            f"{then:.3g} s with --set explore.prompts={even}"
        )
    if config.two_stage and config.explore.fitted is None and config.explore.steps > _FITTED_STEPS:
        explore = config.explore.model_copy(update={"steps": _FITTED_STEPS})
        fitted = config.model_copy(update={"explore": explore})
        advice.append(
            f"with {_FITTED_STEPS} steps that `solrl-train calibrate` fits, if they rank well: "
            f"{_hours(fitted, rates, sorted_layouts(fitted)[0]):.3g} h per run"
        )
    console.print("\n".join(advice), soft_wrap=True, markup=False, highlight=False)


def _rates(config: RunConfig, gpu: str | None, words: Sequence[str]) -> Rates:
    name = config.preset.split("/")[0]
    if name not in RATES:
        raise ValueError(
            f"got the model {name}; expected one of {', '.join(RATES)}, which were measured. A run shows its time per "
            "iteration, and when it ends"
        )
    if gpu is not None and gpu not in PEAKS:
        raise ValueError(f"got --scaled-to {gpu}; expected one of {', '.join(PEAKS)}")
    print(f"rates of {name} measured on an H200; timed iterations of fast took −1 to 8 % longer")
    if gpu is None:
        return RATES[name]
    print(f"computed for {gpu} by NVIDIA's peaks, not measured")
    if config.optimizer.activation_checkpointing == "auto":
        plan = shlex.join(["solrl-train", "memory", "--gpu", f"{_MEMORY[gpu]}", "--preset", config.preset, *words])
        print(f"whether it fits, and N blocks that recompute: {plan}")
        print("these take longer: --set optimizer.activation_checkpointing=N counts them")
    return scaled_rates(RATES[name], gpu)


def _note_size(config: RunConfig) -> None:
    side, size = _SIDES[config.preset.split("/")[0]], config.generate.size
    height, width = size.height or side, size.width or side
    if (height, width) != (side, side):
        print(
            f"got generate.height={height} and generate.width={width}; the rates are of {side} and {side}, so these "
            "hours are not your run's. It shows after two iterations when it will end"
        )


def _note_guidance(config: RunConfig) -> None:
    if config.guidance > 1 and not config.preset.startswith("flux1/"):
        print(
            f"got guidance={config.guidance}; the rates are of guidance 1. Above it, each pass of the transformer is "
            "two, so a run takes up to about twice these hours"
        )


def _table(config: RunConfig, rates: Rates, every: Sequence[GpuLayout]) -> Table:
    count = f"{config.explore.prompts} prompts per iteration, {config.iterations} iterations"
    title = f"{config.preset}: {count} and their evaluations"
    table = Table(title=title, title_justify="left")
    table.add_column("GPUs", no_wrap=True)
    for name in ("s / prompt", "min / iteration", "h / run", "waiting"):
        table.add_column(name, justify="right")
    for row in every:
        minutes = row.seconds * config.explore.prompts / 60
        cells = [f"{row.seconds:.2f}", f"{minutes:.3g}", f"{_hours(config, rates, row):.3g}", f"{max(row.idle, 0):.0%}"]
        table.add_row(layout_text(row), *cells)
    return table


def _hours(config: RunConfig, rates: Rates, layout: GpuLayout) -> float:
    iterations = layout.seconds * config.explore.prompts * config.iterations
    return (iterations + measuring(config, rates) / layout.training) / _HOUR


def layout_text(layout: GpuLayout) -> str:
    if not layout.serving:
        return f"{layout.training} without a service"
    training = f"{layout.training} training" if layout.runs == 1 else f"{layout.runs} × {layout.training} training"
    return f"{layout.serving} serving + {training}"


def _commands(config: RunConfig, best: GpuLayout, runs: int, words: Sequence[str]) -> list[str]:
    """Commands of a layout, each with its GPUs; `words` follow the preset of every run."""
    program = ["torchrun", f"--nproc-per-node={best.training}", "-m", "solrl_trainer"]
    run = [*(program if best.training > 1 else ["solrl-train"]), "run", "--preset", config.preset]
    commands = []
    if best.serving:
        model = config.model if config.served_as is None else f"{config.served_as}={config.model}"
        serve = ["solrl-rollout", "serve", "--model", model, "--rewards", *config.weights]
        commands.append((best.serving, [*serve, *(["--gpus", "all"] if best.serving > 1 else [])]))
        run += ["--rollout-url", "http://127.0.0.1:8100"]
        run += ["--set", f"explore.share={best.share:.3g}"] if best.share < 1 else []
    run += [] if any(word.startswith("prompts=") for word in words) else ["--set", f"prompts={config.prompts}"]
    for at in range(1, runs + 1):
        name = ["--set", f"run={config.run}-{at}"] if runs > 1 else []
        commands.append((best.training, [*run, *words, *name]))
    lines, first = [], 0
    for gpus, command in commands:
        numbers = ",".join(map(str, range(first, first + gpus)))
        lines.append(f"  CUDA_VISIBLE_DEVICES={numbers} {shlex.join(command)}")
        first += gpus
    return lines


def scaled_rates(rates: Rates, gpu: str) -> Rates:
    """Rates that another GPU of `PEAKS` would have if an H200's follow the peaks; it explores in BF16 without FP8."""
    (bf16, fp8), (of_bf16, of_fp8) = PEAKS["H200"], PEAKS[gpu]
    scaled = {name: seconds * bf16 / of_bf16 for name, seconds in vars(rates).items()}
    return Rates(**scaled | {"fp8": rates.fp8 * fp8 / of_fp8 if of_fp8 else scaled["bf16"]})


def stages(config: RunConfig, rates: Rates) -> Stages:
    """Seconds of one prompt with a run's settings; a block that recomputes takes its part of a pass again."""
    explore, samples = config.explore, config.regenerate
    step = rates.bf16 if explore.precision == "bf16" or not config.two_stage else rates.fp8
    regenerated = explore.keep if config.two_stage else 0
    point = rates.point - (0 if config.algorithm.model_dump().get("kl_weight") else rates.reference)
    recomputing = config.optimizer.activation_checkpointing
    if recomputing != "auto":
        blocks = _BLOCKS[config.preset.split("/")[0]]
        point += rates.reference * (recomputing if isinstance(recomputing, bool) else min(recomputing / blocks, 1))
    points = trained_steps(config.sample_steps, config.algorithm.timestep_fraction)
    return Stages(
        explore=explore.candidates * (explore.steps * step + rates.image),
        regenerate=regenerated * (samples.steps * rates.bf16 + rates.image),
        train=explore.keep * points * point,
    )


def measuring(config: RunConfig, rates: Rates) -> float:
    """Seconds that all evaluations of a run, and its measurements of rank fidelity, take on one GPU."""
    judge, explore = config.evaluate, config.explore
    along = config.iterations // judge.every if judge.every else 0
    images = 2 * judge.prompts * judge.seeds + along * config.curve_prompts * config.curve_seeds
    ranked = 0
    if config.two_stage:
        ranked = -(-config.iterations // judge.fidelity_every) if judge.fidelity_every else 1
    true = explore.candidates * (config.regenerate.steps * rates.bf16 + rates.image)
    group = stages(config, rates).explore + true
    return images * (judge.steps * rates.bf16 + rates.image) + ranked * judge.fidelity_prompts * group


def layouts(stages: Stages, prompts: int, gpus: int, *, runs: int = 1) -> list[GpuLayout]:
    """All layouts of `runs` equal runs on `gpus` GPUs, the fastest first; `stages` are of a prompt on one GPU."""
    every = [colocated(stages, prompts, gpus // runs)] if gpus >= runs else []
    for serving in range(1, gpus):
        if training := (gpus - serving) // runs:
            every.append(served(stages, prompts, serving, training, runs=runs))
    return sorted(every, key=lambda layout: layout.seconds)


def colocated(stages: Stages, prompts: int, gpus: int) -> GpuLayout:
    """Every GPU takes its prompts through all stages."""
    seconds = -(-prompts // gpus) * stages.total / prompts
    return GpuLayout(0, gpus, 1, 0.0, seconds, 1 - stages.total / (gpus * seconds))


def served(stages: Stages, prompts: int, serving: int, training: int, *, runs: int = 1) -> GpuLayout:
    """A service explores one version ahead, and the runs' GPUs do the rest; the slower side sets the pace.

    The service explores the best share that whole prompts of a rank allow. `serving` and `training` are GPUs of the
    service and of each run; `layouts` explains the rest.
    """
    per_rank = -(-prompts // training)

    def with_share(share: float) -> GpuLayout:
        explored = share * stages.explore
        iteration = max(runs * prompts * explored / serving, per_rank * (stages.total - explored))
        idle = 1 - runs * prompts * stages.total / (iteration * (serving + runs * training))
        return GpuLayout(serving, training, runs, share, iteration / prompts, idle)

    return min((with_share(count / per_rank) for count in range(1, per_rank + 1)), key=lambda layout: layout.seconds)
