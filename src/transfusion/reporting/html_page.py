"""The page: one file of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from transfusion import __version__
from transfusion.checkpoint.publishing import publish_file, require_writable, write_text
from transfusion.reporting.page_parts import Command, Hero, PageSection


@dataclass(frozen=True, repr=False)
class Report:
    """A page about one run, ready to be written."""

    hero: Hero
    sections: Sequence[PageSection]
    missing: Sequence[Command]
    notes: Sequence[str]
    """What could not be looked at, and why."""
    inputs: Sequence[Path] = ()
    """What it was made of, which it never overwrites."""

    def __repr__(self) -> str:
        return f"<report: {self.hero.title}, {len(self.sections)} sections>"

    def html(self) -> str:
        """The whole page as text."""
        style, script = (Markup(_resource(name)) for name in ("style.css", "script.js"))
        template = _environment().get_template("page.html.jinja")
        return template.render(
            hero=self.hero,
            sections=self.sections,
            missing=self.missing,
            notes=self.notes,
            version=__version__,
            style=style,
            script=script,
        )

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the page; an existing file is replaced only with ``force``, and what was read never."""
        require_writable(Path(path), force=force, inputs=self.inputs, folder=False)
        text = self.html()
        return publish_file(Path(path), lambda staged: write_text(staged, text), force=force)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("transfusion.reporting", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )


def _resource(name: str) -> str:
    return (files("transfusion.reporting") / "templates" / name).read_text(encoding="utf-8")
