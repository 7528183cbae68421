"""Hooks of `mkdocs build`. The site needs no network.

- Formulas become MathML, which browsers draw.
- ``<!-- code: transport Alpha.at -->`` becomes the code of that name in src/transfusion/transport.
- SVG pictures become a part of the page, in the colours of its theme.
- CONTRIBUTING.md, CHANGELOG.md, the notebooks and an example, which are outside docs/, become pages.
"""

from __future__ import annotations

import ast
import html
import re
import textwrap
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
BESIDE = {
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
    "examples/tiny_talker.md": "examples/tiny_talker.py",
    "notebooks/first_steps.ipynb": "notebooks/first_steps.ipynb",
    "notebooks/lora_to_a_new_release.ipynb": "notebooks/lora_to_a_new_release.ipynb",
}
"""Sources outside docs/, by their place on the site."""
_CODE = re.compile(r"^<!-- code: (\S+) (\S+) -->$", re.MULTILINE)
_MATH = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
_PICTURE = re.compile(r'<img alt="([^"]*)" src="([^"]*pictures/([\w-]+\.svg))"\s*/?>')
_SCRIPT = re.compile(r"<script\b[^>]*>.*?</script>", re.DOTALL)


def with_pages_beside(files: Files, config: Any) -> Files:
    """Add the pages outside docs/, before mkdocs-jupyter looks for notebooks."""
    for place, source in BESIDE.items():
        if source.endswith(".py"):
            text = f"# `{source}`\n\n```python\n{(ROOT / source).read_text()}```\n"
            files.append(File.generated(config, place, content=text))
        elif source.endswith(".md"):
            text = (
                (ROOT / source).read_text().replace("](docs/", "](").replace("](CHANGELOG.md", "](changes.md")
            )
            files.append(File.generated(config, place, content=text))
        else:
            files.append(File(source, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


on_files: Any = event_priority(100)(with_pages_beside)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Insert code, and correct links to pages outside docs/."""
    up = "../" * page.file.src_uri.count("/")
    for place, source in BESIDE.items():
        markdown = markdown.replace(f"]({up}../{source}", f"]({up}{place}")
    return _CODE.sub(lambda found: code(found[1], found[2]), markdown)


def code(room: str, name: str) -> str:
    """Return a function, a class or a method of a room as a block of code, with its file and line."""
    found = [
        (path, extent)
        for path in sorted((ROOT / "src" / "transfusion" / room).rglob("*.py"))
        if (extent := _extent(path, name))
    ]
    if len(found) != 1:
        raise PluginError(
            f"a page of docs/ shows {name}, which src/transfusion/{room} has {len(found)} times"
        )
    path, (first, last) = found[0]
    text = textwrap.dedent("\n".join(path.read_text().splitlines()[first - 1 : last]))
    return f'```python title="{path.relative_to(ROOT)}, line {first}"\n{text}\n```'


def _extent(path: Path, name: str) -> tuple[int, int] | None:
    """Return the first and the last line of ``name``, decorators included; None if the file lacks it."""
    found: Any = ast.parse(path.read_text())
    for part in name.split("."):
        body = getattr(found, "body", [])
        found = next((node for node in body if getattr(node, "name", None) == part), None)
    return found and (min([found.lineno, *(one.lineno for one in found.decorator_list)]), found.end_lineno)


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Draw formulas and pictures, and remove scripts from other hosts."""
    content = _MATH.sub(_formula, content)
    content = _PICTURE.sub(lambda found: _drawn(found[1], found[3]), content)
    if page.file.src_uri.endswith(".ipynb"):
        content = _SCRIPT.sub(lambda found: "" if "://" in found[0] else found[0], content)
    return content


def _formula(found: re.Match[str]) -> str:
    display = "block" if found[1] == "div" else "inline"
    written = html.unescape(found[3]).strip()
    formula = convert(written, display=display)
    if "\\" in formula:
        raise PluginError(f"a formula has a command that cannot be drawn: {written}")
    return f'<div class="formula">{formula}</div>' if display == "block" else formula


def _drawn(about: str, name: str) -> str:
    """Return a picture as a part of the page, with the colours of the theme."""
    svg = (ROOT / "docs" / "pictures" / name).read_text()
    svg = re.sub(r"<style>.*?</style>", "", svg, flags=re.DOTALL)
    return f'<figure class="drawn" role="img" aria-label="{about}">{svg}</figure>'
