"""Run the examples of pages, and compare what they print: python scripts/try_pages.py [--write] [PAGE…]

Every ``console`` block of a page is run, each page in a new folder with copies of the models that readers
make: ``models`` by scripts/make_models.py and, for pages in `TRAINED`, ``kept`` by ``transfusion demo --keep
kept``, which takes minutes. They are made here, or found in the folder ``--place``. In expected outputs,
``…`` stands for anything. Numbers of trained models differ between processors and are not compared.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PLAIN = [DOCS / f"{name}.md" for name in ("first-minute", "transport", "adapters", "method")]
TRAINED = [DOCS / f"{name}.md" for name in ("functional", "evaluate")]
"""Pages whose examples use the models that the demo trains."""
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"^\$ (.*(?:\n> .*)*)\n?", re.MULTILINE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PLAIN = re.compile(r"transfusion [^|<>&;$`\n#*]*")
"""A command of this program alone, without anything for a shell."""


def examples(text: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a page, each with its expected output."""
    for block in _BLOCK.finditer(text):
        yield from _parts(block[1])


def _parts(block: str) -> Iterator[tuple[str, str]]:
    found = list(_COMMAND.finditer(block))
    ends = [one.start() for one in found[1:]] + [len(block)]
    for one, end in zip(found, ends, strict=True):
        yield one[1].rstrip("\n"), block[one.end() : end]


# ── running ──────────────────────────────────────────────────────────────────────────────────


def run(command: str, folder: Path) -> str:
    """Return what a command prints, both streams together, in a terminal of 100 columns."""
    printed = _forked(command, folder) if _PLAIN.fullmatch(command) else _by_shell(command, folder)
    return "".join(f"{line.rstrip()}\n" for line in _COLOUR.sub("", printed).splitlines())


def _environment() -> dict[str, str]:
    source = f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    fixed = {"COLUMNS": "100", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **fixed, "PATH": path, "PYTHONPATH": source}


def _by_shell(command: str, folder: Path) -> str:
    script = f"exec 2>&1\n{command}".replace("\n> ", "\n")
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=_environment(), stdout=subprocess.PIPE, text=True, check=False
    )
    return done.stdout


def _forked(command: str, folder: Path) -> str:
    """Run a command of this program in a copy of this process, in which the libraries are loaded already."""
    import transformers  # noqa: F401

    from transfusion import align, transport  # noqa: F401
    from transfusion.cli import main

    with tempfile.TemporaryFile() as printed:
        if (child := os.fork()) == 0:
            try:
                for stream in (1, 2):
                    os.dup2(printed.fileno(), stream)
                sys.stdout = os.fdopen(1, "w", buffering=1)
                sys.stderr = os.fdopen(2, "w", buffering=1)
                os.environ.update(_environment())
                os.chdir(folder)
                main(shlex.split(command)[1:])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        os.waitpid(child, 0)
        printed.seek(0)
        return printed.read().decode()


# ── comparing ────────────────────────────────────────────────────────────────────────────────


def agree(expected: str, printed: str) -> bool:
    """Return whether the expected text was printed; ``…`` is anything, on its own any number of lines."""
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "…" else re.escape(line.rstrip()).replace("…", ".*?") + r"\n"
        for line in expected.splitlines()
    )
    return re.fullmatch(pattern, printed) is not None


def without_numbers(text: str) -> str:
    """Replace numbers by ``#``, and drop spaces around them and the lines of tables."""
    plain = re.sub("[─━]+", "─", text.replace("– (none is better than B)", "0"))
    plain = re.sub(r"[+-]?\d+(?:\.\d+)?(?:e-?\d+)?", "#", plain)
    return "".join(f"{' '.join(line.split())}\n" for line in plain.splitlines())


def tried(page: Path, place: Path) -> tuple[str, list[str]]:
    """Return a page with what its commands print now, and a list of the differences."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("models", "kept"):  # verbs write beside them
            if (place / name).exists():
                shutil.copytree(place / name, Path(scratch) / name)

        def again(block: re.Match[str]) -> str:
            lines = []
            for command, expected in _parts(block[1]):
                printed = run(command, Path(scratch))
                same = agree(expected, printed)
                if page in TRAINED:
                    same = same or agree(without_numbers(expected), without_numbers(printed))
                if not same:
                    wrong.append(f"$ {command}\n  the page:\n{expected}  now:\n{printed}")
                lines.append(f"$ {command}\n{expected if same else printed}")
            return f"```console\n{''.join(lines)}```"

        return _BLOCK.sub(again, page.read_text()), wrong


def prepare(place: Path, *, demo: bool) -> Path:
    """Make the models of the examples, as a reader makes them: an adapter names its base by that path."""
    if not (place / "models").exists():
        made = [sys.executable, str(ROOT / "scripts" / "make_models.py"), "models"]
        subprocess.run(made, cwd=place, env=_environment(), stdout=subprocess.DEVNULL, check=True)
    if demo and not (place / "kept").exists():
        _by_shell("transfusion demo --keep kept", place)
    return place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="instead of all")
    parser.add_argument("--write", action="store_true", help="update the pages")
    parser.add_argument("--place", type=Path, help="a folder with models, and kept, that were made before")
    asked = parser.parse_args()
    os.environ.update(_environment())  # before torch is loaded
    pages = [page.resolve() for page in asked.pages] or [*PLAIN, *TRAINED]
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        place = prepare(asked.place or Path(scratch), demo=any(page in TRAINED for page in pages))
        for page in pages:
            text, wrong = tried(page, place)
            print(f"{page}: {len(wrong)} examples print something else", flush=True)
            if asked.write:
                page.write_text(text)
            else:
                print("\n".join(wrong), end="")
                failed |= bool(wrong)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
