"""Prompt sets, the prompts of an iteration, and those that are longer than the model reads."""

import json
from collections import Counter
from pathlib import Path

import pytest
from solrl_core.families import load_backbone
from solrl_minis import catalog
from solrl_proto.rollouts import PromptItem
from solrl_trainer.prompts.prompt_sets import (
    find_prompts,
    in_both,
    prompts_of_iteration,
    prompts_of_run,
    read_prompts,
    read_split,
)
from solrl_trainer.prompts.prompt_source import PromptSource
from solrl_trainer.ranks.communicator import Communicator
from solrl_trainer.rollouts.truncation_warnings import warn_of_long_prompts
from solrl_trainer.session import open_session
from solrl_trainer.settings.presets import resolve
from tests.trainer.training_helpers import prompts_in


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_text_files_have_one_prompt_per_line(tmp_path: Path) -> None:
    lines = "a red circle\n\n  ein größer Würfel \na red circle\nlast"
    items = read_prompts(written(tmp_path, "train.txt", lines), "train")
    assert [item.text for item in items] == ["a red circle", "ein größer Würfel", "last"]
    assert all(item.metadata == {} for item in items)
    row = json.dumps({"prompt": "a\u2028b\u2029c\x85d"}, ensure_ascii=False)
    items = read_prompts(written(tmp_path, "test_metadata.jsonl", f"\ufeff{row}\n"), "test")
    assert [item.text for item in items] == ["a\u2028b\u2029c\x85d"]


def test_metadata_is_kept_unchanged_also_of_rows_with_one_text(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a photo of two cats", "tag": "counting", "include": [{"class": "cat", "count": 2}], "exclude": []},
        {"prompt": "a bench", "tag": "single_object", "include": [{"class": "bench", "count": 1}]},
    ]
    text = json.dumps(lines[0]) + "\n\n" + json.dumps(lines[1]) + "\n"
    items = read_prompts(written(tmp_path, "test_metadata.jsonl", text), "test")
    assert [{"prompt": item.text, **item.metadata} for item in items] == lines
    rows = [{"prompt": "two cats", "count": 2}, {"prompt": "a bench"}, {"prompt": "two cats", "count": 3}]
    lines = [json.dumps(row) for row in [*rows, rows[0], {"count": 3, "prompt": "two cats"}]]
    found = read_split(written(tmp_path, "train_metadata.jsonl", "\n".join(lines)), "train")
    assert [{"prompt": item.text, **item.metadata} for item in found.prompts] == rows
    assert found.rows == 5
    assert str(found.repeated).startswith("5 prompts read from ")
    assert str(found.repeated).endswith("and 3 remain")
    backwards = read_split(written(tmp_path, "test_metadata.jsonl", "\n".join(reversed(lines))), "test")
    assert {item.id for item in backwards.prompts} == {item.id for item in found.prompts}
    assert len({item.id for item in found.prompts}) == 3


def test_a_metadata_file_wins_over_a_text_file_with_the_same_prompts(tmp_path: Path) -> None:
    written(tmp_path, "train.txt", "one\ntwo\n")
    written(tmp_path, "test.txt", "other split\n")
    written(tmp_path, "train_metadata.jsonl", '{"prompt": "two", "tag": "x"}\n{"prompt": "one"}\n')
    assert [item.text for item in read_prompts(tmp_path, "train")] == ["two", "one"]
    assert [item.text for item in read_prompts(tmp_path, "test")] == ["other split"]
    # A text file that would be ignored is refused.
    written(tmp_path, "train_metadata.jsonl", '{"prompt": "from metadata"}\n')
    with pytest.raises(ValueError, match=r"train\.txt and .*metadata\.jsonl have different .*'from metadata'"):
        read_prompts(tmp_path, "train")


def test_prompts_of_both_splits_are_said(tmp_path: Path) -> None:
    written(tmp_path, "train.txt", "one\ntwo\nthree\n")
    train = read_split(tmp_path, "train").texts
    found = in_both(train, ["four", "two"], "train.txt")
    assert found.startswith("1 held-out prompts are also training prompts, so ")
    assert found.endswith("'two'")
    assert in_both(train, ["four"], "train.txt") == ""
    found = in_both(["a café", "a  cat", "an owl"], ["A cafe\u0301.", "a cat!", "an owl", "owls"], "train.txt")
    assert found.startswith("3 held-out prompts are also training prompts (2 of them but for case, ")


