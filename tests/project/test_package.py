"""The package that users install: it builds from its own sdist, and works where the clone cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
import torch

from transfusion import __version__
from transfusion.evaluation.classes import PROMPTS
from transfusion.families import all_families
from transfusion.running.probes.texts import corpus

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
NAME = f"transfusion_rebasin-{__version__}"
KINDS = {".py", ".typed", ".family", ".json", ".txt", ".jinja", ".css", ".js"}
"""The kinds of files that belong into the package."""


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Run a command without this process' PYTHONPATH, which leads to the clone; return what it printed."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it as pip does."""
    place = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", place, cwd=ROOT)
    sdist = place / f"{NAME}.tar.gz"
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", place, cwd=place / NAME)
    return sdist, place / f"{NAME}-py3-none-any.whl"


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """The programs of an environment with the wheel and all libraries of this one, but not the clone.

    The libraries' folder is named in a .pth file. Of those within it, Python reads none: that of the clone is
    left out, and a mended torchvision needs its own.
    """
    place = tmp_path_factory.mktemp("installed")
    venv.create(place, with_pip=False)
    programs = place / "bin"
    python = programs / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    libraries = Path(run(python, "-c", ask, cwd=place).strip())
    others = Path(torch.__file__).parents[1]
    mended = [line for file in others.glob("*torchvision*.pth") for line in file.read_text().splitlines()]
    (libraries / "of_the_tests.pth").write_text("\n".join([str(others), *mended]))
    with pytest.raises(AssertionError, match="No module named 'transfusion'"):
        run(python, "-c", "import rich, transfusion", cwd=place)
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", built[1], cwd=place)
    return programs


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(built):
    own = {
        path.relative_to(SRC).as_posix()
        for path in SRC.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    with zipfile.ZipFile(built[1]) as wheel:
        held = {name for name in wheel.namelist() if not name.startswith(f"{NAME}.dist-info/")}
        metadata = HeaderParser().parsestr(wheel.read(f"{NAME}.dist-info/METADATA").decode())
    assert held == own
    assert {Path(name).suffix for name in held} == KINDS
    assert metadata["Name"] == "transfusion-rebasin"
    assert metadata["License-Expression"] == "Apache-2.0"


def test_the_sdist_is_small_and_holds_what_builds_the_package(built):
    """Its tests are of the whole repository: of pages, benchmarks and scripts. They stay there."""
    with tarfile.open(built[0]) as archive:
        names = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
    beside = {name for name in names if not name.startswith("src/")}
    texts = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "constraints.txt"}
    assert beside == {*texts, ".gitignore", "PKG-INFO", "pyproject.toml"}
    assert all(file.stat().st_size < 1_000_000 for file in built)


def test_the_installed_wheel_aligns_and_transports(installed, made, tmp_path):
    a, b, tuned = made("vit"), made("vit", 2), made("vit", 3)
    python, transfusion = installed / "python", installed / "transfusion"
    home = run(python, "-c", "import transfusion; print(transfusion.__file__)", cwd=tmp_path)
    assert Path(home.strip()).is_relative_to(installed.parent)
    assert run(transfusion, "--version", cwd=tmp_path) == f"transfusion {__version__}\n"
    assert "--text" in run(transfusion, "demo", "--help", cwd=tmp_path)
    run(transfusion, "align", a, b, "-o", "pi.safetensors", "-q", "--no-advice", cwd=tmp_path)
    names = ("--base", a, "--onto", b, "--via", "pi.safetensors", "--trust-base")
    printed = run(transfusion, "transport", tuned, *names, "-o", "moved", "-q", cwd=tmp_path)
    assert "written to moved\n" in printed
    assert (tmp_path / "moved" / "README.md").is_file()
    run(transfusion, "report", "moved", "-o", "report.html", "-q", cwd=tmp_path)
    assert (tmp_path / "report.html").is_file()


def test_the_installed_wheel_finds_its_tables_texts_and_prompts(installed, tmp_path):
    code = """
from transfusion.evaluation.classes import PROMPTS
from transfusion.families import all_families
from transfusion.running.probes.texts import corpus
print(len(all_families()), len(corpus()), len(list(PROMPTS.iterdir())))
"""
    expected = f"{len(all_families())} {len(corpus())} {len(list(PROMPTS.iterdir()))}\n"
    assert run(installed / "python", "-c", code, cwd=tmp_path) == expected


@pytest.mark.slow
def test_the_installed_wheel_runs_the_demo(installed, tmp_path):
    printed = run(installed / "transfusion", "demo", cwd=tmp_path)
    assert "A's fine-tune moved onto an independent B" in printed
    assert (tmp_path / "transfusion-demo" / "report.html").stat().st_size > 100_000
