"""`solrl-train prompts`: prompt sets from the files that people have."""

import json
import math
import os
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from solrl_proto import text_files
from solrl_trainer.__main__ import main
from solrl_trainer.commands.import_prompts import HELD_OUT, import_prompts
from solrl_trainer.prompts.prompt_sets import folded, read_prompts
from tests.support.typed import refused, typed


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="")
    return path


def imported(folder: Path, *files: Path, **options: object) -> list[dict[str, object]]:
    """All prompts of the set that is made, with their metadata, in the order of the rows."""
    import_prompts(files, folder / "set", **{"test": 1, "test_file": None, **options})
    return [
        {"prompt": item.text, **item.metadata}
        for split in ("test", "train")
        for item in read_prompts(folder / "set", split)
    ]


def by_prompt(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    return sorted(rows, key=json.dumps)


GENEVAL = [{"tag": "counting", "include": [{"class": "cat", "count": 2}], "prompt": "two cats"}, {"prompt": "a bench"}]
OWL, CAT = {"prompt": "an owl"}, {"prompt": "a cat"}


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("list.txt", "a b\u2028c\r\n\nan owl\n", [{"prompt": "a b\u2028c"}, OWL]),
        ("geneval.jsonl", "\n".join(map(json.dumps, GENEVAL)), GENEVAL),
        ("train.jsonl", '{"input": "an owl"}\n{"input": "a cat"}\n', [OWL, CAT]),
        (
            "drawbench.csv",
            'Prompts,Category\n"a, b",Colors\nan owl,Text\n',
            [{"prompt": "a, b", "Category": "Colors"}, OWL | {"Category": "Text"}],
        ),
        (
            "parti.tsv",
            'Prompt\tCategory\tNote\nbond\tAbstract\t\n"a ""cat"""\tAnimals\tx\n',
            [
                {"prompt": "bond", "Category": "Abstract", "Note": ""},
                {"prompt": 'a "cat"', "Category": "Animals", "Note": "x"},
            ],
        ),
        (
            "coco.jsonl",
            "\n".join(json.dumps(row | {"id": number}) for number, row in enumerate((OWL, OWL, OWL, CAT))),
            [OWL | {"id": 0}, CAT | {"id": 3}],
        ),
        ("texts.json", '["an owl", {"prompt": "a cat", "n": 3}]', [OWL, CAT | {"n": 3}]),
    ],
)
def test_formats_are_read_with_metadata(tmp_path: Path, name: str, text: str, rows: list[dict[str, object]]) -> None:
    assert by_prompt(imported(tmp_path, written(tmp_path / name, text))) == by_prompt(rows)


def test_parquet_is_read_without_its_images(tmp_path: Path, notes: list[str]) -> None:
    table = {"caption": ["an owl", "a cat"], "jpg_0": [b"\x00", b"\x01"], "best": [{"candidate": "x"}, None]}
    table |= {"image": [{"bytes": b"\x00", "path": "a.png"}] * 2, "score": [0.5, math.nan]}
    table |= {"made": [datetime.now(UTC)] * 2, "sizes": [[1], [2, 3]]}
    parquet.write_table(pyarrow.table(table), tmp_path / "pick.parquet")
    found = by_prompt(imported(tmp_path, tmp_path / "pick.parquet"))
    rows = [{"best": {"candidate": "x"}, "score": 0.5, "sizes": [1]}, {"best": None, "score": None, "sizes": [2, 3]}]
    assert found == by_prompt([OWL | rows[0], CAT | rows[1]])
    left_out = "columns that JSON has no form for are left out: image, jpg_0, made"
    assert notes == [f"{tmp_path}/pick.parquet: {left_out}"]


def test_a_large_text_and_what_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "LARGEST", 2**20)
    with (tmp_path / "zeros.txt").open("wb") as file:
        file.truncate(5 * 10**9)
    with pytest.raises(ValueError, match=r"zeros\.txt: got more than 1 MiB"):
        imported(tmp_path, tmp_path / "zeros.txt")
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    for name in ("pipe.csv", "zero.txt"):
        with pytest.raises(ValueError, match=rf"{name}, which is a device or a pipe; expected a file"):
            imported(tmp_path, tmp_path / name)