def test_an_id_depends_only_on_the_text(tmp_path: Path) -> None:
    first = {i.text: i.id for i in read_prompts(written(tmp_path, "train.txt", "one\ntwo\nthree"), "train")}
    lines = '{"prompt": "three", "tag": "x"}\n{"prompt": "one"}\n'
    again = {i.text: i.id for i in read_prompts(written(tmp_path, "test_metadata.jsonl", lines), "test")}
    assert again == {text: first[text] for text in ("three", "one")}
    assert len(set(first.values())) == 3


@pytest.mark.parametrize(
    "line",
    [
        *("not json", '{"text": "no prompt"}', '["a list"]'),
        *('{"prompt": ""}', '{"prompt": ["a", "b"]}', '{"prompt": 5}', '{"prompt": "\\ud800"}'),
        '{"prompt": "one", "prompt": "two"}',
        '{"prompt": "two", "negative_prompt": "blurred"}',
        '{"prompt": "two", "neg_prompt": "blurred"}',
    ],
)
def test_an_invalid_line_is_named_and_so_is_an_empty_set(tmp_path: Path, line: str) -> None:
    text = f'{{"prompt": "good", "negative_prompt": ""}}\n\n{line}\n'
    with pytest.raises(ValueError, match=r"train_metadata\.jsonl:3: "):
        read_prompts(written(tmp_path, "train_metadata.jsonl", text), "train")
    with pytest.raises(ValueError, match="train prompts are empty"):
        read_prompts(written(tmp_path, "train_metadata.jsonl", "\n \n"), "train")


def test_sets_are_found_by_name_or_folder_and_the_shapes_have_the_verifiers_metadata(tmp_path: Path) -> None:
    assert find_prompts("shapes") == catalog.prompts()
    assert find_prompts(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match=r"'nowhere'.*shapes"):
        find_prompts("nowhere")
    for split in ("train", "test"):
        items = read_prompts(find_prompts("shapes"), split)
        assert all(item.metadata["include"] and item.metadata["tag"] for item in items)
        assert len({item.id for item in items}) == len(items)


ITEMS = [PromptItem(id=str(i), text=f"prompt {i}") for i in range(23)]


def taken(count: int, seed: int, iterations: range) -> list[list[str]]:
    return [[p.id for p in prompts_of_iteration(ITEMS, count, seed, i)] for i in iterations]


def test_a_pass_repeats_no_prompt() -> None:
    passes = 23 // 5
    for start in (0, passes, 7 * passes):
        counts = Counter(i for ids in taken(5, 1, range(start, start + passes)) for i in ids)
        assert set(counts.values()) == {1}
        assert len(counts) == 5 * passes
    assert taken(5, 1, range(4)) != taken(5, 1, range(4, 8))
    # The prompts left over from a pass vary.
    everything = {i for ids in taken(5, 1, range(40)) for i in ids}
    assert len(everything) == 23


def test_an_iterations_prompts_depend_only_on_the_seed_and_are_no_more_than_exist() -> None:
    whole = taken(5, 3, range(20))
    assert [taken(5, 3, range(i, i + 1))[0] for i in reversed(range(20))] == whole[::-1]
    assert taken(5, 4, range(20)) != whole
    with pytest.raises(ValueError, match="got 24 prompts per iteration; expected at most 23"):
        prompts_of_iteration(ITEMS, 24, 0, 0)


