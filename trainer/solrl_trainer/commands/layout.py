"""`solrl-train layout`: hours of a run on some GPUs, with and without a service, and the commands."""

import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from solrl_trainer.commands.options import Layout
from solrl_trainer.layouts.layouts import (
    PEAKS,
    GpuLayout,
    MeasuredRates,
    Rates,
    layouts,
    scaled_rates,
    shipped_rates,
    stages,
)
from solrl_trainer.settings.config import RunConfig

_HOUR = 3600.0
_FITTED_STEPS = 4


def layout(config: RunConfig, options: Layout) -> None:
    """Print the layouts of runs with these settings, the fastest first, and the commands of the fastest.

    The commands are those of the fastest layout without a service, and of the fastest with one.

    Raises:
        ValueError, OSError: numbers that give no layout, no measured rates of the model, or what cannot be loaded.
    """
    gpus, runs, speed = options.gpus, options.runs, options.serving_speed
    for option, value in {"--gpus": gpus, "--runs": runs}.items():
        if value < 1:
            raise ValueError(f"got {option} {value}; expected at least 1")
    config.require_exploring("layout")
    if not speed > 0:
        raise ValueError(f"got --serving-speed {speed:g}; expected more than 0, such as 0.5")
    rates = _rates(config, options)

    def sorted_layouts(config: RunConfig) -> list[GpuLayout]:
        return layouts(stages(config, rates), config.explore.prompts, gpus, runs=runs, speed=speed)

    every = sorted_layouts(config)
    if not every:
        raise ValueError(f"got --gpus {gpus} for {runs} runs; expected at least {runs}, and one more for a service")
    console = Console(markup=False)
    console.print(_table(config, every))
    advice = []
    for name, served in (("without a service", False), ("with a service", True)):
        if best := next((one for one in every if bool(one.serving) == served), None):
            advice += [f"{name}, {_hours(config, best):.3g} h per run:", *_commands(config, best, runs, options.words)]
    if config.two_stage and config.explore.fitted is None and config.explore.steps > _FITTED_STEPS:
        explore = config.explore.model_copy(update={"steps": _FITTED_STEPS})
        fitted = sorted_layouts(config.model_copy(update={"explore": explore}))[0]
        advice.append(
            f"with {_FITTED_STEPS} steps that `solrl-train calibrate` fits, if they rank well: "
            f"{_hours(config, fitted):.3g} h per run"
        )
    console.print("\n".join(advice), soft_wrap=True, markup=False, highlight=False)


def _rates(config: RunConfig, options: Layout) -> Rates:
    measure, file, gpu = options.measure, options.rates, options.scaled_to
    if gpu is not None and (measure or file):
        raise ValueError(f"got --scaled-to {gpu} with rates of a GPU; expected it without --measure and --rates")
    if gpu is not None and gpu not in PEAKS:
        raise ValueError(f"got --scaled-to {gpu}; expected one of {', '.join(PEAKS)}; or measure yours by --measure")
    if measure:
        from solrl_trainer.layouts.measured_rates import measure_rates

        measured = measure_rates(config)
        if file is not None:
            measured.save(file)
    elif file is not None:
        measured = MeasuredRates.read(file)
        if measured.model != config.model:
            raise ValueError(f"got --rates of {measured.model}; expected rates of {config.model}, or --measure")
    else:
        name = config.preset.split("/")[0]
        shipped = shipped_rates(name)
        if shipped is None:
            raise ValueError(f"no rates are shipped for {name}, only for flux1, sd3 and sana; expected --measure")
        measured = shipped
    longer = "" if measure or file else "; where whole iterations were measured, they took 3 to 9 % longer"
    print(f"rates of {measured.model} measured on {measured.gpu}{longer}")
    if gpu is not None:
        print(f"computed for {gpu} by NVIDIA's peaks, not measured; blocks that recompute take longer")
        return scaled_rates(measured.rates, gpu)
    return measured.rates


def _table(config: RunConfig, every: Sequence[GpuLayout]) -> Table:
    title = f"{config.preset}: {config.explore.prompts} prompts per iteration, {config.iterations} iterations"
    table = Table(title=title, title_justify="left")
    table.add_column("GPUs", no_wrap=True)
    for name in ("s / prompt", "min / iteration", "h / run", "waiting"):
        table.add_column(name, justify="right")
    for row in every:
        minutes = row.seconds * config.explore.prompts / 60
        cells = [f"{row.seconds:.2f}", f"{minutes:.3g}", f"{_hours(config, row):.3g}", f"{max(row.idle, 0):.0%}"]
        table.add_row(layout_text(row), *cells)
    return table


def _hours(config: RunConfig, layout: GpuLayout) -> float:
    return layout.seconds * config.explore.prompts * config.iterations / _HOUR


def layout_text(layout: GpuLayout) -> str:
    """A layout in words."""
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
