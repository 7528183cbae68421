"""The documents: generated parts are up to date, the site builds strictly and alone, examples print what they say."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import pages
import try_pages
from transfusion.cli.app import app
from transfusion.families import all_families

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_generated_parts_are_up_to_date():
    found = [str(page.relative_to(ROOT)) for page, _ in pages.stale()]
    assert not found, f"make docs would change {found}"


def test_an_option_that_changes_makes_the_page_of_verbs_stale():
    page = (ROOT / "docs" / "verbs.md").read_text()
    assert pages.filled(page.replace("**required**", "")) == page
    assert all(f"\n## {verb}\n" in page for verb in pages.commands())


def test_every_test_that_the_threat_model_names_exists():
    page = (ROOT / "docs" / "threat-model.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", page)
    assert len(named) > 15
    for file, name in named:
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), f"{file} has no {name}"


def test_every_family_has_its_row():
    rows = re.findall(r"^\| `([\w.-]+)` \(", (ROOT / "docs" / "families.md").read_text(), re.MULTILINE)
    assert rows == sorted(family.name for family in all_families()), "make families"


def imports_in_pages():
    """Yield every import from this package in a block of Python of a page."""
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
            for line in ast.walk(ast.parse(block)):
                if isinstance(line, ast.ImportFrom) and (line.module or "").startswith("transfusion"):
                    yield from (
                        (str(page.relative_to(ROOT)), line.module, alias.name) for alias in line.names
                    )


@pytest.mark.parametrize(("page", "module", "name"), list(imports_in_pages()))
def test_imports_in_pages_exist(page, module, name):
    assert hasattr(importlib.import_module(module), name), page


MEASURING = ("benchmarks", "experiments", "families", "tried")
"""Pages about measurements, with their commands."""
CONSTANTS = {
    "../README": ["4 GB", "0 %", "100 %"],
    "first-minute": ["6 GB", "2 GB"],
    "evaluate": ["95 %"],
    "functional": ["85 %", "99 %"],
    "method": ["98 %", "80 %"],
    "shapes": ["95 %", "95 %", "2 points"],
    "threat-model": ["10 seconds"],
}
"""Numbers with a unit that no measurement changes: thresholds, ends of a scale, sizes in whole gigabytes."""


def test_numbers_outside_of_measuring_pages_are_generated_or_printed():
    """A number that somebody copied goes stale: it is generated from a result, printed by an example, or left out."""
    unit = r"(?: ?%| (?:points|seconds|minutes|hours|[kMG]B|times)\b)"
    for page in PAGES:
        text = re.sub(r"<!-- generated:.*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
        text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        text = re.sub(r"`[^`\n]*`", "", text)
        name = os.path.relpath(page, ROOT / "docs").removesuffix(".md")
        if name not in MEASURING:
            found = re.findall(rf"\d[\d.,]*{unit}", text)
            assert found == CONSTANTS.get(name, []), name


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built strictly: every link and every anchor leads somewhere."""
    place = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def test_the_site_asks_nobody_for_anything(site):
    """No script, style, font, picture or frame from elsewhere."""
    elsewhere = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    imported = re.compile(r"(?:import|from|import\()\s*[\"']https?://")
    for page in site.rglob("*.html"):
        assert not elsewhere.findall(page.read_text()), page
        assert not imported.findall(page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", style.read_text()), style


@pytest.mark.parametrize("page", ["index.html", "notebooks/first_steps.html"])
def test_the_search_works_in_a_site_that_is_opened_as_files(page, site, browser):
    shown = browser.new_page()
    shown.goto((site / page).as_uri())
    shown.locator("input.md-search__input").press_sequentially("refinement")
    shown.wait_for_selector(".md-search-result__item")
    links = shown.eval_on_selector_all(".md-search-result__link", "all => all.map(one => one.href)")
    assert any(link.startswith((site / "functional.html").as_uri()) for link in links)
    shown.locator(".md-search-result__link").first.click()
    leads_to = links[0].partition("?")[0].partition("#")[0]
    shown.wait_for_url(lambda url: url.startswith(leads_to))
    assert "refinement" in shown.locator("article").inner_text().lower()
    shown.close()


def test_formulas_code_and_pictures_are_in_the_pages(site):
    method = (site / "method.html").read_text()
    assert method.count("<math") > 20
    assert "arithmatex" not in method
    assert "<!-- code:" not in method
    assert (site / "concepts.html").read_text().count("<svg xmlns") >= 6


def test_code_that_is_gone_stops_the_build():
    from mkdocs.exceptions import PluginError

    import site_hooks

    shown = site_hooks.code("matching", "polar")
    assert shown.startswith('```python title="src/transfusion/matching/')
    with pytest.raises(PluginError, match="shows polar.nowhere, which src/transfusion/matching has 0 times"):
        site_hooks.code("matching", "polar.nowhere")


def test_formulas_that_cannot_be_drawn_stop_the_build():
    from mkdocs.exceptions import PluginError

    import site_hooks

    page = type("Page", (), {"file": type("File", (), {"src_uri": "a.md"})})
    good = site_hooks.on_page_content(r'<span class="arithmatex">\(x &lt; \tau\)</span>', page)
    assert good.startswith("<math")
    assert "&lt;" in good or "&#x0003C;" in good
    with pytest.raises(PluginError, match="cannot be drawn"):
        site_hooks.on_page_content(r'<span class="arithmatex">\(\nonsense\)</span>', page)


@pytest.mark.parametrize(
    ("info", "printed", "alike"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\n", "a\nb\n", False),
        ("a\n…\nd\n", "a\nb\nc\nd\n", True),
        ("loss …\n", "loss 0.5\n", True),
        ("loss 0.4\n", "loss 0.5\n", False),
    ],
)
def test_examples_are_compared(info, printed, alike):
    assert try_pages.agree(info, printed) is alike


def test_examples_are_compared_but_for_numbers():
    assert try_pages.without_numbers("│  0.4 │ ok │\n") == try_pages.without_numbers("│ -12.5 │ ok │\n")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with the models of the examples."""
    return try_pages.prepare(tmp_path_factory.mktemp("place"), demo=False)


@pytest.mark.parametrize("page", try_pages.PLAIN, ids=lambda page: page.stem)
def test_examples_print_what_they_say(page, place):
    _, wrong = try_pages.tried(page, place)
    assert not wrong, "make pages\n" + "\n".join(wrong)


def test_what_is_not_run_shows_no_output():
    """Outside of the pages that are run, blocks of ``console`` hold commands only: an output would go stale."""
    for page in PAGES:
        if page not in try_pages.PLAIN + try_pages.TRAINED:
            shown = [command for command, output in try_pages.examples(page.read_text()) if output.strip()]
            assert not shown, f"{page}: {shown}"


@pytest.fixture(scope="module")
def kept(place) -> Path:
    """What a demo keeps, beside the models."""
    return try_pages.prepare(place, demo=True) / "kept"


def typed(page: Path) -> list[list[str]]:
    """The words of all commands of this program in a page, as a shell would split them."""
    blocks = re.findall(r"^```(?:sh|console)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [line.removeprefix("$ ").split(" | ")[0] for line in lines]
    return [shlex.split(one, comments=True) for one in found if one.startswith("transfusion ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_in_pages_have_options_that_exist(page):
    """Also those that cannot be run here, because their models are the reader's."""
    verbs = get_command(app).commands
    for _, verb, *words in typed(page):
        if "…" not in words:
            verbs[verb].make_context(verb, words, resilient_parsing=False)


def test_the_first_success_of_the_readme_is_one(place, tmp_path):
    """Its commands but for the installation, and the Python that loads the result."""
    text = (ROOT / "README.md").read_text()
    (block,) = [
        one for one in re.findall(r"^```console\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) if "pip" in one
    ]
    commands = [line.removeprefix("$ ") for line in block.splitlines() if "pip install" not in line]
    assert len(commands) == 2
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / "load.py").write_text(code)
    script = "\n".join([*commands, f"{sys.executable} load.py"])
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-ec", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "load it: import peft, transformers; model = peft.PeftModel" in done.stdout


@pytest.mark.slow
def test_what_results_hold_is_told(kept):
    """Every key of every result of the demo is in docs/files.md."""
    info = (ROOT / "docs" / "files.md").read_text()
    results = sorted(kept.glob("*.json"))
    assert len(results) == 7  # with the marker of a folder that this program wrote
    for file in results:
        missing = {key for key in keys(json.loads(file.read_text())) if f"`{key}`" not in info}
        assert not missing, f"docs/files.md does not tell of {missing} in {file.name}"


def keys(value: Any) -> set[str]:
    """The keys of a result, but for names of methods under ``barrier`` and of axes under ``axes``."""
    if isinstance(value, list):
        return set().union(*map(keys, value))
    if not isinstance(value, dict):
        return set()
    inner = [one for key, one in value.items() if key not in ("barrier", "axes")]
    inner += value["axes"].values() if isinstance(value.get("axes"), dict) else []
    return set(value).union(*map(keys, inner))


@pytest.mark.slow
@pytest.mark.parametrize("page", try_pages.TRAINED, ids=lambda page: page.stem)
def test_examples_of_trained_models_print_what_they_say(page, place, kept):
    """Their numbers depend on the machine; all else does not."""
    _, wrong = try_pages.tried(page, place)
    assert not wrong, "make pages\n" + "\n".join(wrong)
