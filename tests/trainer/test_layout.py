"""Layouts of a run on some GPUs: what they take, the commands of the fastest, and what a run says of its own."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from solrl_core.families.load import locate
from solrl_core.families.skeleton import Meta, load_skeleton
from solrl_core.model_options import ImageSize
from solrl_trainer.__main__ import main
from solrl_trainer.commands.layout import (
    RATES,
    Rates,
    Stages,
    colocated,
    layouts,
    measuring,
    scaled_rates,
    served,
    stages,
)
from solrl_trainer.session import running_text
from solrl_trainer.settings.presets import resolve
from tests.support.true_shapes import write_skeleton
from tests.support.typed import accepted, refused
from tests.trainer.training_helpers import sets, tiny_config
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).parents[2]
PARTS = Stages(explore=7.5, regenerate=7.0, train=12.5)


def layout(*words: str) -> str:
    return accepted(main, "layout", *words).stdout


def test_naive_scaling_takes_what_its_steps_take() -> None:
    rates = Rates(bf16=1.0, fp8=0.5, image=0.0, point=0.0)

    assert stages(resolve("flux1/sol_rl/hpsv2").config, rates).explore == 96 * 6 * 0.5
    naive = stages(resolve("flux1/naive_scaling/hpsv2").config, rates)
    assert (naive.explore, naive.regenerate) == (96 * 10 * 1.0, 0)


def test_a_run_without_a_pull_to_the_reference_omits_its_pass() -> None:
    rates = Rates(bf16=0, fp8=0, image=0, point=1.0, reference=0.25)
    pulled, free = (resolve(f"flux1/{recipe}/hpsv2").config for recipe in ("sol_rl", "fast"))
    assert stages(pulled, rates).train == 24 * 4
    assert stages(free, rates).train == 4 * 4 * 0.75


def test_all_pages_say_the_hours_of_layout_and_the_same_plan() -> None:
    readme, speed, people = (
        (ROOT / page).read_text(encoding="utf-8")
        for page in ("README.md", "docs/evidence/speed.md", "docs/five-people.md")
    )
    rows = re.findall(r"^\| ([A-Z][\w ]+), \d+ GB[^|]* \| (.*) \|$", readme, re.MULTILINE)
    assert len(rows) == 5
    for gpu, row in rows:
        for model, cell in zip(("flux1", "sd3", "sana"), row.split(" | "), strict=True):
            if cell.startswith("lacks"):
                continue
            hours, blocks = re.findall(r"[\d.]+ h|\(\d+", f"{cell} (0")[:2]
            changes = [f"optimizer.activation_checkpointing={blocks[1:]}"]
            changes += ["explore.precision=bf16"] if gpu in ("A100", "L40S", "RTX 4090") else []
            run = resolve(f"{model}/fast/imagereward", overrides=changes).config
            rates = scaled_rates(RATES[model], gpu)
            seconds = run.iterations * run.explore.prompts * stages(run, rates).total + measuring(run, rates)
            assert f"{seconds / 3600:.1f} h" == hours, (model, gpu)
    (recomputing,) = re.findall(r"^\| H100, .*? \((\d+) of 57\)", readme, re.MULTILINE)
    assert f"{recomputing} of FLUX.1's 57 blocks" in speed
    words = ("--preset", "flux1/fast/imagereward", "--gpus", "8", "--runs")
    on_h100 = ("--scaled-to", "H100", "--set", f"optimizer.activation_checkpointing={recomputing}")
    for command in ((*words, "5"), *((*words, runs, *on_h100) for runs in "567")):
        hours, share = re.findall(r"with a service, ([\d.]+) h per run|explore\.share=([\d.]+)", layout(*command))[:2]
        assert re.search(rf"\b{re.escape(hours[0])}\b", people), command
        assert re.search(rf"\b{re.escape(share[1])}\b", people), command


def test_five_runs_on_eight_gpus_take_the_hours_of_the_command() -> None:
    page, people, readme = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("docs/many-gpus.md", "docs/five-people.md", "README.md")
    )
    rows = page.partition("| layout of the eight GPUs |")[2].splitlines()[2:6]
    cells = [row.strip("| ").split(" | ")[1:] for row in rows]
    (recomputing,) = re.findall(r"where (\d+) blocks of FLUX.1 recompute", people)
    on_h100 = ("--scaled-to", "H100", "--set", f"optimizer.activation_checkpointing={recomputing}")
    for at, words in ((0, ()), (3, on_h100)):

        def hours(gpus: str, way: str = "without", runs: str = "1", words: tuple[str, ...] = words) -> float:
            printed = layout("--preset", "flux1/fast/imagereward", "--gpus", gpus, "--runs", runs, *words)
            (each,) = re.findall(rf"^{way} a service, ([\d.]+) h per run", printed, re.MULTILINE)
            return float(each)

        ends = [[hours("1")] * 5, [hours("2")] * 3 + [hours("1")] * 2, [hours("8", "with", "5")] * 5]
        ends += [[after * hours("8") for after in range(1, 6)]]
        for row, five in zip(cells, ends, strict=True):
            assert row[at : at + 3] == [f"{each:.2f}" for each in (min(five), max(five), sum(five) / 5)]
    shared, queued = cells[2], cells[3]
    assert f"five runs take {shared[2]} hours" in readme
    assert f"{queued[2]} in the mean" in readme


def test_the_speed_of_a_service_beside_one_run_in_many_gpus_md_is_that_of_the_command() -> None:
    text = " ".join((ROOT / "docs/many-gpus.md").read_text(encoding="utf-8").split())

    def speed(*words: str) -> float:
        printed = layout("--preset", "flux1/fast/imagereward", "--gpus", "2", *words)
        seconds = dict(re.findall(r"│ (2 without|1 serving)[^│]*│ +([\d.]+)", printed))
        return float(seconds["2 without"]) / float(seconds["1 serving"])

    six, four = speed(), speed("--set", "explore.steps=4")
    assert f"at {six:.2f} × the pace of one run on two GPUs. With four fitted steps the pace is {four:.2f} ×." in text


def test_blocks_that_recompute_take_their_part_of_a_pass_again() -> None:
    rates = Rates(bf16=0, fp8=0, image=0, point=1.0, reference=0.25)

    def points(blocks: str) -> float:
        config = resolve("flux1/fast/hpsv2", overrides=[f"optimizer.activation_checkpointing={blocks}"]).config
        return stages(config, rates).train / (4 * 4)

    assert [points(blocks) for blocks in ("auto", "false", "0", "true", "57", "99")] == [0.75] * 3 + [1.0] * 3
    assert points("19") == pytest.approx(0.75 + 0.25 / 3)
    words = ("--preset", "flux1/fast/hpsv2", "--gpus", "1", "--scaled-to", "L40S")
    planned = "solrl-train memory --gpu 48 --preset flux1/fast/hpsv2 --set explore.precision=bf16\n"
    assert planned in layout(*words, "--set", "explore.precision=bf16")
    assert "solrl-train memory" not in layout(*words, "--set", "optimizer.activation_checkpointing=49")


@pytest.mark.slow
@pytest.mark.release
def test_the_hours_of_sd3_medium_on_24_gb_are_those_of_equal_flops_a_second(tmp_path: Path) -> None:
    def flops(model: str, side: int) -> int:
        miniature = locate({"flux": "mini-flux", "sana": "mini-sana"}.get(model, "mini-sd3"))
        folder = write_skeleton(model, Path(miniature), tmp_path / model)
        backbone = load_skeleton(str(folder), size=ImageSize(side, side))
        with Meta(), torch.inference_mode(), FlopCounterMode(display=False) as counter:
            row = backbone.encode(["a"], 1.0)
            before = counter.get_total_flops()
            latents = torch.empty(1, *backbone.latent_shape, device="meta")
            backbone.velocity(backbone.transformer, latents, torch.ones(1, device="meta"), row, 1.0)
        return counter.get_total_flops() - before

    guidance = ("guidance=4.5", "explore.precision=bf16", "evaluate.rewards=clipscore")
    config = resolve("sd3-medium/fast/imagereward", overrides=guidance).config
    ours, hours = 2 * flops("sd3-medium", 512), []
    for preset, model, side in (("sd3", "sd3", 1024), ("flux1", "flux", 512), ("sana", "sana", 1024)):
        share, rates = ours / flops(model, side), RATES[preset]
        bf16, point, again = (share * seconds for seconds in (rates.bf16, rates.point, rates.reference))
        # All blocks recompute: a pass of the reference again, which `fast` omits otherwise.
        each = scaled_rates(Rates(bf16, bf16, RATES["flux1"].image, point + again, again), "RTX 4090")
        seconds = config.iterations * config.explore.prompts * stages(config, each).total + measuring(config, each)
        hours.append(f"{seconds / 3600:.1f}")
    text = " ".join((ROOT / "docs/memory.md").read_text(encoding="utf-8").split())
    assert f"computed: {hours[0]}, by SD3.5-Large's speed" in text
    assert f"of FLUX.1 or SANA, {hours[1]} or {hours[2]}." in text


def test_the_slower_side_sets_the_pace_and_a_share_of_exploring_evens_it() -> None:
    alone, shared = colocated(PARTS, 48, 4), served(PARTS, 48, 1, 3)
    assert 0 < shared.share < 1
    assert alone.seconds <= shared.seconds <= 1.02 * alone.seconds
    assert shared.idle < 0.02
    slow = served(PARTS, 48, 1, 1)
    assert (slow.share, slow.seconds) == (1.0, PARTS.regenerate + PARTS.train)
    assert slow.idle == pytest.approx(1 - PARTS.total / (2 * slow.seconds))


def test_gpus_are_divided_among_all_runs() -> None:
    every = layouts(PARTS, 48, 8, runs=3)
    assert {(one.serving, one.training) for one in every} == {(0, 2), (1, 2), (2, 2), (3, 1), (4, 1), (5, 1)}
    assert every == sorted(every, key=lambda one: one.seconds)


def test_the_fastest_layouts_with_and_without_a_service_come_with_their_commands() -> None:
    words = ("--preset", "flux1/sol_rl/hpsv2", "--gpus", "4")
    printed = layout(*words)
    without, _, served_by = printed.partition("\nwith a service, ")
    assert (
        "CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc-per-node=4 -m solrl_trainer run --preset flux1/sol_rl/hpsv2 "
        "--set prompts=prompts\n" in f"{without}\n"
    )
    assert "0 solrl-rollout serve --model black-forest-labs/FLUX.1-dev --rewards hpsv2\n" in served_by
    assert "CUDA_VISIBLE_DEVICES=1,2,3 torchrun" in served_by
    (share,) = re.findall(r"--set explore\.share=([\d.]+) --set prompts=prompts\n", served_by)
    # With this share, a rank explores whole prompts.
    assert float(share) * 16 == pytest.approx(round(float(share) * 16), abs=0.01)
    printed = layout("--preset", "flux1/fast/hpsv2", "--gpus", "2", "--set", "prompts=my_prompts", "--set", "run=first")
    assert "explore.share" not in printed
    assert "8100 --set prompts=my_prompts --set run=first\n" in printed

    printed = layout("--preset", "flux1/sol_rl/hpsv2", "--gpus", "3", "--runs", "2").partition("\nwith a service, ")[2]
    commands = [line.split() for line in printed.splitlines() if "CUDA" in line]
    assert [words[0] for words in commands] == [f"CUDA_VISIBLE_DEVICES={gpu}" for gpu in range(3)]
    assert [words[-1] for words in commands[1:]] == ["run=flux1-sol_rl-hpsv2-1", "run=flux1-sol_rl-hpsv2-2"]


def test_a_number_of_prompts_that_leaves_gpus_idle_is_named_with_a_better_number() -> None:
    words = ("--preset", "flux1/fast/hpsv2", "--gpus", "8")
    (line,) = [line for line in layout(*words).splitlines() if "do not divide" in line]
    uneven, even, prompts = re.findall(r"([\d.]+) s, and ([\d.]+) s with --set explore\.prompts=(\d+)$", line)[0]
    assert (line.split()[0], prompts) == ("12", "16")
    assert float(uneven) == pytest.approx(float(even) * 16 / 12, rel=0.01)
    assert "do not divide" not in layout(*words, "--set", "explore.prompts=16")
    assert "do not divide" not in layout(*words, "--runs", "5")


@pytest.mark.parametrize(
    "words",
    [
        ("--preset", "mini-sana/sol_rl/clipscore"),
        ("--preset", "flux1/sol_rl/hpsv2", "--gpus", "0"),
        ("--preset", "flux1/sol_rl/hpsv2", "--gpus", "2", "--runs", "3"),
        ("--preset", "flux1/sol_rl/hpsv2", "--scaled-to", "GTX 1080"),
    ],
)
def test_what_gives_no_layout_is_refused(words: tuple[str, ...]) -> None:
    assert "expected" in refused(main, "layout", *words)


def test_a_size_or_a_guidance_whose_rates_were_not_measured_is_named() -> None:
    words, tall = ("--gpus", "1", "--preset", "flux1/fast/imagereward"), ("--set", "generate.height=1024")
    assert "got generate.height=1024 and generate.width=512; the rates are of 512 and 512" in layout(*words, *tall)
    same = sets("generate.height=512", "generate.width=512", "guidance=4.5")  # which FLUX.1 embeds
    assert "got g" not in layout(*words) + layout(*words, *same)
    assert "got guidance=4.5; the rates are of guidance 1" in layout(*words[:3], "sd3/fast/imagereward", *same[-2:])


def test_hours_include_evaluations_and_measurements_of_ranks() -> None:
    config = resolve("flux1/fast/imagereward").config
    # 64 prompts, 2 images before and after, 1 image ten times along; ten times 4 groups of 24, in 6 and in 10 steps.
    steps = (2 * 64 * 2 + 10 * 64) * 28 + 10 * 4 * 24 * (6 + 10)
    assert measuring(config, Rates(bf16=1, fp8=1, image=0, point=0)) == steps


def test_hours_of_another_gpu_follow_the_peaks_and_are_marked_as_computed() -> None:
    words = ("--preset", "sana/fast/clipscore", "--gpus", "1")

    def hours(*more: str) -> float:
        (of_run,) = re.findall(r"without a service, ([\d.]+) h per run", printed := layout(*words, *more))
        assert ("not measured" in printed) is bool(more)
        return float(of_run)

    assert hours("--scaled-to", "H100") == hours()
    assert hours("--scaled-to", "RTX 4090") == pytest.approx(hours() * 989 / 165, rel=0.01)
    assert scaled_rates(Rates(bf16=2, fp8=1, image=0, point=0), "A100").fp8 == 2 * 989 / 312


@pytest.mark.parametrize(
    ("model", "measured", "points"), [("flux1", "flux", 4), ("sd3", "sd3", 6), ("sana", "sana", 6)]
)
def test_shipped_rates_are_those_of_the_stored_measurements(model: str, measured: str, points: int) -> None:
    rows = json.loads((ROOT / "benchmarks/results/equal_gpus.json").read_text(encoding="utf-8"))["rows"]
    own = {row["part"]: row for row in rows if row["model"] == measured and row["gpus"] == 1}
    six, four, naive = (own[way]["explore"] for way in ("sol_rl", "sol_rl, 4 fitted steps", "naive"))
    point = own["training"]["s"] / 24 / points
    passes = json.loads((ROOT / "benchmarks/results/training_phase.json").read_text(encoding="utf-8"))["rows"]
    one = next(row for row in passes if (row["model"], row.get("way")) == (measured, "solrl"))
    reference = point * one["reference"] / (one["current"] + one["old"] + one["reference"])
    fp8 = (six - four) / 2 / 96
    image = six / 96 - 6 * fp8
    expected = Rates(bf16=(naive / 96 - image) / 10, fp8=fp8, image=image, point=point, reference=reference)
    assert dataclasses.astuple(RATES[model]) == pytest.approx(dataclasses.astuple(expected), rel=1e-4)
    assert own["naive"]["device"] == "NVIDIA H200"


def test_the_command_tells_of_whole_iterations_and_of_a_fitted_plan() -> None:
    loop = json.loads((ROOT / "benchmarks/results/fast.json").read_text(encoding="utf-8"))["loop"]
    longer = []
    for model, measured in (("flux1", "flux"), ("sd3", "sd3"), ("sana", "sana")):
        fast = resolve(f"{model}/fast/imagereward", overrides=["explore.precision=fp8"]).config
        longer.append(loop[measured]["clock"] / (fast.explore.prompts * stages(fast, RATES[model]).total) - 1)
    printed = layout("--preset", "flux1/sol_rl/hpsv2")
    assert f"of fast took {100 * min(longer):.0f} to {100 * max(longer):.0f} % longer".replace("-", "−") in printed
    first, second, third = (f"{100 * each:+.0f} %".replace("-", "−") for each in longer)
    page = " ".join((ROOT / "docs/many-gpus.md").read_text(encoding="utf-8").split())
    assert f"by {first} (FLUX.1), {second} (SD3.5-Large) and {third} (SANA)." in page
    words = ("--preset", "flux1/sol_rl/hpsv2", "--gpus", "2")
    (hours,) = re.findall(r"^with 4 steps .* ([\d.]+) h per run$", layout(*words), re.MULTILINE)
    printed = layout(*words, "--set", "explore.steps=4")
    assert "with 4 steps" not in printed
    assert re.search(rf"2 without a service .* {re.escape(hours)} │", printed)


URL = "http://127.0.0.1:8100"
ALONE = "rollout_url=null"


@pytest.mark.parametrize(
    ("settings", "ranks", "device", "text"),
    [
        ((ALONE,), 2, "cuda:0", "2 GPUs explore, regenerate and train"),
        ((ALONE, "regenerate.at=none"), 1, "cpu", "1 CPU process explores and trains"),
        ((), 1, "cuda", f"1 GPU regenerates and trains; {URL} explores (lag 0)"),
        (("explore.lag=1",), 3, "cpu", f"3 CPU processes regenerate and train; {URL} explores (lag 1)"),
        (("explore.share=0.5",), 1, "cuda", f"1 GPU explores, regenerates and trains; {URL} explores (lag 0)"),
    ],
)
def test_a_layout_says_who_does_what(settings: tuple[str, ...], ranks: int, device: str, text: str) -> None:
    assert running_text(tiny_config(*settings), ranks, device) == text
