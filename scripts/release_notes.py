"""Release notes of a version: its section of CHANGELOG.md, with links to the files of its tag.

`python scripts/release_notes.py v0.1.0 --repository https://github.com/OWNER/NAME`
"""

import argparse
import re
import tomllib
from pathlib import Path

from docs_site import LINK

ROOT = Path(__file__).resolve().parents[1]


def release_notes(tag: str, repository: str, changelog: str, version: str) -> str:
    """The section `## X.Y.Z` of the changelog, in Markdown.

    Args:
        tag: `vX.Y.Z`.
        repository: its URL on GitHub.
        changelog: text of CHANGELOG.md.
        version: version of the package.

    Raises:
        ValueError: the tag is not the package's version, or the changelog has no such section.
    """
    if tag != f"v{version}":
        raise ValueError(f"got tag {tag!r}; expected 'v{version}', the version in pyproject.toml: change one of them")
    titles = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    if (title := next((title for title in titles if title.split()[0] == version), None)) is None:
        raise ValueError(f"CHANGELOG.md has the sections {titles}; expected '## {version}': rename the newest")
    section = changelog.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0].strip()
    return LINK.sub(lambda link: f"{repository}/blob/{tag}/{link[1]}", section)


def main() -> None:
    """Print the notes, or say what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tag", help="tag of the release, vX.Y.Z")
    parser.add_argument("--repository", required=True, help="URL of the repository on GitHub")
    given = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    try:
        print(release_notes(given.tag, given.repository, changelog, project["version"]))
    except ValueError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
