"""Text files: UTF-8, two line ends, and errors that name the file."""

from pathlib import Path

import pytest
from solrl_proto.text_files import TextFileError, read_json, read_lines, read_text


def test_only_line_feeds_end_a_line(tmp_path: Path) -> None:
    others = "a\vb\fc\x1cd\x1de\x1ef\x85g\u2028h\u2029i\rj"
    path = tmp_path / "lines.txt"
    path.write_bytes(f"{others}\r\n\nlast\n".encode())
    assert read_lines(path) == [others, "", "last"]
    path.write_bytes(b"no end")
    assert read_lines(path) == ["no end"]
    path.write_bytes(b"")
    assert read_lines(path) == []


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32-le", "latin-1"])
def test_another_encoding_is_refused_with_the_line(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "other.txt"
    path.write_bytes("ß".encode(encoding) if encoding == "latin-1" else "plain\n".encode(encoding))
    with pytest.raises(
        TextFileError, match=r"other\.txt:1: this is not UTF-8; expected a text file in UTF-8"
    ) as caught:
        read_text(path)
    assert caught.value.__cause__ is None  # a decoder's error has the content, which may be secret
    path.write_bytes(b"one\ntwo\n\xff\n")
    with pytest.raises(TextFileError, match=r"other\.txt:3: "):
        read_lines(path)


@pytest.mark.parametrize(
    ("text", "fault"), [('{"a": 1, "a": 2}', "the key 'a' is there twice"), ("{a: 1}", "not JSON"), ("", "not JSON")]
)
def test_json_that_cannot_be_used_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "a.json").write_text('{"größe": 1}', encoding="utf-8-sig")
    assert read_json(tmp_path / "a.json") == {"größe": 1}
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(TextFileError, match=rf"a\.json: .*{fault}"):
        read_json(tmp_path / "a.json")