def test_a_saved_data_set_has_its_splits(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    for split, owner in (("train", "an owl"), ("test", "a cat")):
        folder = saved / split
        written(folder / "dataset_info.json", "{}")
        written(folder / "state.json", "{}")
        table = pyarrow.table({"text": [owner]})
        with pyarrow.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as stream:
            stream.write_table(table)
    written(saved / "dataset_dict.json", "{}")
    import_prompts([saved], tmp_path / "set", test_file=saved)
    assert [item.text for item in read_prompts(tmp_path / "set", "train")] == ["an owl"]
    assert [item.text for item in read_prompts(tmp_path / "set", "test")] == ["a cat"]


def test_a_hub_folder_has_its_splits_by_name_and_a_missing_one_is_named(tmp_path: Path) -> None:
    data = tmp_path / "hub" / "data"
    data.mkdir(parents=True)
    for split in ("train", "test", "test_unique", "trainval", "train2test"):
        parquet.write_table(pyarrow.table({"prompt": [f"{split} owl"]}), data / f"{split}-00000-of-00001.parquet")
    written(data / "testmini.csv", "prompt\na cat\n")
    import_prompts([tmp_path / "hub"], tmp_path / "set", test_file=tmp_path / "hub")
    assert [item.text for item in read_prompts(tmp_path / "set", "test")] == ["test owl"]
    assert [item.text for item in read_prompts(tmp_path / "set", "train")] == ["train owl"]
    (data / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(ValueError, match=r"hub with data; expected files of the split 'test'"):
        import_prompts([tmp_path / "hub"], tmp_path / "other", test_file=tmp_path / "hub")


def test_rows_that_were_merged_and_dropped_are_counted(tmp_path: Path) -> None:
    lines = [{"prompt": "owl"}, {"prompt": " owl "}, {"prompt": "owl", "n": 2}, {"prompt": " "}, {"prompt": "x" * 4097}]
    lines += [{"prompt": "cat", "negative_prompt": "blurred"}]
    path = written(tmp_path / "rows.jsonl", "\n".join(map(json.dumps, lines)))
    notes = import_prompts([path], tmp_path / "set", test=1, test_file=None)
    assert notes[:4] == [
        "train: 6 rows read, 1 merged with equal ones, 2 dropped, 3 prompts remain",
        f"  dropped {path}:4: it is empty",
        f"  dropped {path}:5: it has 4,097 characters; at most 4,096 are read",
        "  1 negative prompts are left out: no image is generated with them",
    ]


def test_rows_of_one_text_are_in_one_split_whatever_their_order(tmp_path: Path) -> None:
    # But for what differs seldom.
    texts = [(f"prompt {number}", f"Prompt  {number}.") for number in range(200)]
    lines = [json.dumps({"prompt": text, "n": number}) for number, text in enumerate(chain(*texts))]
    splits = []
    for name, order in (("one", lines), ("two", lines[::-1])):
        import_prompts([written(tmp_path / f"{name}.jsonl", "\n".join(order))], tmp_path / name, test_file=None)
        splits.append({split: {p.text for p in read_prompts(tmp_path / name, split)} for split in ("train", "test")})
    assert splits[0] == splits[1]
    assert not set(map(folded, splits[0]["train"])) & set(map(folded, splits[0]["test"]))
    assert len(splits[0]["test"]) == 40 < HELD_OUT
    with pytest.raises(ValueError, match="got --test -5; expected at least 1"):
        import_prompts([tmp_path / "one.jsonl"], tmp_path / "three", test=-5, test_file=None)
    notes = import_prompts([tmp_path / "one.jsonl"], tmp_path / "three", test_file=tmp_path / "two.jsonl")
    assert notes[-1].startswith("400 held-out prompts are also training prompts, so ")


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": null}\n', r"a\.jsonl:2: got the prompt null; expected a text"),
        ("a.jsonl", '{"words": "a"}\n', r"a\.jsonl:1: got the fields words; expected one of prompt, .* or --key NAME"),
        ("a.jsonl", "5\n", r"a\.jsonl:1: got 5; expected a JSON object"),
        ("a.csv", "prompt,n\na\n", r"a\.csv:2: got 1 cells; expected 2, as in the first line"),
        ("a.tsv", 'prompt\tn\n"OPEN" on a sign\t1\n', r"a\.tsv:2: .*; write a"),
        pytest.param("a.tsv", f"prompt\tn\na\t{'x' * 140_000}\n", r"a\.tsv:2: metadata has 140009 bytes", id="long"),
        ("a.csv", "prompt,n,n\na,1,2\n", r"a\.csv:1: got the column 'n' twice"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": "b", "n": [NaN]}\n', r"a\.jsonl:2: metadata has NaN or Infinity"),
        ("a.json", '[{"prompt": "b", "n": 1e999}]', r"a\.json, row 1: metadata has NaN or Infinity"),
        ("a.jsonl", "[" * 100_000, r"a\.jsonl:1: maximum recursion depth"),
        ("a.jsonl", '{"prompt": "a", "rewards": "high"}\n', r"a\.jsonl:1: "),
        ("a.json", '{"prompt": "a"}', r"a\.json: got dict; expected a list"),
        ("a.xlsx", "x", r"a\.xlsx; expected a file of \.txt, \.jsonl"),
        ("a.txt", "\n", r"no train prompts remain of 0"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        imported(tmp_path, written(tmp_path / name, text))
    assert not (tmp_path / "set").exists()


def test_the_command_makes_a_set_that_a_run_takes(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.csv", "id,beschreibung\n" + "".join(f"{i},{i} red circles\n" for i in range(30)))
    words = ["prompts", str(path), "--key", "beschreibung", "--output", str(tmp_path / "set")]
    assert f"{tmp_path}/set/test_metadata.jsonl: 3 prompts" in typed(main, *words).stdout
    for name in ("train.txt", "test_metadata.jsonl"):
        written(tmp_path / name / name, "mine")
        for folder in ("set", name):
            said = refused(main, *words[:-1], str(tmp_path / folder))
            assert "is there already; choose another --output" in said
        assert [path.name for path in (tmp_path / name).iterdir()] == [name]
    run = ["run", "--dry-run", "--preset", "mini-sana/naive_scaling/clipscore", "--output", str(tmp_path / "run")]
    assert typed(main, *run, "--set", f"prompts={tmp_path}/set", "--set", "explore.prompts=4").returncode == 0
