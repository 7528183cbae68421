"""Model cards: what readers of an output should know about it, told from its story."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from transfusion.inputs import inside, regular

Story: TypeAlias = Mapping[str, Any]

_HOSTILE = re.compile(r"([\\`*_{}\[\]<>|#~&])")
_REVISION = re.compile(r"^([\w.-]+(?:/[\w.-]+)?)@[^@]+$")
_UNSTATED = "not stated"
LARGEST = 2**20
"""A README.md of more bytes is not looked into."""


def card(story: Story, licences: Mapping[str, str | None], command: str | None = None) -> str:
    """The README.md of an output, for the hub and for people. ``licences`` has one for each input.

    >>> story = {"finetuned": "org/tuned", "base": {"name": "org/a"}, "onto": {"name": "org/b"}}
    >>> print(card(story, {"org/a": "mit", "org/b": "mit", "org/tuned": "mit"}).split("---")[1].strip())
    base_model:
    - org/b
    license: mit
    tags:
    - transfusion
    base_model_relation: finetune
    """
    told = command or story.get("command")
    parts = [
        f"# {_title(story)}",
        _summary(story),
        "## How it was made" + (f"\n\n{_fenced(told, 'console')}" if told else ""),
        _table(("", "model", "SHA-256 of its weights"), _inputs(story)),
        _table(("π, α", ""), _settings(story)),
        _verdict(story),
        _list("What became of the tensors", _tensors(story)),
        _repeating(story),
        _licence_text(licences),
    ]
    front = _front_matter(story, licences)
    return f"---\n{front}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def licence_of(root: Path) -> str | None:
    """The licence that the README.md in a model's folder states; None if there is none to be read."""
    from huggingface_hub import metadata_load

    try:
        if regular(inside(root, root / "README.md")).stat().st_size > LARGEST:
            return None
        told = metadata_load(root / "README.md") or {}
        licence, name = told.get("license"), told.get("license_name")
    except Exception:  # no file, or one that only looks as if it had front matter: nothing is stated
        return None
    # YAML may say one thing a billion times by naming it: nothing but short texts is written out
    texts = [one for one in (licence if isinstance(licence, list) else [licence])[:8] if isinstance(one, str)]
    if texts == ["other"] and isinstance(name, str):
        return f"other ({name[:200]})"
    return ", ".join(one[:200] for one in texts) or None


# ── front matter ─────────────────────────────────────────────────────────────────────────────


def _front_matter(story: Story, licences: Mapping[str, str | None]) -> str:
    from huggingface_hub import ModelCardData

    adapter, merge = story.get("kind") == "adapter", story.get("verb") == "merge"
    base = _name(story.get("onto") or story.get("base"))
    data = ModelCardData(
        base_model=[_REVISION.sub(r"\1", base)] if base else None,
        base_model_relation="adapter" if adapter else "merge" if merge else "finetune",
        library_name="peft" if adapter else story.get("library"),
        tags=["transfusion", "merge"] if merge else ["transfusion"],
        **_licence_keys(licences),
    )
    return str(data.to_yaml(line_break="\n"))


def _licence_keys(licences: Mapping[str, str | None]) -> dict[str, Any]:
    """The licence that all inputs agree on; ``other`` where they do not; nothing where none is stated."""
    found = set(licences.values())
    if not found - {None}:
        return {}
    common = next(iter(found)) if len(found) == 1 else None
    if common is None or "," in common:
        return {"license": "other"}
    named = re.fullmatch(r"other \((.+)\)", common)
    return {"license": "other", "license_name": named[1]} if named else {"license": common}


# ── text ─────────────────────────────────────────────────────────────────────────────────────


def _title(story: Story) -> str:
    names = [_short(one) for one in _finetuned(story)] or ["A model"]
    onto = _name(story.get("onto"))
    return " + ".join(names) + (f" on {_short(story['onto'])}" if onto else "")


def _summary(story: Story) -> str:
    tuned, base, onto = _finetuned(story), _name(story.get("base")), _name(story.get("onto"))
    if not (tuned and base and onto):
        return f"Made by TransFusion, {_without(story)}."
    what = "adapter" if story.get("kind") == "adapter" else "fine-tune"
    plural = "s" if len(tuned) > 1 else ""
    how = f", put together by {_plain(story['how'])}" if plural and story.get("how") else ""
    return (
        f"The {what}{plural} {_words(_plain(_name(one)) for one in tuned)} of {_plain(base)}, moved onto"
        f" {_plain(onto)}{how}: {'B + α·π(τ), ' * (not plural)}made by TransFusion"
        f" {_plain(story.get('transfusion'))}".rstrip()
        + f" {_without(story)}. {_usage(story)} It was not evaluated by this step."
    )


def _without(story: Story) -> str:
    """What was not needed; inputs of the user's own are data, if without labels."""
    options = (story.get("alignment") or {}).get("options") or {}
    own = (options.get("functional") or {}).get("calibrate") or (story.get("settings") or {}).get("calibrate")
    return "without training and without labels" if own else "without training and without data"


