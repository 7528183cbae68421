"""Model cards: the README.md of an output, written from its metadata. No absolute path is written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from transfusion.files.references import DENOISERS
from transfusion.model.vocabulary_map import describe_vocabulary
from transfusion.runtime.run_record import shareable_path, shareable_text
from transfusion.runtime.untrusted_files import path_inside, require_regular
from transfusion.transport.refinement.settings import BASE, describe_refinement

if TYPE_CHECKING:
    from jinja2 import Template

Metadata: TypeAlias = Mapping[str, Any]

_HOSTILE = re.compile(r"([\\`*_{}\[\]<>|#~&])")
_IN_CACHE = re.compile(r"/models--([^/]+)/(?:snapshots|blobs)/")
LARGEST = 2**20
"""The largest README.md that is read, in bytes."""
_PIPELINES = {
    "AudioClassification": "audio-classification",
    "CausalLM": "text-generation",
    "CTC": "automatic-speech-recognition",
    "DepthEstimation": "depth-estimation",
    "ImageClassification": "image-classification",
    "MaskedLM": "fill-mask",
    "ObjectDetection": "object-detection",
    "QuestionAnswering": "question-answering",
    "SemanticSegmentation": "image-segmentation",
    "SequenceClassification": "text-classification",
    "TokenClassification": "token-classification",
}
"""What a class of transformers is for, as the hub calls it, by the end of its name."""
_HEARING = ("Hubert", "Wav2Vec2", "WavLM", "Whisper")
_TASK_TYPES = {
    "CAUSAL_LM": "text-generation",
    "FEATURE_EXTRACTION": "feature-extraction",
    "QUESTION_ANS": "question-answering",
    "SEQ_CLS": "text-classification",
    "TOKEN_CLS": "token-classification",
}
"""What an adapter is for, by its task_type."""


def card(metadata: Metadata, licences: Mapping[str, str | None]) -> str:
    """Return the README.md of an output, for the hub and for people.

    ``metadata`` is the content of the output's transfusion.json, ``licences`` maps the name of each input to
    its licence.
    """
    tuned, onto = metadata["finetuned"], shareable_path(metadata["onto"]["name"])
    roles = [("fine-tune", one) for one in tuned]
    roles += [("its base, A", metadata["base"]), ("the new base, B", metadata["onto"])]
    stated = {name: licence for name, licence in licences.items() if licence}
    from_b = (metadata.get("refinement") or {}).get("start") == BASE  # and π is not in it
    return _template().render(
        front=_front_matter(metadata, licences),
        adapter=metadata["kind"] == "adapter",
        several=len(tuned) > 1,
        titles=[_short(shareable_path(one["name"])) for one in tuned],
        names=_words(shareable_path(one["name"]) for one in tuned),
        base=shareable_path(metadata["base"]["name"]),
        onto=onto,
        how=metadata.get("how"),
        from_b=from_b,
        version=metadata["transfusion"],
        without=_without(metadata),
        file_format=metadata.get("file_format"),
        command=shareable_text(metadata.get("command") or ""),
        inputs=[(role, shareable_path(one["name"]), _code(one["fingerprint"])) for role, one in roles],
        settings=[row for row in _settings(metadata).items() if row[1] not in (None, "")],
        verdict="" if from_b else ": ".join(map(str, _advice(metadata))),
        tensors={what: value for what, value in _tensors(metadata).items() if value},
        repeatable=metadata.get("repeatable", True),
        verb=metadata["verb"],
        licences_differ=licences and (len(set(licences.values())) > 1 or not stated),
        licences=[(shareable_path(name), one or "not stated") for name, one in licences.items() if stated],
    )


def licence_of(root: Path) -> str | None:
    """Return the licence that the README.md in a model's folder states, or None."""
    if root.name in DENOISERS and not (root / "README.md").exists():
        root = root.parent  # the pipeline, which states it for all of its models
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


def _front_matter(metadata: Metadata, licences: Mapping[str, str | None]) -> str:
    from huggingface_hub import ModelCardData

    adapter, merge = metadata["kind"] == "adapter", metadata["verb"] == "merge"
    lora = adapter and metadata.get("peft_type") == "LORA"
    relation = "adapter" if adapter else "merge" if merge else "finetune"
    base = hub_repository(metadata["onto"]["path"])
    data = ModelCardData(
        base_model=[base] if base else None,
        base_model_relation=relation if base else None,
        library_name="peft" if adapter and not metadata.get("file_format") else metadata["library"],
        pipeline_tag=metadata.get("pipeline_tag"),
        tags=["transfusion", *(["lora"] if lora else []), *(["merge"] if merge else [])],
        **_licence_keys(licences, metadata["onto"]["name"]),
    )
    return str(data.to_yaml(line_break="\n"))


def hub_repository(path: str) -> str | None:
    """Return the repository of the hub that a file or folder came from, by its place in the hub's cache.

    A folder of one's own has none, however it is called: its name may be that of a stranger's repository.

    >>> hub_repository("/home/me/.cache/huggingface/hub/models--org--b/snapshots/0123/transformer")
    'org/b'
    >>> hub_repository("/home/me/org/b")
    """
    found = _IN_CACHE.search(path)
    return found[1].replace("--", "/") if found else None


