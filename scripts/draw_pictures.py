"""Draw the pictures of docs/concepts.md: python scripts/draw_pictures.py [--check]

Plain SVG. Colours are variables: on the site those of its theme; elsewhere those of the style inside, which
follows the reader's system.
"""

from __future__ import annotations

import sys
from pathlib import Path

PLACE = Path(__file__).parent.parent / "docs" / "pictures"
STYLE = """<style>
svg { --ink: #1f2933; --faint: #7b8794; --line: #9aa5b1; --paper: #ffffff;
  --one: #00897b; --two: #e07b39; --three: #5e60ce; --four: #c2417c; --soft: #e6f4f1; }
@media (prefers-color-scheme: dark) { svg { --ink: #e4e7eb; --faint: #9aa5b1; --line: #616e7c;
  --paper: #1e2129; --one: #4db6ac; --two: #f0a26b; --three: #9a9cf0; --four: #e884b3; --soft: #21413d; } }
</style>"""
KINDS = ("one", "two", "three", "four")


def text(x: float, y: float, words: str, size: int = 15, colour: str = "ink", anchor: str = "middle") -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" '
        f'style="fill:var(--{colour})">{words}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, colour: str = "line", extra: str = "") -> str:
    style = f"stroke:var(--{colour});stroke-width:2;{extra}"
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" style="{style}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = "ink", extra: str = "") -> str:
    """A line with a head, drawn as a triangle so that it takes the colour of the line."""
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    back = (x2 - 10 * dx, y2 - 10 * dy)
    corners = ((x2, y2), (back[0] - 5 * dy, back[1] + 5 * dx), (back[0] + 5 * dy, back[1] - 5 * dx))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    return line(x1, y1, round(back[0], 1), round(back[1], 1), colour, extra) + (
        f'<polygon points="{points}" style="fill:var(--{colour})"/>'
    )


def circle(x: float, y: float, radius: float, fill: str, stroke: str = "none") -> str:
    edge = "none" if stroke == "none" else f"var(--{stroke})"
    return f'<circle cx="{x}" cy="{y}" r="{radius}" style="fill:var(--{fill});stroke:{edge};stroke-width:2"/>'


def box(x: float, y: float, width: float, height: float, fill: str = "soft", stroke: str = "line") -> str:
    edge = "none" if stroke == "none" else f"var(--{stroke})"
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" '
        f'style="fill:var(--{fill});stroke:{edge};stroke-width:1.5"/>'
    )


def picture(width: int, height: int, *parts: str) -> str:
    body = "\n".join(parts)
    font = "font-family=\"system-ui, 'Helvetica Neue', Arial, sans-serif\""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {font}>'
    return f"{head}\n{STYLE}\n{body}\n</svg>\n"


def idea() -> str:
    """A and its fine-tune on the left, B and what is wanted on the right, π in between."""
    parts = [
        box(40, 60, 190, 200, "paper"),
        box(490, 60, 190, 200, "paper"),
        text(135, 45, "the old release", 14, "faint"),
        text(585, 45, "the new release", 14, "faint"),
        circle(135, 225, 9, "ink"),
        text(160, 231, "A", 19, anchor="start"),
        circle(135, 95, 9, "one"),
        text(152, 101, "A_ft", 19, "one", "start"),
        arrow(135, 212, 135, 110, "one"),
        text(118, 165, "τ", 24, "one", "end"),
        circle(585, 225, 9, "ink"),
        text(610, 231, "B", 19, anchor="start"),
        circle(585, 95, 9, "two"),
        arrow(585, 212, 585, 110, "two"),
        text(568, 165, "π(τ)", 22, "two", "end"),
        text(585, 81, "B + α·π(τ)", 16, "two"),
        arrow(240, 160, 480, 160, "faint", "stroke-dasharray:6 5"),
        text(360, 145, "π", 28),
        text(360, 185, "which unit of B is", 14, "faint"),
        text(360, 204, "which unit of A", 14, "faint"),
        text(135, 285, "a change, learned from data", 14, "faint"),
        text(585, 285, "the same change, in B's terms", 14, "faint"),
    ]
    return picture(720, 300, *parts)


