"""MkDocs hook: show pages that lie outside docs/, and make their links work on the site.

Markdown files in the repository link to each other by path, so that they work in any viewer. On the site README.md is
the first page, and links to files that are not pages become plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {  # by path in the repository
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "src/spmoe/pair/README.md": "pair.md",
    "extras/fine/README.md": "fine.md",
    "extras/diverse/README.md": "diverse.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/."""
    for path, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of one page, from paths in the repository to pages of the site."""
    source = next((path for path, name in PAGES.items() if name == page.file.src_uri), f"docs/{page.file.src_uri}")
    folder = posixpath.dirname(source)

    def rewrite(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        path, hash_sign, anchor = target.partition("#")
        if not path or re.match(r"\w+:", target):
            return match[0]
        in_repository = posixpath.normpath(posixpath.join(folder, path))
        name = PAGES.get(in_repository, in_repository.removeprefix("docs/"))
        if name in files.src_uris:
            return f"{image}[{text}]({name}{hash_sign}{anchor})"
        return text  # a file of the repository, such as source code

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)  # code blocks stay as they are
    return "".join(part if part.startswith("```") else LINK.sub(rewrite, part) for part in parts)
