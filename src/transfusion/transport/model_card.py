"""Model cards: the README.md of an output, written from its metadata. No absolute path is written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from transfusion.model.vocabulary_map import describe_vocabulary
from transfusion.runtime.run_record import shareable_path, shareable_text
from transfusion.runtime.untrusted_files import path_inside, require_regular
from transfusion.transport.refinement.settings import describe_refinement

Metadata: TypeAlias = Mapping[str, Any]

_HOSTILE = re.compile(r"([\\`*_{}\[\]<>|#~&])")
_REVISION = re.compile(r"^([\w.-]+(?:/[\w.-]+)?)@[^@]+$")
_UNSTATED = "not stated"
LARGEST = 2**20
"""The largest README.md that is read, in bytes."""


def card(metadata: Metadata, licences: Mapping[str, str | None], command: str | None = None) -> str:
    """Return the README.md of an output, for the hub and for people.

    ``metadata`` is the content of the output's transfusion.json. ``licences`` maps the name of each input to
    its licence. ``command`` is the command line as typed, if it is not in the metadata.

    >>> metadata = {"finetuned": "org/tuned", "base": {"name": "org/a"}, "onto": {"name": "org/b"}}
    >>> print(card(metadata, {"org/a": "mit", "org/b": "mit", "org/tuned": "mit"}).split("---")[1].strip())
    base_model:
    - org/b
    license: mit
    tags:
    - transfusion
    base_model_relation: finetune
    """
    typed = shareable_text(command or metadata.get("command") or "")
    parts = [
        f"# {_title(metadata)}",
        _summary(metadata),
        "## How it was made" + (f"\n\n{_fenced(typed, 'console')}" if typed else ""),
        _table(("", "model", "fingerprint"), _inputs(metadata)),
        _table(("π, α", ""), _settings(metadata)),
        _verdict(metadata),
        _list("Tensors", _tensors(metadata)),
        _repeating(metadata),
        _licence_text(licences),
    ]
    front = _front_matter(metadata, licences)
    return f"---\n{front}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def licence_of(root: Path) -> str | None:
    """Return the licence that the README.md in a model's folder states, or None."""
    if not (root / "README.md").exists():
        return None  # without the import, which takes as long as a small transport
    from huggingface_hub import metadata_load

    try:
        if require_regular(path_inside(root, root / "README.md")).stat().st_size > LARGEST:
            return None
        info = metadata_load(root / "README.md") or {}
        licence, name = info.get("license"), info.get("license_name")
    except Exception:  # no file, or broken front matter: no licence is stated
        return None
    # YAML aliases can expand to billions of items: keep a few short strings only
    texts = [one for one in (licence if isinstance(licence, list) else [licence])[:8] if isinstance(one, str)]
    if texts == ["other"] and isinstance(name, str):
        return f"other ({name[:200]})"
    return ", ".join(one[:200] for one in texts) or None


# ── front matter ─────────────────────────────────────────────────────────────────────────────


def _front_matter(metadata: Metadata, licences: Mapping[str, str | None]) -> str:
    from huggingface_hub import ModelCardData

    adapter, merge = metadata.get("kind") == "adapter", metadata.get("verb") == "merge"
    base = _name(metadata.get("onto") or metadata.get("base"))
    data = ModelCardData(
        base_model=[_REVISION.sub(r"\1", base)] if base else None,
        base_model_relation="adapter" if adapter else "merge" if merge else "finetune",
        library_name="peft" if adapter and not metadata.get("file_format") else metadata.get("library"),
        tags=["transfusion", "merge"] if merge else ["transfusion"],
        **_licence_keys(licences),
    )
    return str(data.to_yaml(line_break="\n"))


