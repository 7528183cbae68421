"""Cases: what is put on the disk, and the command lines that have to cope with it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from fuzzing.seeds import World

MUTANTS = 1000
"""Numbers from here on are of random changes; those below, of cases made by hand."""


@dataclass(frozen=True)
class Command:
    """One command line, and what must be true of it besides what must be true of all."""

    arguments: tuple[str, ...]
    output: Path | None = None
    tensors: frozenset[str] | None = None
    """If a model or an adapter is written: the names of its tensors."""
    refused: bool = False
    """Whether it must fail."""
    done: bool = False
    """Whether it must succeed."""
    loads: bool = False
    """Whether what is written must load in its own library."""


@dataclass(frozen=True)
class Place:
    """Where a case lives: its own inputs, its outputs, and what it must not touch."""

    root: Path
    world: World
    rng: random.Random
    notes: list[str] = field(default_factory=list)
    """What was done, where the title does not tell."""

    def note(self, text: str) -> None:
        self.notes.append(text)

    @property
    def inputs(self) -> Path:
        return self.root / "in"

    @property
    def outputs(self) -> Path:
        return self.root / "out"

    @property
    def outside(self) -> Path:
        """Files that no case may read."""
        return self.world.outside

    @property
    def canary(self) -> Path:
        """What hostile code would make."""
        return self.root / "CANARY"

    def copy(self, seed: str) -> Path:
        """A valid file or folder, to be spoilt."""
        source = self.world.seed(seed)
        target = self.inputs / source.name
        if not target.exists():
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        return target

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.inputs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        return path

    # ── verbs ────────────────────────────────────────────────────────────────────────────────

    def inspect(self, what: object, *more: object, refused: bool = False) -> Command:
        return Command(_words("inspect", what, *more), refused=refused)

    def propose(self, model: object) -> Command:
        output = self.outputs / "draft.family"
        return Command(_words("inspect", model, "--propose", "-o", output), output)

    def align(self, a: object = None, b: object = None, *more: object, refused: bool = False) -> Command:
        output = self.outputs / "pi.safetensors"
        a, b = a or self.world.seed("a"), b or self.world.seed("b")
        quick = ("--no-advice", "--max-sweeps", 1, "--jobs", 1, "-q")
        return Command(_words("align", a, b, "-o", output, *quick, *more), output, refused=refused)

    def apply(self, pi: object = None, a: object = None, *more: object, refused: bool = False) -> Command:
        output = self.outputs / "applied"
        pi, a = pi or self.world.seed("pi"), a or self.world.seed("a")
        names = self.world.names
        return Command(_words("apply", pi, a, "-o", output, "--jobs", 1, *more), output, names, refused)

    def transport(
        self,
        tuned: object = None,
        base: object = None,
        onto: object = None,
        via: object = None,
        more: Sequence[object] = (),
        *,
        tensors: frozenset[str] | None = None,
        refused: bool = False,
        done: bool = False,
        loads: bool = False,
    ) -> Command:
        output = self.outputs / "moved"
        seed = self.world.seed
        where = ("--base", base or seed("a"), "--onto", onto or seed("b"), "--via", via or seed("pi"))
        line = _words("transport", tuned or seed("tuned"), *where, "-o", output, "--jobs", 1, *more)
        return Command(line, output, tensors or self.world.names, refused, done, loads)

    def verify(self, a: object = None, via: object = None, *more: object) -> Command:
        a, via = a or self.world.seed("a"), via or self.world.seed("pi")
        return Command(_words("verify", a, "--via", via, *more))

    def again(
        self, metadata: object, verb: str, *more: object, refused: bool = False, written: bool = True
    ) -> Command:
        output = self.outputs / "again"
        line = _words(verb, "--from", metadata, "-o", output, "--jobs", 1, *more)
        return Command(line, output, self.world.names, refused) if written else Command(line, refused=refused)

    def report(self, run: object, *more: object, refused: bool = False) -> Command:
        output = self.outputs / "report.html"
        return Command(_words("report", run, *more, "-o", output), output, refused=refused)

    def evaluate(self, model: object, data: object, *more: object, refused: bool = False) -> Command:
        output = self.outputs / "result.json"
        line = _words("evaluate", model, "--data", data, "-o", output, "--jobs", 1, *more)
        return Command(line, output, refused=refused)


Build: TypeAlias = Callable[[Place], Sequence[Command]]


class Made(NamedTuple):
    """A case made by hand."""

    title: str
    build: Build
    quick: bool = False
    """Whether it is part of the sample whatever the others are."""


@dataclass(frozen=True)
class Case:
    """One case: made by `build` in a place of its own."""

    format: str
    number: int
    title: str
    build: Build
    quick: bool = False


def _words(*arguments: object) -> tuple[str, ...]:
    return tuple(map(str, arguments))