def _usage(story: Story) -> str:
    if story.get("kind") != "adapter":
        return "It is used like the new base."
    return f"It is loaded with PEFT on {_plain(_name(story.get('onto')))}."


def _repeating(story: Story) -> str:
    if not story.get("repeatable", True):
        return ""
    command = f"transfusion {story.get('verb', 'transport')} --from transfusion.json -o ../again"
    told = "## How to repeat it\n\nWith the same inputs, in the folder of this file:\n\n"
    return told + _fenced(command, "console")


def _inputs(story: Story) -> list[tuple[str, ...]]:
    roles = [("fine-tune", one) for one in _finetuned(story)]
    roles += [(role, story.get(key)) for role, key in (("its base, A", "base"), ("the new base, B", "onto"))]
    return [
        (role, _plain(_name(one)), _code(one.get("sha256")) if isinstance(one, Mapping) else "")
        for role, one in roles
        if _name(one)
    ]


def _settings(story: Story) -> list[tuple[str, ...]]:
    pi, alpha = story.get("alignment") or {}, story.get("alpha")
    policy = ", ".join(f"{key} {pi[key]}" for key in ("residual", "inner", "heads") if key in pi)
    rows = {
        "method": _plain(pi.get("method")),
        "policy": _plain(policy),
        "seed": _plain(pi.get("seed")),
        "SHA-256 of π": _code(pi.get("sha256")),
        "α": _code(json.dumps(alpha)) if isinstance(alpha, Mapping) else _plain(alpha),
        "change of B's outputs, beside that of A's": _arrival(story.get("arrival") or {}),
        "type of the numbers": _plain(story.get("dtype")),
        "combined by": _plain(story.get("how")),
        "weights": _plain(", ".join(map(str, story.get("weights") or ()))),
        "share of each that is kept": _plain(story.get("density")),
        "rank": _plain(story.get("rank")),
        "share of the change that the rank holds": _share(story.get("kept")),
    }
    return [row for row in rows.items() if row[1]]


def _arrival(told: Mapping[str, Any]) -> str:
    if "direction" not in told:
        return ""
    return _plain(f"cosine {told['direction']}, size {told['size']}, on {told['probes']}")


def _share(value: float | None) -> str:
    return "" if value is None else f"at least {value:.1%} in every module"


def _verdict(story: Story) -> str:
    advice = (story.get("alignment") or {}).get("advice") or {}
    told = ": ".join(_plain(advice[key]) for key in ("verdict", "text") if advice.get(key))
    return f"The advice about this π was *{told}*." if told else ""


def _tensors(story: Story) -> list[str]:
    counted = {
        "changed by the fine-tune, moved": story.get("moved"),
        "left as the new base has them": story.get("unchanged"),
        "carried over from the fine-tune, as the new base has none": story.get("carried"),
        "of the new base, dropped": story.get("dropped"),
        "rows for tokens that the fine-tune added": story.get("new_tokens"),
        "tokens of the fine-tune's own left out": story.get("lost_tokens"),
    }
    return [
        f"{len(value)} {what}: {', '.join(map(_code, value))}"
        if isinstance(value, list | tuple)
        else f"{value} {what}"
        for what, value in counted.items()
        if value
    ]


def _licence_text(licences: Mapping[str, str | None]) -> str:
    if not licences or (len(set(licences.values())) == 1 and None not in licences.values()):
        return ""
    heading = "## Licence\n\n"
    if not any(licences.values()):
        return (
            heading + "None of the inputs states a licence: check what holds for each before you share this."
        )
    listed = [(_plain(name), _plain(licence or _UNSTATED)) for name, licence in licences.items()]
    why = "The licences of the inputs differ, and what follows from them together is for you to check:\n\n"
    return heading + why + _table(("input", "licence"), listed)


# ── markdown ─────────────────────────────────────────────────────────────────────────────────


def _finetuned(story: Story) -> list[Any]:
    """The fine-tunes, of which an older story may have a single one by its name alone."""
    told = story.get("finetuned") or []
    return list(told) if isinstance(told, list | tuple) else [told]


def _name(model: Any) -> str:
    return str(model.get("name") or "") if isinstance(model, Mapping) else str(model or "")


def _short(model: Any) -> str:
    """The last part of a path or hub id."""
    return _plain(_name(model).rstrip("/").rsplit("/", 1)[-1])


def _plain(value: object) -> str:
    """Text that markdown takes for text, on one line; empty for None."""
    return "" if value is None else _HOSTILE.sub(r"\\\1", " ".join(str(value).split()))


def _code(value: object) -> str:
    """Text as code within a line or table; empty for nothing."""
    text = " ".join(str(value or "").split()).replace("|", "\\|")
    return f"``{text}``" if "`" in text else f"`{text}`" if text else ""


def _fenced(text: str, language: str) -> str:
    """A block of code, between fences that the text cannot close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _words(items: Iterable[str]) -> str:
    *rest, last = items
    return f"{', '.join(rest)} and {last}" if rest else last


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _list(title: str, items: list[str]) -> str:
    return f"{title}:\n\n" + "\n".join(f"- {item}" for item in items) if items else ""
