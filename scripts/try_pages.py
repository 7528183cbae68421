"""Run the examples of pages: python scripts/try_pages.py PLACE PAGE… [--write]

Every block of ``console`` in a page is run, each page in a new folder with copies of what is in PLACE:
``models``, made by scripts/make_models.py from within PLACE (the adapter names its base by that path), and,
if present, ``kept``, made by ``transfusion demo --keep kept``. The output is compared with the page; ``…``
stands for anything. With ``--write`` the page is updated where it differs. Blocks of ``sh`` are not run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"^\$ (.*(?:\n> .*)*)\n?", re.MULTILINE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def examples(text: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a page, each with its expected output."""
    for block in _BLOCK.finditer(text):
        yield from parts(block[1])


def parts(block: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of one block, each with its expected output."""
    found = list(_COMMAND.finditer(block))
    ends = [one.start() for one in found[1:]] + [len(block)]
    for one, end in zip(found, ends, strict=True):
        yield one[1].rstrip("\n"), block[one.end() : end]


def run(command: str, folder: Path) -> str:
    """Return what a command prints, both streams together, in a terminal of 100 columns."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "100", "HF_HUB_OFFLINE": "1"}
    plain = command.replace("\n> ", "\n")
    done = subprocess.run(
        ["bash", "-c", plain],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = [line.rstrip() for line in _COLOUR.sub("", done.stdout).splitlines()]
    return "".join(f"{line}\n" for line in lines)


def agree(expected: str, printed: str) -> bool:
    """Return whether the expected text was printed; ``…`` is anything, on its own any number of lines."""
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "…" else re.escape(line.rstrip()).replace("…", ".*?") + r"\n"
        for line in expected.splitlines()
    )
    return re.fullmatch(pattern, printed) is not None


def agree_but_for_numbers(expected: str, printed: str) -> bool:
    """Compare without numbers, which differ between processors where models were trained."""
    return agree(_masked(expected), _masked(printed))


def _masked(text: str) -> str:
    """Replace numbers by ``#``, and drop spaces around them and the lines of tables."""
    plain = re.sub(r"[+-]?\d+(?:\.\d+)?(?:e-?\d+)?", "#", re.sub("[─━]+", "─", text))
    return "".join(f"{' '.join(line.split())}\n" for line in plain.splitlines())


def prepared(place: Path, folder: Path) -> None:
    """Copy the models into the folder of a page, because verbs write beside them."""
    for name in ("models", "kept"):
        if (place / name).exists():
            shutil.copytree(place / name, folder / name)


def tried(page: Path, place: Path, alike: Callable[[str, str], bool] = agree) -> tuple[str, list[str]]:
    """Return a page with what its commands print now, and a list of the differences."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        prepared(place, Path(scratch))

        def again(block: re.Match[str]) -> str:
            lines = []
            for command, expected in parts(block[1]):
                printed = run(command, Path(scratch))
                if not alike(expected, printed):
                    wrong.append(f"$ {command}\n  the page:\n{expected}  now:\n{printed}")
                    expected = printed
                lines.append(f"$ {command}\n{expected}")
            return f"```console\n{''.join(lines)}```"

        return _BLOCK.sub(again, page.read_text()), wrong


def main() -> None:
    names = [one for one in sys.argv[1:] if not one.startswith("--")]
    place, pages = Path(names[0]), [Path(name) for name in names[1:]]
    failed = False
    for page in pages:
        text, wrong = tried(page, place)
        print(
            f"{page}: {len(wrong)} of {len(list(examples(page.read_text())))} examples print something else"
        )
        if "--write" in sys.argv:
            page.write_text(text)
        else:
            print("\n".join(wrong), end="")
            failed |= bool(wrong)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
