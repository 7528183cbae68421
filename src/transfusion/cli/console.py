"""What the user sees beside the results: notes, progress, errors. All of it on stderr."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from os.path import exists, samefile
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from transfusion.errors import TransfusionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transfusion.matching.search import Step
    from transfusion.model.model import Model
    from transfusion.runtime.clock import Clock
    from transfusion.transportation.adapters.adapter import Adapter

out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 240)
err = Console(stderr=True, highlight=False, soft_wrap=True)

typed: ContextVar[list[str]] = ContextVar("typed")
"""The arguments of the program, as the user gave them."""


def command() -> str:
    """What the user typed."""
    return shlex.join(["transfusion", *typed.get()])


class Messages:
    """How much to say: nothing but errors, the usual, or everything."""

    def __init__(self, *, quiet: bool, verbose: bool) -> None:
        self.quiet, self.verbose = quiet, verbose

    def note(self, text: str) -> None:
        if not self.quiet:
            err.print(one_line(text), style="dim", markup=False)

    def detail(self, text: str) -> None:
        if self.verbose and not self.quiet:
            err.print(one_line(text), style="dim", markup=False)

    def assumptions(self, *models: Model) -> None:
        """Say aloud what was assumed about models that came without a configuration."""
        for model in models:
            if model.checkpoint.config is None:
                self.note(f"note: {model.label}: recognised by {model.why}")
            else:
                self.detail(f"{model.label}: {model.family.name}, because {model.why}")

    def origin(self, adapter: Adapter, base: str) -> None:
        """Say where an adapter comes from, if it names another base than the given one."""
        named = adapter.config.get("base_model_name_or_path")
        same = named == base or (named and exists(named) and exists(base) and samefile(named, base))
        if named and not same:
            self.note(f"note: {adapter.label} says that it was trained on {named}, and --base is {base}")

    @contextmanager
    def sweeps(self) -> Iterator[Callable[[Step], None]]:
        """A bar that follows the search over its blocks and sweeps."""
        with self._bar("{task.fields[what]}") as bar:
            task = bar.add_task("", total=None, what="reading")
            now = ("", -1)

            def show(step: Step) -> None:
                nonlocal now
                if (step.trial, step.sweep) != now:
                    now = (step.trial, step.sweep)
                    if step.objective is not None:
                        self.detail(
                            f"{step.trial}, sweep {step.sweep + 1}: objective {step.objective:.6g} before it"
                        )
                    bar.reset(task, total=step.total)
                what = f"{step.trial}, sweep {step.sweep + 1} · {step.axis}"
                if step.objective is not None:
                    what += f" · objective {step.objective:.4g}"
                bar.update(task, completed=step.done, what=what)

            yield show

    def time(self, clock: Clock) -> None:
        """Say where the time went."""
        total = sum(clock.seconds.values())
        parts = sorted(clock.seconds.items(), key=lambda part: -part[1])
        if total:
            shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts)
            self.detail(f"{total:.1f} s of computing over all threads: {shares}")

    @contextmanager
    def tensors(self, total: int) -> Iterator[Callable[[str], None]]:
        """A bar over tensors."""
        with self._bar("{task.completed}/{task.total} {task.fields[what]}") as bar:
            task = bar.add_task("", total=total, what="")
            yield lambda name: bar.update(task, advance=1, what=name)

    @contextmanager
    def points(self, total: int) -> Iterator[Callable[[str], None]]:
        """A bar over the models on several ways."""
        with self._bar("{task.completed}/{task.total} {task.fields[what]}") as bar:
            task = bar.add_task("", total=total, what="building the models")
            yield lambda name: bar.update(task, advance=1, what=name)

    @contextmanager
    def examples(self) -> Iterator[Callable[[str, int, int], None]]:
        """A bar over examples, pass by pass."""
        with self._bar("{task.completed}/{task.total} {task.fields[what]}") as bar:
            task = bar.add_task("", total=None, what="building the models")
            yield lambda what, done, total: bar.update(task, completed=done, total=total, what=what)

    def _bar(self, text: str) -> Progress:
        return Progress(
            SpinnerColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn(text, markup=False),
            console=err,
            transient=True,
            disable=self.quiet or not sys.stderr.isatty(),
        )


def print_json(value: Any) -> None:
    """A result for another program."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_error(error: TransfusionError) -> None:
    err.print(Text.assemble(("error:", "bold red"), " ", one_line(error.message)))
    if error.hint:
        err.print(Text.assemble(("hint:", "bold"), " ", one_line(error.hint)))


def one_line(text: str) -> str:
    """A text as one line that a terminal only prints: names in files may hold its control sequences."""
    return " ".join(printable(line) for line in text.splitlines())


def printable(text: str) -> str:
    """A text in which only line breaks are more than letters."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text
    )


@contextmanager
def results_apart() -> Iterator[None]:
    """Within the block, what libraries print goes to stderr: stdout is for results."""
    with redirect_stdout(sys.stderr):
        yield
