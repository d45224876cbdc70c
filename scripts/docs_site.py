"""Hooks of mkdocs.yml, which builds the documentation site from the pages as GitHub shows them.

- Three files beside docs/ become pages.
- A link to a file that is not on the site leads to the repository.
- A file name after the language of a fenced block becomes the block's title.
- An entry of docs/reference, which links an object's name to its source, becomes the object's docstrings.
"""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BESIDE = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages beside docs/: path in the repository → path on the site."""
ENTRY = re.compile(r"^- \[`([\w.]+)`\]\(([^)]+\.py)\)$", re.MULTILINE)
"""An entry of the reference: the object's dotted name, and its source."""
LINK = re.compile(r"(?<=\]\()([^)\s:#]+)(?=[)#])")
"""The file that a Markdown link or image names."""
_FENCE = re.compile(r"^```(\w+) (\S+)$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages beside docs/."""
    from mkdocs.structure.files import File

    for source, path in BESIDE.items():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn a page as GitHub shows it into one for the site."""
    path = page.file.src_uri
    source = next((file for file, on_site in BESIDE.items() if on_site == path), f"docs/{path}")
    if source.startswith("docs/reference/"):
        markdown = ENTRY.sub(_docstrings, markdown)
    return with_links(_FENCE.sub(r'```\1 title="\2"', markdown), source, config.repo_url)


def _docstrings(entry: re.Match[str]) -> str:
    # A message's fields matter even if their names say all.
    fields = str(entry[1].startswith("solrl_proto.")).lower()
    return f"::: {entry[1]}\n    options: {{show_if_no_docstring: {fields}}}\n"


def with_links(markdown: str, source: str, repository: str | None) -> str:
    """Markdown with links to pages of the site, and to the repository for other files.

    Args:
        markdown: text of the page; a link to a file that does not exist stays, and `mkdocs build --strict` refuses it.
        source: path of the page in the repository.
        repository: URL on GitHub; without it, other files are linked on this machine.
    """
    here = dirname(site_path(source) or "") or "."

    def changed(link: re.Match[str]) -> str:
        target = normpath(join(dirname(source), link[1]))
        file = ROOT / target
        if not file.exists():
            return link[1]
        if (page := site_path(target)) is not None:
            return relpath(page, here)
        return f"{repository}/{'tree' if file.is_dir() else 'blob'}/HEAD/{target}" if repository else file.as_uri()

    return LINK.sub(changed, markdown)


def site_path(file: str) -> str | None:
    """Path on the site of a file of the repository, or None if it is not there."""
    return BESIDE.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else None)