def pipeline_tag(library: str, config: Mapping[str, Any] | None) -> str | None:
    """Return what a model or an adapter is for, as the hub calls it, if its configuration tells.

    >>> pipeline_tag("transformers", {"architectures": ["BertForMaskedLM"]})
    'fill-mask'
    >>> pipeline_tag("peft", {"task_type": "CAUSAL_LM"})
    'text-generation'
    """
    config = config or {}
    if library == "peft":
        return _TASK_TYPES.get(str(config.get("task_type")))
    if library == "open_clip":
        return "zero-shot-image-classification"
    if library == "timm":
        return "image-classification" if config.get("num_classes", 1) else "image-feature-extraction"
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    known, _, purpose = name.partition("For")
    if purpose == "ConditionalGeneration":
        reading = "image-text-to-text" if "vision_config" in config else None
        return "automatic-speech-recognition" if known.startswith(_HEARING) else reading
    if purpose == "SequenceClassification" and known.startswith(_HEARING):
        return "audio-classification"
    return _PIPELINES.get(purpose)


def _licence_keys(licences: Mapping[str, str | None], onto: str) -> dict[str, Any]:
    """Return B's licence, ``other`` if that of another input differs, nothing if B states none."""
    stated = {licence for licence in licences.values() if licence}
    common = licences.get(onto)
    if len(stated) > 1:
        return {"license": "other"}
    if common is None:
        return {}
    if "," in common:
        return {"license": "other"}
    named = re.fullmatch(r"other \((.+)\)", common)
    return {"license": "other", "license_name": named[1]} if named else {"license": common}


def _without(metadata: Metadata) -> str:
    """Say what was not needed. Calibration data of the user counts as data without labels."""
    functional = metadata["alignment"].get("options", {}).get("functional") or {}
    calibrated = functional.get("calibrate") or metadata.get("settings", {}).get("calibrate")
    data = "without labels" if calibrated else "without data"
    return data if metadata.get("refinement") else f"without training and {data}"


def _settings(metadata: Metadata) -> dict[str, Any]:
    pi, alpha = metadata["alignment"], metadata["alpha"]
    shift, vocabulary = metadata.get("output_shift") or {}, metadata.get("vocabulary") or {}
    kept = metadata.get("kept")
    return {
        "method": pi["method"],
        "policy": ", ".join(f"{key} {pi[key]}" for key in ("residual", "inner", "heads")),
        "seed": pi["seed"],
        "BLAKE3 of π": _code(pi["blake3"]),
        "α": _code(json.dumps(alpha)) if isinstance(alpha, Mapping) else alpha,
        "change of B's outputs, compared with A's": f"cosine {shift['direction']}, size {shift['size']}, on"
        f" {shareable_text(str(shift['probes']))}"
        if "direction" in shift
        else None,
        "settings of the fine-tune": ", ".join((metadata.get("changed_settings") or {}).get("carried") or ()),
        "vocabularies": describe_vocabulary(vocabulary) if vocabulary.get("moved") else None,
        "refinement": describe_refinement(metadata.get("refinement")),
        "dtype": metadata.get("dtype"),
        "combined by": metadata.get("how"),
        "weights": ", ".join(map(str, metadata.get("weights") or ())),
        "share of each that is kept": metadata.get("density"),
        "rank": metadata.get("rank"),
        "share of the change that the rank holds": kept and f"at least {kept:.1%} in every module",
    }


def _advice(metadata: Metadata) -> list[str]:
    advice = metadata["alignment"].get("advice") or {}
    return [advice[key] for key in ("verdict", "text") if advice.get(key)]


def _tensors(metadata: Metadata) -> dict[str, Any]:
    return {
        "changed by the fine-tune, moved": metadata.get("moved"),
        "unchanged from the new base": metadata.get("unchanged"),
        "copied from the fine-tune, as the new base has none": metadata.get("carried"),
        "of the new base, dropped": metadata.get("dropped"),
        "of the old base without a counterpart in the new one, left out": metadata.get("left_out"),
        "rows for tokens that the fine-tune added": metadata.get("new_tokens"),
        "tokens of the fine-tune left out": metadata.get("lost_tokens"),
    }


# ── markdown ─────────────────────────────────────────────────────────────────────────────────


class _Markdown(str):
    """Text that is Markdown already; any other text in the template is escaped."""

    __slots__ = ()


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("transfusion.transport")
    environment = Environment(
        loader=loader,
        undefined=StrictUndefined,
        finalize=_plain,
        keep_trailing_newline=True,
        autoescape=False,
    )
    filters = {"raw": _Markdown, "code": _code, "fenced": _fenced, "short": _short, "table": _table}
    environment.filters |= filters
    return environment.get_template("card.md.jinja")


def _plain(value: object) -> str:
    """Escape a text for Markdown, on one line; None is empty."""
    if isinstance(value, _Markdown):
        return value
    return "" if value is None else _HOSTILE.sub(r"\\\1", " ".join(str(value).split()))


def _code(value: object) -> str:
    """Format a text as code within a line or table; nothing is empty."""
    text = " ".join(str(value or "").split()).replace("|", "\\|")
    return _Markdown(f"``{text}``" if "`" in text else f"`{text}`" if text else "")


def _fenced(text: str) -> str:
    """Format a block of code, between fences that the text cannot close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return _Markdown(f"{fence}console\n{text}\n{fence}")


def _table(rows: Iterable[tuple[object, ...]], *head: str) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return _Markdown("\n".join(f"| {' | '.join(map(_plain, line))} |" for line in lines))


def _short(name: str) -> str:
    """The last part of a path or hub id."""
    return name.rstrip("/").rsplit("/", 1)[-1]


def _words(items: Iterable[str]) -> str:
    *rest, last = items
    return f"{', '.join(rest)} and {last}" if rest else last
