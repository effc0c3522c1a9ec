"""Hooks of mkdocs for the site of docs/: the README as its front page, the guides to GPUs, pictures, links to sources.

The pages link to one another and to files of the repository, as they are read there. On the site a link that leaves
docs/ leads to the repository, and a picture is copied.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parents[1]
# Pages of a skill, so that its folder is whole by itself. On the site they are pages too.
SKILL = "skills/cuda-kernels"
GUIDES = {
    f"{SKILL}/references/{path.name}": path.name if path.stem != "troubleshooting" else "skill-troubleshooting.md"
    for path in sorted((ROOT / SKILL / "references").glob("*.md"))
} | {f"{SKILL}/SKILL.md": "skill.md", "notebooks/README.md": "notebooks.md"}
LINK = re.compile(r"(\]\(|src=\")([^)\s\"]+)")
FILE_NAME = re.compile(r"\[(?:[\w./-]*/)?[\w-]+\.md\]\(([^)\s#]+\.md)(#[^)\s]*)?\)")  # a link that shows a file's name
# Long lines of code are read by scrolling within the block, and wide tables within the table.
STYLE = (
    ".md-typeset pre > code { overflow-x: auto; }\n.md-typeset table:not([class]) td code { white-space: pre-wrap; }\n"
)


def source() -> str:
    """Where the repository is, from pyproject.toml."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"])


def on_config(config: Any) -> Any:
    config.repo_url = source()
    config.repo_name = config.site_name
    config.edit_uri = ""
    return config


def site_target(page: str, target: str) -> str:
    """The target of a link on a page, which is named as in the repository, for the site."""
    path, hash_, heading = target.partition("#")
    if not path or re.match(r"[a-z]+:", path):
        return target
    found = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
    pages = {"README.md": "index.md", **GUIDES}
    if found in pages or found.startswith("docs/") or found.endswith((".png", ".svg")):
        folder = posixpath.dirname(page.removeprefix("docs/")) if page.startswith("docs/") else "."
        on_the_site = pages.get(found, found.removeprefix("docs/"))
        return posixpath.relpath(on_the_site, folder or ".") + hash_ + heading
    kind = "tree" if (ROOT / found).is_dir() else "blob"
    return f"{source()}/{kind}/main/{found}{hash_}{heading}"


def title_of(page: str, match: re.Match[str]) -> str:
    """A link that shows its target's title in the place of the file's name."""
    target = ROOT / posixpath.normpath(posixpath.join(posixpath.dirname(page), match[1]))
    title = re.search(r"^# (.+)$", target.read_text(), re.MULTILINE) if target.is_file() else None
    return f"[{title[1]}]({match[1]}{match[2] or ''})" if title else match[0]


def for_site(page: str, text: str) -> str:
    """A page's text for the site: titles in the place of files' names; inside of <details> it is Markdown too."""
    text = FILE_NAME.sub(lambda match: title_of(page, match), text)
    text = LINK.sub(lambda match: match[1] + site_target(page, match[2]), text)
    return text.replace("<details>", '<details markdown="1">')


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    readme = (ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=for_site("README.md", readme)))
    for path, name in GUIDES.items():
        files.append(File.generated(config, name, content=for_site(path, (ROOT / path).read_text())))
    pages = [file.content_string for file in files if file.src_uri.endswith(".md")]
    shown = {name for text in pages for name in re.findall(r"src=\"(?:\.\./)*([^\"]+\.(?:png|svg))\"", text)}
    for name in sorted(shown):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, "site.css", content=STYLE))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.src_uri in ("index.md", *GUIDES.values()):  # `on_files` made them for the site
        return markdown
    return for_site(f"docs/{page.file.src_uri}", markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Docstrings announce a literal block by two colons."""
    return html.replace("::</p>", ":</p>")
