"""The model card of an exported LoRA: base model, settings, held-out figures, and how to load it with diffusers."""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from solrl_core.families.load import MODELS, describe_model, split_model
from solrl_core.sampling.sampler import unshifted_sigmas
from solrl_proto.printable import printable
from solrl_proto.text_files import read_json, read_text

from solrl_trainer.evaluation.ended import EVALUATION, GRID, RESULT
from solrl_trainer.evaluation.evaluate import shown_seed
from solrl_trainer.evaluation.gallery import load_gallery
from solrl_trainer.prompts.prompt_sets import prompts_of_run
from solrl_trainer.report import rendering
from solrl_trainer.run_folder import figures
from solrl_trainer.run_folder.metrics_file import read_metrics
from solrl_trainer.settings.config import MACHINE_SETTINGS, RunConfig
from solrl_trainer.settings.settings_yaml import settings_yaml

LORA = "lora.safetensors"
CARD = "README.md"
MARK = "<!-- Written by solrl-train export. -->"
"""Line of every card: it tells an export that it may replace the file."""


@dataclass(frozen=True)
class HeldOutFigures:
    """Figures of one version on held-out prompts.

    Attributes:
        rewards: reward → `before`, `after`, and with an interval `gain`, `low` and `high`.
        prompts, images: numbers that the means are over; None if they are not known.
        grid: picture of images before and after.
        ended: how the run ended with its best weights; empty if it took its last, or that is not known.
    """

    rewards: dict[str, dict[str, float]]
    prompts: int | None = None
    images: int | None = None
    grid: Path | None = None
    ended: str = ""


def held_out(folder: Path, version: int) -> HeldOutFigures | None:
    """Figures of a version: of the run's result, of `solrl-train evaluate`, or means of metrics.jsonl; None without."""
    for path in (folder / RESULT, folder / "evaluation" / EVALUATION):
        if path.is_file():
            result = read_json(path)
            if result["version"] == version:
                grid = path.with_name(GRID)
                picture = grid if grid.is_file() else None
                end = _line(figures.result_end(result))
                images = result.get("images") or result["prompts"] * result["seeds"]
                return HeldOutFigures(result["rewards"], result["prompts"], images, picture, end)
    metrics = folder / "metrics.jsonl"
    lines = read_metrics(metrics) if metrics.is_file() else []
    means = {line["version"]: line["rewards"] for line in lines if line["event"] == "evaluation"}
    if not {0, version} <= means.keys():
        return None
    before, after = means[0], means[version]
    return HeldOutFigures({name: {"before": before[name], "after": after[name]} for name in after if name in before})


def how_to_load(folder: Path) -> str | None:
    """The lines that load a run's exported LoRA, from its card; None if the folder lacks one of them."""
    card = folder / CARD
    text = read_text(card) if card.is_file() and (folder / LORA).is_file() else ""
    if MARK not in text:
        return None
    return text.partition("```python\n")[2].partition("\n```")[0] or None


def model_card(config: RunConfig, version: int, measured: HeldOutFigures | None, source: str) -> str:
    """The card in Markdown, with the hub's front matter and the `measured` held-out figures.

    `source` is the first argument of `load_lora_weights`: a repository of the hub, or a folder.
    """
    environment = rendering.environment(keep_trailing_newline=True)
    file, location = split_model(config.model)
    registered = location in MODELS
    on_hub = not registered and not Path(location).is_dir()
    base = location if registered or on_hub else Path(location).name
    place = f"locate({base!r})" if registered else repr(base if on_hub else f"path/to/{base}")
    name = base if file is None else file.name
    model = describe_model(config.model, config.revision)
    call = None if model is None else model.family.pipeline_call(model.options, model.config, config.guidance)
    arguments = {"num_inference_steps": config.evaluate.steps} | (call or {"guidance_scale": config.guidance})
    clips = model is not None and model.family.frame_step > 0
    even = model is not None and not model.family.own_schedule
    if even:
        arguments["sigmas"] = unshifted_sigmas(config.evaluate.steps)[:-1]
    revision = f", revision={config.revision!r}" if config.revision else ""
    transformer = ""
    if file is not None and model is not None and model.config["_class_name"].isidentifier():
        transformer = _from_file(model.config["_class_name"], file.name, place, config.revision)
    example = _first_held_out(config)
    public = config.model_copy(update={"model": name, "prompts": config.shown_prompts})
    settings = settings_yaml(public, omitted=("run", *MACHINE_SETTINGS)).strip()
    page: str = environment.get_template("model_card.md.j2").render(
        front=yaml.safe_dump(_front(config, on_hub and file is None, clips=clips), sort_keys=False).strip(),
        mark=MARK,
        run=config.run,
        base=_line(f"[{base}](https://huggingface.co/{base})" if on_hub and file is None else f"`{name}`"),
        method="by reinforcement learning " if config.shown_weights else "",
        score=_line(figures.sum_text(config.shown_weights)),
        version=version,
        iterations=config.iterations,
        registered=registered,
        pipeline=place + revision + (", transformer=transformer" if transformer else ""),
        transformer=transformer,
        source=source,
        prompt=repr(example[0] if example else "a prompt of yours"),
        seed=example[1] if example else 0,
        held_out="Prompt and seed are the first held-out image's. " if example else "",
        lora=LORA,
        scale=f"{config.lora.alpha / config.lora.rank:g}",
        arguments=", ".join(f"{name}={value!r}" for name, value in arguments.items()),
        arguments_known=call is not None,
        clips=clips,
        unloaded="" if file is None or transformer else _line(file.name),
        solver=config.solver,
        dpm2=config.solver == "dpm2" and not clips,
        even=even,
        measured=measured,
        rows=_rows(measured, config) if measured else [],
        few=figures.few_prompts_text(measured.prompts) if measured and measured.prompts else "",
        facts={name: _line(value) for name, value in _facts(config).items()},
        settings=settings,
        # Longer than any in the settings, whose texts may have lines.
        fence="`" * max(len(run) + 1 for run in ("``", *re.findall("`+", settings))),
    )
    return page


