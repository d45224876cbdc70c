"""`solrl-train compare`, and commands that do not exist."""

from pathlib import Path

from solrl_trainer.__main__ import main
from tests.support.typed import accepted, refused
from tests.trainer.run_folders import finished_run, write_config, write_metrics


def test_runs_are_compared_by_their_folders(tmp_path: Path) -> None:
    done, half = tmp_path / "done[1]", tmp_path / "half"
    for folder in (done, half):
        folder.mkdir()
    finished_run(done)
    write_metrics(half, 12)
    write_config(half)
    told = accepted(main, "compare", str(done), str(half), COLUMNS="1000").stdout
    first, second = (line for line in told.splitlines() if str(tmp_path) in line)
    for line, figures in (
        (first, ["done[1]", "sol_rl", "clipscore", "30 of 30", "0.2412 → 0.2731", "48.2 % → 67.3 %"]),
        (second, ["half", "12 of 30", "0.2412", "48.2 %"]),
    ):
        assert all(figure in line for figure in figures), line
    assert "→" not in second
    assert "not comparable" not in told
    config = half / "config.json"
    config.write_text(config.read_text().replace('"seed":42', '"seed":43'))
    assert "not comparable" in accepted(main, "compare", str(done), str(half)).stdout
    assert "contains no run" in refused(main, "compare", str(tmp_path))