def _net(x: float, order: tuple[int, ...], changed: int | None, title: str) -> list[str]:
    """Two inputs, four units in some order, one output; a ring around the unit that is changed."""
    places = [75 + 55 * place for place in range(4)]
    parts = [text(x + 100, 40, title, 16)]
    for place, kind in enumerate(order):
        colour = KINDS[kind]
        parts += [line(x + 10, y, x + 100, places[place], colour, "opacity:.7") for y in (120, 195)]
        parts.append(line(x + 100, places[place], x + 190, 157, colour, "opacity:.7"))
    parts += [circle(x + 10, y, 8, "line") for y in (120, 195)]
    parts.append(circle(x + 190, 157, 8, "line"))
    for place, kind in enumerate(order):
        if place == changed:
            parts.append(circle(x + 100, places[place], 22, "paper", "ink"))
        parts.append(circle(x + 100, places[place], 14, KINDS[kind]))
        parts.append(text(x + 100, places[place] + 5, "abcd"[kind], 14, "paper"))
    return parts


def order() -> str:
    """The same network twice, its hidden units in another order."""
    parts = [
        *_net(20, (0, 1, 2, 3), 1, "A: τ changes unit b"),
        *_net(265, (2, 0, 3, 1), 1, "B + τ: hits unit a"),
        *_net(510, (2, 0, 3, 1), 3, "B + π(τ): hits unit b"),
        text(
            365,
            305,
            "All three compute the same before the change: the order of hidden units means nothing.",
            14,
            "faint",
        ),
    ]
    return picture(730, 320, *parts)


def matching() -> str:
    """A small matrix of gains with the best assignment marked, and the permutation that it is."""
    gains = ((1, 2, 9, 1), (8, 3, 2, 1), (1, 2, 1, 7), (2, 9, 3, 2))
    chosen = (2, 0, 3, 1)
    parts = [text(175, 30, "gain: how well unit j of A fits place i of B", 14, "faint")]
    for i, row in enumerate(gains):
        for j, gain in enumerate(row):
            x, y = 85 + 55 * j, 70 + 50 * i
            best = chosen[i] == j
            parts.append(box(x, y, 50, 45, "one" if best else "soft", "ink" if best else "none"))
            parts.append(text(x + 25, y + 29, str(gain), 17, "paper" if best else "faint"))
        parts.append(text(60, 98 + 50 * i, f"B {i}", 15))
    parts += [text(110 + 55 * j, 60, f"A {'abcd'[j]}", 15, KINDS[j]) for j in range(4)]
    parts += [text(545, 30, "the best assignment is P", 14, "faint")]
    for place in range(4):
        y = 92 + 50 * place
        parts.append(line(460, 92 + 50 * chosen[place], 630, y, KINDS[chosen[place]]))
    for place in range(4):
        y = 92 + 50 * place
        parts += [circle(460, y, 16, KINDS[place]), text(460, y + 5, "abcd"[place], 15, "paper")]
        parts += [circle(630, y, 16, KINDS[chosen[place]]), text(630, y + 5, str(place), 15, "paper")]
    parts += [text(460, 285, "A's units", 14), text(630, 285, "B's places", 14)]
    return picture(720, 300, *parts)