def _line(text: str) -> str:
    """A text from settings or a model as part of one line, also within a table."""
    return printable(text).replace("|", r"\|")


def _first_held_out(config: RunConfig) -> tuple[str, int] | None:
    """Prompt and seed of a run's first held-out image; None if neither its gallery nor its prompts are here."""
    with suppress(FileNotFoundError):
        gallery = load_gallery(config.output)
        if gallery.seeds:
            return gallery.prompts[0], gallery.seeds[0]
    with suppress(OSError, ValueError):
        first = prompts_of_run(config.prompt_sources, "test").all[0]
        return first.text, shown_seed(first)
    return None


def _from_file(kind: str, file: str, place: str, revision: str | None) -> str:
    """The line that loads the transformer of a single-file checkpoint, whose configuration is at `place`."""
    at = f", config_revision={revision!r}" if revision else ""
    options = f"config={place}{at}, subfolder='transformer', torch_dtype=torch.bfloat16"
    return f"transformer = {kind}.from_single_file({f'path/to/{file}'!r}, {options})"


def _front(config: RunConfig, on_hub: bool, *, clips: bool) -> dict[str, Any]:
    task = "text-to-video" if clips else "text-to-image"
    base = {"base_model": config.model, "base_model_relation": "adapter"} if on_hub else {}
    return {
        **base,
        "library_name": "diffusers",
        "pipeline_tag": task,
        "tags": ["lora", task, *(["reinforcement-learning"] if config.shown_weights else []), "solrl"],
    }


def _rows(measured: HeldOutFigures, config: RunConfig) -> list[tuple[str, ...]]:
    """Reward, role, before, after, and gain with its interval."""
    rows = []
    for name, row in measured.rewards.items():
        gain = "–"
        if "gain" in row:
            interval = figures.interval_text(name, row["low"], row["high"])
            gain = f"{figures.gain_text(name, row['gain'])} {interval}"
        values = (figures.reward_text(name, row[when]) for when in ("before", "after"))
        label, role = figures.reward_label(name), figures.role_text(name, config.shown_weights)
        rows.append((_line(label), _line(role), *values, gain))
    return rows


def _facts(config: RunConfig) -> dict[str, str]:
    explore, selected = config.explore, f"{config.explore.keep} kept"
    if config.two_stage:
        selected += f" and regenerated in BF16 with {config.regenerate.steps} steps"
    trained_on = f"{explore.candidates} candidates each in {explore.steps} steps; {selected}"
    if explore.source != "model":
        trained_on = f"stored {explore.source}"
    return {
        "recipe": f"{config.preset}, algorithm {config.algorithm.name}",
        "an iteration": f"{explore.prompts} prompts, {trained_on}",
        "LoRA": f"rank {config.lora.rank}, alpha {config.lora.alpha:g}",
        "AdamW": f"learning rate {config.optimizer.learning_rate:g}, {config.optimizer.updates} steps per iteration",
        "solver, guidance": f"{config.solver}, {config.guidance:g}",
        "seed": str(config.seed),
    }
