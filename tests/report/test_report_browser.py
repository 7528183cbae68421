"""The report in a real browser: nothing is fetched, everything works by mouse and by keyboard, nothing overflows."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import reports
import transfusion

OVERFLOWING = """() => [...document.querySelectorAll("body *")].filter(one => {
  const box = one.getBoundingClientRect();
  return box.width && box.right > innerWidth + 0.5 && !one.closest(".scroll, .contents, .skip");
}).map(one => one.outerHTML.slice(0, 120))"""
CONTRASTS = """() => {
  const channels = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const bright = ([r, g, b]) => [r, g, b].map(c => c / 255)
    .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = one => {
    for (let at = one; at; at = at.parentElement) {
      const colour = channels(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    throw new Error("no ground");
  };
  const found = {};
  for (const one of document.querySelectorAll("body *")) {
    const own = [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || !one.getClientRects().length || one.closest(".skip") || ["SCRIPT", "STYLE"].includes(one.tagName)) continue;
    const style = getComputedStyle(one);
    const ink = bright(channels(one.closest("svg") ? style.fill : style.color)), paper = bright(ground(one));
    const contrast = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    const key = `${one.tagName}.${one.getAttribute("class") || ""}`;
    found[key] = Math.min(found[key] || 99, contrast);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def file(made, tmp_path_factory) -> Path:
    """A page with every kind of section."""
    place = tmp_path_factory.mktemp("browser")
    job = reports.make(place, made("vit-classifier")).with_results()
    return transfusion.report(job.run, ceiling=job.ceiling).save(place / "report.html")


@pytest.fixture
def shown(browser, file):
    """Show the page; in the end nothing may have been complained about, and nothing asked for."""
    contexts, complaints, asked = [], [], []

    def show(*, width: int = 1280, scheme: str = "light", scripts: bool = True, motion: str = "reduce"):
        context = browser.new_context(
            viewport={"width": width, "height": 800},
            color_scheme=scheme,
            reduced_motion=motion,
            java_script_enabled=scripts,
        )
        contexts.append(context)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        return page

    yield show
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith((file.as_uri(), "data:", "blob:"))] == []


def test_tabs_by_mouse_and_by_keyboard(shown):
    page = shown()
    tabs = page.locator("#layers [role=tab]")
    panels = page.locator("#layers [role=tabpanel]")
    assert [panel.is_visible() for panel in panels.all()] == [True] + [False] * (tabs.count() - 1)
    tabs.nth(1).click()
    assert (panels.nth(0).is_visible(), panels.nth(1).is_visible()) == (False, True)
    page.keyboard.press("ArrowRight")
    assert panels.nth(2).is_visible()
    assert tabs.nth(2).get_attribute("aria-selected") == "true"
    assert page.evaluate("document.activeElement.id") == tabs.nth(2).get_attribute("id")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    assert panels.nth(tabs.count() - 1).is_visible(), "from the first, left is the last"
    assert tabs.evaluate_all("tabs => tabs.filter(tab => tab.tabIndex === 0).length") == 1


def test_the_theme_is_switched_and_remembered(shown):
    page = shown(scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    toggle = page.get_by_role("button", name="Switch to the dark theme")
    toggle.focus()
    page.keyboard.press("Enter")
    dark = page.evaluate(ground)
    assert dark != light
    assert page.get_by_role("button", name="Switch to the light theme").is_visible()
    page.reload()
    assert page.evaluate(ground) == dark
    page.get_by_role("button", name="Switch to the light theme").click()
    assert page.evaluate(ground) == light
    assert shown(scheme="dark").evaluate(ground) == dark, "the system's wish is followed"


def test_a_page_that_may_not_remember_works_all_the_same(shown):
    page = shown()
    page.add_init_script(
        "Object.defineProperty(window, 'localStorage', { get() { throw new Error('no'); } })"
    )
    page.reload()
    page.get_by_role("button", name="Switch to the dark theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(scheme, shown):
    page = shown(scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    found = page.evaluate(CONTRASTS)
    assert len(found) > 20
    assert {what: round(one, 2) for what, one in found.items() if one < 4.5} == {}


@pytest.mark.parametrize("width", [375, 768, 1280])
def test_nothing_overflows(width, shown):
    page = shown(width=width)
    for opened in (False, True):
        page.evaluate(
            "open => document.querySelectorAll('details').forEach(one => { one.open = open; })", opened
        )
        assert page.evaluate("document.scrollingElement.scrollWidth") <= width
        assert page.evaluate(OVERFLOWING) == []
    drawn = page.locator(".narrow svg" if width == 375 else "#layers .wide svg").first
    assert drawn.is_visible()


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_figures_are_exported(kind, shown, tmp_path):
    page = shown()
    with page.expect_download() as waiting:
        page.locator(f"[data-figure=tau] [data-export={kind}]").click()
    assert waiting.value.suggested_filename == f"tau.{kind}"
    waiting.value.save_as(tmp_path / "figure")
    content = (tmp_path / "figure").read_bytes()
    if kind == "png":
        assert content.startswith(b"\x89PNG")
        assert int.from_bytes(content[16:20]) == 2 * (960 + 32)
    else:
        root = ET.fromstring(content)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(" not in content.decode(), "a colour that only the page knows"
        assert "rgb(0, 114, 178)" in content.decode()


def test_values_are_told_when_pointed_at_and_by_arrow_keys(shown):
    page = shown()
    tip = page.locator("#tip")
    bar = page.locator("[data-figure=tau] .wide .bar").first
    bar.hover()
    assert tip.inner_text() == bar.get_attribute("data-tip")
    page.mouse.move(2, 2)
    assert not tip.is_visible()
    page.locator("[data-figure=tau] .wide svg").focus()
    page.keyboard.press("ArrowRight")
    first = tip.inner_text()
    page.keyboard.press("ArrowRight")
    assert tip.is_visible()
    assert re.search(r": [\d.]+ %$", first)
    assert tip.inner_text() != first
    page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_numbers_are_a_toggle_away(shown):
    page = shown()
    figure = page.locator("[data-figure=tau]")
    assert not figure.locator("table").is_visible()
    figure.get_by_text("Show numbers").focus()
    page.keyboard.press("Enter")
    assert figure.locator("table").is_visible()
    figure.get_by_text("Show numbers").click()
    assert not figure.locator("table").is_visible()


def test_commands_are_copied(shown):
    page = shown()
    button = page.locator("#commands [data-copy]").first
    button.click()
    page.wait_for_function("document.querySelector('#commands [data-copy]').textContent === 'Copied'")
    info = page.locator("#commands code").first.inner_text()
    assert page.evaluate("navigator.clipboard.readText()") == info
    assert info.startswith("transfusion transport ")


def test_the_keyboard_reaches_the_content_first(shown):
    page = shown()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.locator(".skip").bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    page.keyboard.press("Tab")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus cannot be seen"


def test_without_scripts_everything_is_there(shown):
    page = shown(scripts=False)
    assert all(panel.is_visible() for panel in page.locator("[role=tabpanel]").all())
    assert not page.locator("[data-export]").first.is_visible()


def test_on_paper_all_tabs_are_seen_and_no_controls(shown):
    page = shown()
    page.emulate_media(media="print")
    assert all(panel.is_visible() for panel in page.locator("[role=tabpanel]").all())
    assert not page.locator(".masthead").is_visible()
    assert page.locator("[data-figure=tau] .wide .bar").first.is_visible()
    assert not page.locator("[data-export]").first.is_visible()


def test_on_paper_long_commands_are_whole(shown):
    page = shown()
    page.set_viewport_size({"width": 500, "height": 800})
    page.emulate_media(media="print")
    page.evaluate("() => document.querySelector('pre code').textContent += '/long'.repeat(200)")
    cut = (
        "() => [...document.querySelectorAll('pre')].filter(one => one.scrollWidth > one.clientWidth).length"
    )
    assert page.evaluate(cut) == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 500


HALF_DRAWN = (
    "() => [...document.querySelectorAll('.hero .strand')].filter(one => one.getClientRects().length)"
    ".filter(one => getComputedStyle(one).strokeDasharray !== 'none').length"
)


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_the_first_picture_is_whole_at_once(motion, shown):
    page = shown(motion=motion)
    assert page.evaluate("document.getAnimations().length") == 0
    assert page.locator(".hero .strand:visible").count() > 10
    for media in ("screen", "print"):
        page.emulate_media(media=media)
        assert page.evaluate(HALF_DRAWN) == 0


def test_every_control_has_a_name_and_every_figure_words(shown):
    page = shown()
    nameless = page.evaluate(
        "() => [...document.querySelectorAll('button, a, svg[role=img], [role=tablist], [role=region]')]"
        ".filter(one => !(one.getAttribute('aria-label') || one.textContent.trim())).map(one => one.outerHTML)"
    )
    assert nameless == []
    assert page.evaluate("document.querySelectorAll('h1').length") == 1
    assert page.evaluate(
        "() => [...document.querySelectorAll('[aria-controls], [aria-labelledby]')].every(one =>"
        " document.getElementById(one.getAttribute('aria-controls') || one.getAttribute('aria-labelledby')))"
    )
