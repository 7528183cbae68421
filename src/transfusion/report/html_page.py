"""The page: one file of HTML that loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from transfusion import __version__
from transfusion.files.publishing import publish_file, require_writable, write_text
from transfusion.report.page_parts import Command, Hero, PageSection
from transfusion.runtime.shareable_paths import shareable_text


@dataclass(frozen=True, repr=False)
class Report:
    """A page about one run, ready to be written."""

    hero: Hero
    sections: Sequence[PageSection]
    missing: Sequence[Command]
    notes: Sequence[str]
    """Inputs that could not be read, and why."""
    inputs: Sequence[Path] = ()
    """The files that were read, which the page never overwrites."""
    root: Path = Path()
    """The folder that holds the run. Paths on the page are relative to it."""

    def __repr__(self) -> str:
        return f"<report: {self.hero.title}, {len(self.sections)} sections>"

    def html(self) -> str:
        """Return the whole page as text. It holds no absolute path of this machine."""
        style, script = (Markup(_resource(name)) for name in ("style.css", "script.js"))
        template = self._environment().get_template("page.html.jinja")
        return template.render(
            hero=self.hero,
            sections=self.sections,
            missing=self.missing,
            notes=self.notes,
            version=__version__,
            style=style,
            script=script,
        )

    def _environment(self) -> Environment:
        def without_paths(value: object) -> object:
            if isinstance(value, str) and not isinstance(value, Markup):
                return shareable_text(value, self.root, self.inputs)
            return value

        return Environment(
            loader=PackageLoader("transfusion.report", "templates"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=StrictUndefined,
            finalize=without_paths,
        )

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the page. ``force`` replaces an existing file, but never a file that was read."""
        require_writable(Path(path), force=force, inputs=self.inputs, folder=False)
        text = self.html()
        return publish_file(Path(path), lambda staged: write_text(staged, text), force=force)


def _resource(name: str) -> str:
    return (files("transfusion.report") / "templates" / name).read_text(encoding="utf-8")