def heads() -> str:
    """First whole heads change places, then units inside each."""
    parts = []
    plain, moved = ((0, 1, 2),) * 3, ((2, 0, 1), (1, 0, 2), (0, 2, 1))
    columns = (
        ("A", (0, 1, 2), plain),
        ("heads matched", (2, 0, 1), plain),
        ("units matched", (2, 0, 1), moved),
    )
    for column, (title, seats, inside) in enumerate(columns):
        x = 60 + 240 * column
        parts.append(text(x + 70, 32, title, 16))
        for seat, head in enumerate(seats):
            y = 50 + 78 * seat
            parts.append(box(x, y, 140, 62, "paper", KINDS[head]))
            for place, unit in enumerate(inside[head]):
                parts.append(circle(x + 30 + 40 * place, y + 31, 14, KINDS[head]))
                parts.append(text(x + 30 + 40 * place, y + 36, str(unit), 14, "paper"))
        if column < 2:
            parts.append(arrow(x + 155, 160, x + 225, 160, "faint"))
    parts.append(
        text(
            370,
            305,
            "A unit never leaves its head: a softmax belongs to each head, not to all of them.",
            14,
            "faint",
        )
    )
    return picture(740, 320, *parts)


def stream() -> str:
    """A block of a transformer: three points of the stream, two branches, two shortcuts."""
    parts = [line(50, 200, 690, 200, "line", "stroke-width:5")]
    for x, name, map_ in ((70, "x", "P_in"), (370, "y", "P_mid"), (670, "x@next", "P_out")):
        parts += [circle(x, 200, 10, "ink"), text(x, 238, name, 17), text(x, 262, map_, 15, "two")]
    for x, name in ((140, "attention"), (440, "MLP")):
        parts += [
            line(x - 45, 200, x - 20, 110),
            box(x - 20, 80, 150, 58, "soft", "one"),
            text(x + 55, 115, name, 17, "one"),
            arrow(x + 130, 110, x + 168, 190, "line"),
            circle(x + 172, 200, 12, "paper", "line"),
            text(x + 172, 206, "+", 17),
        ]
    parts += [
        text(220, 188, "shortcut: P_mid·P_inᵀ", 13, "two"),
        text(520, 188, "shortcut: P_out·P_midᵀ", 13, "two"),
        text(
            370,
            40,
            "A branch reads the stream through weights, which can be reordered. A shortcut has none.",
            14,
            "faint",
        ),
        text(
            370,
            300,
            "Under a tied stream all three maps are one, and both shortcuts are the identity again.",
            14,
            "faint",
        ),
    ]
    return picture(740, 320, *parts)


def gap() -> str:
    """The share of the gap that arrives, beside what it costs."""
    parts = [
        text(200, 32, "the task", 17),
        text(550, 32, "the support", 17),
        line(60, 250, 340, 250),
        line(410, 250, 690, 250),
    ]
    for x, height, name, colour in (
        (95, 60, "B", "line"),
        (175, 130, "B + π(τ)", "two"),
        (255, 190, "ceiling", "one"),
    ):
        parts += [box(x, 250 - height, 55, height, colour, "none"), text(x + 27, 272, name, 14)]
    parts += [
        line(60, 190, 335, 190, "faint", "stroke-dasharray:4 4"),
        arrow(322, 188, 322, 62, "one"),
        arrow(162, 188, 162, 122, "two"),
        text(330, 130, "gap", 15, "one", "start"),
    ]
    for x, height, name, colour in (
        (445, 190, "B", "line"),
        (525, 180, "B + π(τ)", "two"),
        (605, 160, "ceiling", "one"),
    ):
        parts += [box(x, 250 - height, 55, height, colour, "none"), text(x + 27, 272, name, 14)]
    parts += [
        text(200, 300, "share = (moved − B) / (ceiling − B)", 14, "faint"),
        text(550, 300, "what B could do before, and should keep", 14, "faint"),
    ]
    return picture(740, 315, *parts)


PICTURES = {"idea": idea, "order": order, "matching": matching, "heads": heads, "stream": stream, "gap": gap}


def stale() -> list[Path]:
    """The pictures that are not as this script draws them."""
    places = {PLACE / f"{name}.svg": draw for name, draw in PICTURES.items()}
    return [place for place, draw in places.items() if not place.exists() or place.read_text() != draw()]


def main() -> None:
    if "--check" in sys.argv[1:]:
        raise SystemExit("\n".join(str(place) for place in stale()) or 0)
    for name, draw in PICTURES.items():
        (PLACE / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
