"""Settings in YAML: scalars of YAML 1.2, and nothing that takes long or is read in two ways."""

import pytest
import yaml
from solrl_trainer.settings.yaml_text import YamlError, dump_yaml, parse_yaml

SCALARS = {
    **{"010": 10, "0o17": 15, "0x1F": 31, "+3": 3, "1e-2": 0.01, ".5": 0.5, "1.": 1.0, "-.inf": float("-inf")},
    **{text: text for text in ("1:30", "2025-11-25", "1_000", "no", "=")},
    **{"'1'": "1", "~": None, "": None, "TRUE": True},
}


@pytest.mark.parametrize("text", SCALARS)
def test_scalars_are_those_of_yaml_1_2(text: str) -> None:
    found = parse_yaml(f"a: {text}")[0]["a"]
    assert (found, type(found)) == (SCALARS[text], type(SCALARS[text]))


def test_names_are_texts_and_have_lines() -> None:
    value, lines = parse_yaml("1: {2025-11-25: x}\nnull:\n  - no: 1\n")
    assert value == {"1": {"2025-11-25": "x"}, "null": [{"no": 1}]}
    assert lines == {"1": 1, "1.2025-11-25": 1, "null": 2, "null.0.no": 3}
    assert parse_yaml("." * 40 + ": " + "[" * 31 + "]" * 31)[1] == {"." * 40: 1}
    assert parse_yaml("") == parse_yaml("# nothing\n") == (None, {})


def test_what_is_written_is_read_alike_by_both_versions() -> None:
    shared = ["08", "1e5", "é", "two\nlines # of text"]
    value = {"texts": list(SCALARS), "numbers": [1e-5, 1e22, 0.1, 7, True, None], "1": shared, "again": shared}
    for flow in (False, True):
        text = dump_yaml(value, flow=flow)
        assert parse_yaml(text)[0] == value == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &x [1]\nb: *x", r"line 2, column 4: got the alias \*x; expected its value"),
        *((text, "line 1, column 4: got the tag '!x'; expected none") for text in ("a: !x 3", "a: !x {b: 1}")),
        ("a: !!int 3", "line 1, column 4: got the tag '.*:int'; expected none"),
        ("!!bool yes", "line 1, column 1: got the tag '.*:bool'; expected none"),
        ("- 1\n- !!null 7", "line 2, column 3: got the tag '.*:null'; expected none"),
        ("!x [1]", "line 1, column 1: got the tag '!x'; expected none"),
        ("!!python/object:x a: 1", "line 1, column 1: got the tag '.*:python/object:x'; expected none"),
        ("*x : 1", r"line 1, column 1: got the alias \*x; expected its value"),
        ("\n" + "[" * 40 + "]" * 40, "line 2, column 33: got 33 values inside each other; expected at most 32"),
        ("[" * 100_000, "line 1, column .*nesting depth"),
        ("- " * 2**19 + "a", "got 1,048,577 characters; expected at most 1,048,576"),
        ("a: 1\n---\nb: 2", "line 2, column 1: .*another document"),
        ("a:\n  b: 1\na.b: 3", "line 3, column 1: a.b is there already, in line 2"),
        ("? [1]\n: 2", "line 1, column 3: expected a name here"),
        ("é: 1\nb: \x07", r"line 2: got the character '\\x07'; expected a printable one"),
        ("a: \udc80", r"line 1: got the character '\\udc80'"),
        ("a: 'b", "line 1, column "),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(YamlError, match=said):
        parse_yaml(text)
