"""Results, and their files: checked before the work, written after it, as JSON or as a figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar

from transfusion.errors import OutputError, SettingError
from transfusion.files.publishing import publish_file, require_writable, write_json
from transfusion.model.model import input_files
from transfusion.runtime.run_record import RunRecord
from transfusion.runtime.shown import Shown

JSON = ".json"
FIGURES = (".png", ".svg", ".pdf")
Drawing: TypeAlias = Callable[[Mapping[str, Any], Path | IO[bytes], str], None]
"""Draw a result into a file of a format."""
Paths: TypeAlias = str | Path | Sequence[str | Path] | None
"""One file, several, or none."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Result(Shown):
    """What a verb found. Its fields are those of its file, but for those with ``repr=False``."""

    notes: tuple[str, ...] = field(default=(), repr=False)
    """Notes for the user on how it was measured."""
    record: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The result as it is written to files, with the record of its run."""

    def metadata(self) -> dict[str, Any]:
        """Return all results for a file or another program."""
        return fields_of(self)

    @property
    def written(self) -> Mapping[str, Any]:
        """The result as in files."""
        return self.record or self.metadata()


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as plain data, but for those that its ``repr`` leaves out."""
    return {one.name: plain_data(getattr(value, one.name)) for one in fields(value) if one.repr}


def plain_data(value: Any) -> Any:
    """Return dataclasses, in lists and mappings too, as plain data."""
    if is_dataclass(value):
        return value.metadata() if hasattr(value, "metadata") else fields_of(value)
    if isinstance(value, Mapping):
        return {name: plain_data(one) for name, one in value.items()}
    return [plain_data(one) for one in value] if isinstance(value, list | tuple) else value


def as_svg(draw: Drawing, result: Result) -> bytes:
    """Return the figure of a result."""
    file = BytesIO()
    draw(result.written, file, "svg")
    return file.getvalue()


ResultT = TypeVar("ResultT", bound=Result)


@dataclass(frozen=True)
class ResultFiles:
    """The files that a result is written to, and how figures of it are drawn."""

    paths: tuple[Path, ...]
    force: bool
    draw: Drawing | None = None

    @classmethod
    def checked(
        cls, output: Paths, *, force: bool, inputs: Iterable[object] = (), draw: Drawing | None = None
    ) -> ResultFiles:
        """Refuse, before any work, files that cannot be written, hold an input, or are of no known kind."""
        given = () if output is None else (output,) if isinstance(output, str | Path) else output
        files = cls(tuple(map(Path, given)), force, draw)
        for path in files.paths:
            files._require_kind(path)
        require_places(files.paths, inputs, force=force)
        return files

    def _require_kind(self, path: Path) -> None:
        if self.draw is None and path.suffix != JSON:
            raise OutputError(f"{path}: not a file of JSON", hint="end the name in .json")
        if path.suffix not in (*FIGURES, JSON):
            raise OutputError(
                f"{path}: neither a figure nor JSON", hint=f"end the name in {', '.join(FIGURES)} or {JSON}"
            )

    def finish(self, found: ResultT, record: RunRecord, about: Mapping[str, Any] | None = None) -> ResultT:
        """Write a result with the record of its run, and return it with that record."""
        whole = record.of({**(about or {}), **found.metadata()})
        for path in self.paths:
            self._write(path, whole)
        return replace(found, record=whole)

    def _write(self, path: Path, whole: Mapping[str, Any]) -> None:
        draw = self.draw
        if path.suffix == JSON or draw is None:
            publish_file(path, lambda staged: write_json(staged, whole), force=self.force)
        else:
            format = path.suffix.removeprefix(".")
            publish_file(path, lambda staged: draw(whole, staged, format), force=self.force)


def require_places(paths: Sequence[Path], inputs: Iterable[object], *, force: bool) -> None:
    """Refuse outputs with the same path, and outputs that cannot be written or hold an input."""
    if len({path.resolve() for path in paths}) < len(paths):
        raise SettingError("two outputs have the same name", hint="give every output a name of its own")
    read = input_files(*inputs) if paths else []
    for path in paths:
        require_writable(path, force=force, inputs=read, folder=False)
