import json
import re

import pytest
from solrl_trainer.report.model_card import MARK
from solrl_trainer.report.page import describe_fidelity, write_report
from solrl_trainer.run_folder.metrics_file import read_metrics
from tests.trainer.run_folders import (
    HOSTILE,
    LONG_REWARD,
    PROMPTS,
    finished_run,
    iteration_line,
    run_of_sum,
    write_config,
    write_lines,
    write_metrics,
)

GAP = "Gap of log-probabilities between rollout and training"


def page_of(folder):
    return write_report(folder).read_text(encoding="utf-8")


def words(page):
    text = re.sub(r"<(style|title)>.*?</\1>", "", page, flags=re.S)
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())


def test_a_saturated_reward_is_said():
    line = {"spearman": 0.3, "top_rank": 38.1, "bottom_rank": 90, "perfect_top": 37.5, "perfect_bottom": 90.5}
    said = describe_fidelity(line | {"best_share": 0.77}, candidates=96, keep=24)
    assert "mean true rank of 38.1 (perfect 37.5, chance 48.5)" in said
    assert said.endswith("Reward saturated: 77 % of a prompt's candidates share its best score.")
    assert "saturated" not in describe_fidelity(line | {"best_share": 0.5}, candidates=96, keep=24)


def test_a_finished_run_shows_its_figures_and_is_self_contained(tmp_path):
    page = page_of(finished_run(tmp_path))
    text = words(page)
    for figure in (
        *("made-up finished mini-sana, sol_rl, trained on clipscore · 30 of 30 iterations", "clipscore trained 0.2412"),
        *("strict accuracy (verifier) evaluation only 48.2 %", "explored in NVFP4 (emulated), 6 steps"),
        *("0.2412 → 0.2731", "+0.0319 95 % [+0.0281, +0.0357]", "48.2 % → 67.3 %"),
        *("+19.1 points 95 % [+14.5, +23.6]", "over 512 images of 128 held-out prompts", "0 0.873 14.2 82.4"),
        *("have a mean true rank of 14.2 (perfect 6.5, chance 48.5)", "Exploration took 2 min 06 s", "wait 1 min 45 s"),
        "clipscore candidates, at there:8200, for the service 36.0 s",
        *("clipscore samples, in the trainer 7.5 s", "verifier samples, in the trainer 0.0 s", "evaluate 1 min 01 s"),
        *("proxy 0.3126", "true 0.3068", "30 29 000000000000", "learning_rate 0.001"),
    ):
        assert figure in text
    for absent in ("wanted at least", "Shares of the spread", GAP, "Use the LoRA"):
        assert absent not in page
    links = re.findall(r"""\b(?:src|href|srcset|action|data)\s*=\s*["']?([^"'>\s#]+)""", page)
    # Before, after, and both images of two pairs.
    assert len(links) == 2 * len(PROMPTS) + 4
    assert all(link.startswith("data:image/") for link in links)
    assert "@import" not in page
    assert "url(" not in page
    # Prompts are escaped.
    assert "<script" not in page
    assert "&lt;script&gt;alert(&#34;red&#34;)&lt;/script&gt;" in page
    assert HOSTILE not in page


def test_an_unfinished_run_shows_its_logs_and_none_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="contains no run"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())
    write_metrics(tmp_path, 3)
    write_config(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "iteration", "ver')
    text = words(page_of(tmp_path))
    assert "not finished" in text
    assert "No result yet" in text
    assert "version 0: clipscore 0.2412 , strict accuracy (verifier) 48.2 %" in text
    assert "3 of 30 iterations" in text
    assert "Before and after" not in text


@pytest.mark.parametrize("iterations", [0, 1, 500])
def test_any_number_of_iterations_gives_a_page(tmp_path, iterations):
    write_metrics(tmp_path, iterations)
    write_config(tmp_path)
    page = page_of(tmp_path)
    assert ("Rewards during training" in page) == (iterations > 0)
    assert page.count("push 0.1 s</title>") == 2 * min(iterations, 100)


def test_rank_fidelity_is_shown_along_the_run(tmp_path):
    finished_run(tmp_path)
    write_metrics(tmp_path, 30, ranks=(0.873, 0.84, 0.7))
    page = page_of(tmp_path)
    assert "of 4 held-out prompts, always the same" in words(page)
    assert "mean Spearman 0.70" in words(page)
    assert "10 0.840 14.2 82.4 20 0.700" in words(page)
    assert "<title>20: Spearman 0.7, wanted at least 0.75</title>" in page
    fidelity = page.partition("Rank fidelity of exploration")[2].partition("</figure>")[0]
    assert fidelity.count("<use ") == 2 * 3


@pytest.mark.parametrize(("at", "regenerated"), [("service", True), ("none", False)])
def test_the_page_says_whether_samples_were_regenerated(tmp_path, at, regenerated):
    folder = finished_run(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"regenerate": config["regenerate"] | {"at": at}}))
    assert ("regenerated in BF16, of their best and worst halves" in words(page_of(folder))) == regenerated