def test_every_iteration_and_the_first_held_out_prompts_have_each_sources_share(tmp_path: Path) -> None:
    # One prompt is in both sources.
    for name, train, test in (("photos", 20, 10), ("signs", 9, 5)):
        own = [f"{name} {i}" for i in range(train)]
        prompts_in(tmp_path / name, [*own, "a cat"], [f"held {name} {i}" for i in range(test)])
    sources = {str(tmp_path / "photos"): PromptSource(share=7), str(tmp_path / "signs"): PromptSource(share=3)}
    held_out = prompts_of_run(sources, "test").all
    assert Counter(item.text.split()[1] for item in held_out[:10]) == {"photos": 7, "signs": 3}
    assert len(held_out) == 15
    found = prompts_of_run(sources, "train")
    assert [len(source) for source in found.sources] == [21, 9]
    assert found.counts(10) == [7, 3]
    passes = [[item.text for item in found.of_iteration(10, 42, i)] for i in range(3)]
    assert passes == [[item.text for item in found.of_iteration(10, 42, i)] for i in range(3)]
    for texts in passes:
        assert Counter(text.partition(" ")[0] == "signs" for text in texts) == {False: 7, True: 3}
    # A source is shuffled as if it were alone, and comes once before it is repeated.
    assert {text for texts in passes for text in texts} == {item.text for item in found.all} - {"held"}
    alone = prompts_of_iteration(found.sources[1], 3, 42, 1)
    assert [text for text in passes[1] if text.startswith("signs")] == [item.text for item in alone]
    assert found.of_iteration(10, 43, 0) != found.of_iteration(10, 42, 0)


def test_a_sample_stands_for_a_file_that_is_sorted_by_tag(tmp_path: Path) -> None:
    sizes = {"color": 60, "counting": 30, "position": 24, "two_object": 6}
    rows = [{"prompt": f"{tag} {i}", "tag": tag, "include": [i]} for tag, size in sizes.items() for i in range(size)]
    samples = []
    for name, order in (("sorted", rows), ("reversed", rows[::-1])):
        (tmp_path / name).mkdir()
        written(tmp_path / name, "test.jsonl", "\n".join(map(json.dumps, order)))
        whole = prompts_of_run({str(tmp_path / name): PromptSource()}, "test")
        samples.append([item.text for item in whole.sample(20)])
        assert [item.text for item in whole.sample(120)] == [row["prompt"] for row in order], "all keep their order"
    assert samples[0] == samples[1]
    tags = Counter(text.split()[0] for text in samples[0])
    assert tags == {"color": 10, "counting": 5, "position": 4, "two_object": 1}
    assert [item.text for item in whole.sample(4)] == samples[0][:4]
    shares = "color 2 of 60, counting 1 of 30, position 1 of 24, two_object 0 of 6"
    assert whole.covered(4) == f"4 of 120 by digest; tag: {shares}"
    assert whole.covered(999) == ""


def test_one_source_draws_as_a_plain_set_and_a_text_in_two_may_have_two_ids(tmp_path: Path) -> None:
    name = str(written(tmp_path, "train.txt", "\n".join(f"prompt {i}" for i in range(23))))
    whole, one = read_prompts(tmp_path, "train"), prompts_of_run({name: PromptSource()}, "train")
    assert one.all == whole
    assert all(one.of_iteration(5, 3, i) == prompts_of_iteration(whole, 5, 3, i) for i in range(9))
    for name, tag in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(json.dumps({"prompt": "a cat", "tag": tag}))
    sources = {str(tmp_path / name): PromptSource() for name in ("one", "two")}
    first, second = prompts_of_run(sources, "train").all
    assert first.text == second.text
    assert first.id != second.id


LONG = "two red circles and " * 10


def test_long_prompts_are_named_also_by_a_run(notes: list[str], tmp_path: Path) -> None:
    long = [PromptItem(id=str(i), text=f"{LONG} a cross {i}") for i in range(5)]
    short = [PromptItem(id="a", text="a")]
    warn_of_long_prompts(load_backbone("mini-sana"), {"training": [*short, *long], "held-out": short})
    (text,) = notes
    assert text.startswith("5 of 6 training prompts are longer than mini-sana reads")
    assert text.count("'two red circles and") == 3
    assert "and 2 more" in text
    settings = [
        f"prompts={prompts_in(tmp_path, ['a red circle', LONG])}",
        "explore.prompts=1",
        "lora.rank=2",
        "evaluate.rewards=clipscore",
    ]
    with open_session(resolve("mini-sana/naive_scaling/clipscore", overrides=settings).config, Communicator()):
        said = [note for note in notes if note.startswith("1 of 2 training prompts are longer")]
        assert [note.partition(" than ")[2].partition(" reads")[0] for note in said] == [
            "mini-sana",
            "reward 'clipscore'",
        ]
