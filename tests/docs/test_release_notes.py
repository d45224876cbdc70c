"""scripts/release_notes.py: the section of a version, with links that work outside the repository."""

import pytest
from release_notes import release_notes

REPOSITORY = "https://example.org/owner/name"
CHANGELOG = """\
# Changelog

## Unreleased

- Later.

## 0.2.0 - 2026-12-01

- New: [page](docs/api.md#errors), [paper](https://example.org/paper).

## 0.1.0 - 2026-11-01

- First.
"""


def test_the_notes_are_the_section_of_the_version_without_which_it_is_refused() -> None:
    notes = f"- New: [page]({REPOSITORY}/blob/v0.2.0/docs/api.md#errors), [paper](https://example.org/paper)."
    assert release_notes("v0.2.0", REPOSITORY, CHANGELOG, "0.2.0") == notes
    assert release_notes("v0.1.0", REPOSITORY, CHANGELOG, "0.1.0") == "- First."
    for tag, expected in (("v0.2.0", "expected 'v0.3.0'"), ("v0.3.0", "expected '## 0.3.0'")):
        with pytest.raises(ValueError, match=expected):
            release_notes(tag, REPOSITORY, CHANGELOG, "0.3.0")