@pytest.mark.parametrize("prompts", [7, 8])
def test_a_sum_of_rewards_has_its_card_and_its_chart(tmp_path, prompts):
    run_of_sum(tmp_path, prompts)
    page = page_of(tmp_path)
    text = words(page)
    formula = f"clipscore − 0.2 × {LONG_REWARD}"
    assert f"mini-sana, sol_rl, trained on {formula} · 30 of 30" in text
    assert f"{formula}: means of the selected candidates" in text
    assert f"weighted sum trained: {formula} 0.2412 → 0.2731" in text
    assert f"weighted sum: {formula}" in text
    assert f"{LONG_REWARD} trained, weight −0.2 0.2412" in text
    # clipscore − 0.2 of the other.
    assert "<title>0: weighted sum 0.1448 [0.1448, 0.1448]</title>" in page
    assert "<title>30: weighted sum 0.1385 [0.13, 0.15]</title>" in page
    assert ("the intervals are over 7 prompts and may be too narrow" in text) == (prompts == 7)


def test_the_held_out_curve_has_the_interval_of_its_gain(tmp_path):
    finished_run(tmp_path)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    again = {"event": "evaluation", "version": 0, "rewards": {"clipscore": 0.2412, "verifier": 0.482}}
    lines = [line | {"images": 128} if line["event"] == "evaluation" else line for line in [*lines, again]]
    write_lines(tmp_path, lines)
    page = page_of(tmp_path)
    curve = page.partition("Held-out curve")[2].partition("</section>")[0]
    assert "The band is the 95 % interval" in words(curve)
    assert curve.count("opacity: 0.1") == 2
    assert "<title>30: clipscore 0.2731 [0.2693, 0.2769]</title>" in curve
    # A resumed run shows each version once.
    assert curve.count("<title>0: clipscore 0.2412 [0.2412, 0.2412]</title>") == 1
    assert "128 images of the 512 above" in words(curve)
    assert page.index("Held-out curve") < page.index("Rewards during training")


def test_the_page_says_how_to_load_the_lora(tmp_path):
    finished_run(tmp_path)
    card = f"# made-up\n{MARK}\n```python\npipeline.load_lora_weights('<here>')\n```\n"
    (tmp_path / "README.md").write_text(card)
    (tmp_path / "lora.safetensors").write_bytes(b"")
    page = page_of(tmp_path)
    assert "<pre><code>pipeline.load_lora_weights(&#39;&lt;here&gt;&#39;)</code></pre>" in page
    (tmp_path / "README.md").write_text(card.replace(MARK, ""))
    assert "Use the LoRA" not in page_of(tmp_path)


def test_shares_of_rewards_and_gaps_of_log_probabilities_are_shown_where_a_run_has_them(tmp_path):
    folder = finished_run(tmp_path)
    lines = [
        iteration_line(i)
        | {"shares": {"clipscore": 1 - share, "red": share}, "objective/gap": {"1.0": 0.0, "0.9": 2e-4}}
        for i, share in enumerate((0.02, 0.06))
    ]
    write_lines(folder, lines)
    page = page_of(folder)
    assert "within a prompt, means over all iterations: clipscore 96.0 %, red 4.0 %." in words(page)
    assert "Caution: hardly trained, because of a share below 5 %: red." in words(page)
    assert GAP in words(page)
    assert "largest of a noise level 0.0002" in " ".join(page.split())