def _licence_keys(licences: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the licence that all inputs share, ``other`` if they differ, nothing if none is stated."""
    found = set(licences.values())
    if not found - {None}:
        return {}
    common = next(iter(found)) if len(found) == 1 else None
    if common is None or "," in common:
        return {"license": "other"}
    named = re.fullmatch(r"other \((.+)\)", common)
    return {"license": "other", "license_name": named[1]} if named else {"license": common}


# ── text ─────────────────────────────────────────────────────────────────────────────────────


def _title(metadata: Metadata) -> str:
    names = [_short(one) for one in _finetuned(metadata)] or ["A model"]
    onto = _name(metadata.get("onto"))
    return " + ".join(names) + (f" on {_short(metadata['onto'])}" if onto else "")


def _summary(metadata: Metadata) -> str:
    tuned, base, onto = _finetuned(metadata), _name(metadata.get("base")), _name(metadata.get("onto"))
    if not (tuned and base and onto):
        return f"Made by TransFusion, {_without(metadata)}."
    what = "adapter" if metadata.get("kind") == "adapter" else "fine-tune"
    plural = "s" if len(tuned) > 1 else ""
    how = f", combined by {_plain(metadata['how'])}" if plural and metadata.get("how") else ""
    return (
        f"The {what}{plural} {_words(_plain(_name(one)) for one in tuned)} of {_plain(base)}, moved onto"
        f" {_plain(onto)}{how}: {'B + α·π(τ), ' * (not plural)}made by TransFusion"
        f" {_plain(metadata.get('transfusion'))}".rstrip()
        + f" {_without(metadata)}. {_usage(metadata)} It was not evaluated."
    )


def _without(metadata: Metadata) -> str:
    """Say what was not needed. Calibration data of the user counts as data without labels."""
    options = (metadata.get("alignment") or {}).get("options") or {}
    settings = metadata.get("settings") or {}
    calibrated = (options.get("functional") or {}).get("calibrate") or settings.get("calibrate")
    data = "without labels" if calibrated else "without data"
    return data if metadata.get("refinement") else f"without training and {data}"


def _usage(metadata: Metadata) -> str:
    if metadata.get("kind") != "adapter":
        return "Use it like the new base."
    onto, format = _plain(_name(metadata.get("onto"))), metadata.get("file_format")
    if format:
        return f"Load it on {onto} as any LoRA in this format (names as in {_plain(format)})."
    return f"Load it with PEFT on {onto}."


def _repeating(metadata: Metadata) -> str:
    if not metadata.get("repeatable", True):
        return ""
    command = f"transfusion {metadata.get('verb', 'transport')} --from transfusion.json -o ../again"
    text = "## How to repeat it\n\nWith the same inputs, in the folder of this file:\n\n"
    return text + _fenced(command, "console")


def _inputs(metadata: Metadata) -> list[tuple[str, ...]]:
    roles = [("fine-tune", one) for one in _finetuned(metadata)]
    roles += [
        (role, metadata.get(key)) for role, key in (("its base, A", "base"), ("the new base, B", "onto"))
    ]
    return [
        (role, _plain(_name(one)), _code(one.get("fingerprint")) if isinstance(one, Mapping) else "")
        for role, one in roles
        if _name(one)
    ]


def _settings(metadata: Metadata) -> list[tuple[str, ...]]:
    pi, alpha = metadata.get("alignment") or {}, metadata.get("alpha")
    policy = ", ".join(f"{key} {pi[key]}" for key in ("residual", "inner", "heads") if key in pi)
    rows = {
        "method": _plain(pi.get("method")),
        "policy": _plain(policy),
        "seed": _plain(pi.get("seed")),
        "BLAKE3 of π": _code(pi.get("blake3")),
        "α": _code(json.dumps(alpha)) if isinstance(alpha, Mapping) else _plain(alpha),
        "change of B's outputs, compared with A's": _output_shift(metadata.get("output_shift") or {}),
        "settings of the fine-tune": _plain(
            ", ".join((metadata.get("changed_settings") or {}).get("carried") or ())
        ),
        "vocabularies": _vocabulary(metadata.get("vocabulary") or {}),
        "refinement": _plain(describe_refinement(metadata.get("refinement"))),
        "dtype": _plain(metadata.get("dtype")),
        "combined by": _plain(metadata.get("how")),
        "weights": _plain(", ".join(map(str, metadata.get("weights") or ()))),
        "share of each that is kept": _plain(metadata.get("density")),
        "rank": _plain(metadata.get("rank")),
        "share of the change that the rank holds": _share(metadata.get("kept")),
    }
    return [row for row in rows.items() if row[1]]


def _output_shift(info: Mapping[str, Any]) -> str:
    if "direction" not in info:
        return ""
    probes = shareable_text(str(info["probes"]))
    return _plain(f"cosine {info['direction']}, size {info['size']}, on {probes}")


def _vocabulary(info: Mapping[str, Any]) -> str:
    return _plain(describe_vocabulary(info)) if info.get("moved") else ""


def _share(value: float | None) -> str:
    return "" if value is None else f"at least {value:.1%} in every module"


def _verdict(metadata: Metadata) -> str:
    advice = (metadata.get("alignment") or {}).get("advice") or {}
    text = ": ".join(_plain(advice[key]) for key in ("verdict", "text") if advice.get(key))
    return f"The advice about this π was *{text}*." if text else ""


def _tensors(metadata: Metadata) -> list[str]:
    counted = {
        "changed by the fine-tune, moved": metadata.get("moved"),
        "unchanged from the new base": metadata.get("unchanged"),
        "copied from the fine-tune, as the new base has none": metadata.get("carried"),
        "of the new base, dropped": metadata.get("dropped"),
        "of the old base without a counterpart in the new one, left out": metadata.get("left_out"),
        "rows for tokens that the fine-tune added": metadata.get("new_tokens"),
        "tokens of the fine-tune left out": metadata.get("lost_tokens"),
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
        return heading + "None of the inputs states a licence: check each of them before you share this."
    listed = [
        (_plain(shareable_path(name)), _plain(licence or _UNSTATED)) for name, licence in licences.items()
    ]
    why = "The licences of the inputs differ. Check what their combination allows:\n\n"
    return heading + why + _table(("input", "licence"), listed)


# ── markdown ─────────────────────────────────────────────────────────────────────────────────


def _finetuned(metadata: Metadata) -> list[Any]:
    """The fine-tunes; a single one may be given by its name alone."""
    info = metadata.get("finetuned") or []
    return list(info) if isinstance(info, list | tuple) else [info]


def _name(model: Any) -> str:
    return shareable_path(str(model.get("name") or "") if isinstance(model, Mapping) else str(model or ""))


def _short(model: Any) -> str:
    """The last part of a path or hub id."""
    return _plain(_name(model).rstrip("/").rsplit("/", 1)[-1])


def _plain(value: object) -> str:
    """Escape a text for markdown, on one line; None is empty."""
    return "" if value is None else _HOSTILE.sub(r"\\\1", " ".join(str(value).split()))


def _code(value: object) -> str:
    """Format a text as code within a line or table; nothing is empty."""
    text = " ".join(str(value or "").split()).replace("|", "\\|")
    return f"``{text}``" if "`" in text else f"`{text}`" if text else ""


def _fenced(text: str, language: str) -> str:
    """Format a block of code, between fences that the text cannot close."""
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
