"""Running again what a record says: the recorded inputs and settings, compared and passed to the verb."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os.path import exists, isdir
from pathlib import Path
from typing import Any

from transfusion.alignment.alignment import Alignment
from transfusion.errors import CheckpointError, MismatchError, SettingError
from transfusion.matching.align import align
from transfusion.matching.methods import Method
from transfusion.runtime.settings import recorded
from transfusion.transport.finetunes import Finetune, open_finetune
from transfusion.transport.output import Output
from transfusion.transport.record import FILE, kept_pi, read_metadata
from transfusion.transport.settings import MovingSettings
from transfusion.transport.transport import merge, transport

_PLACES = ("finetuned", "base", "onto", "via", "architecture")
"""Settings that may be given beside a record: where the inputs are now."""
_NOW = ("output", "push", "force", "dry_run", "resources", "progress")
"""Settings that no record has."""
_KEPT = ("new_tokens", "other_parts", "full", "head", "rank", "config", "architecture")
"""The recorded settings that are passed on as they are."""


def repeat(file: str | Path, settings: MovingSettings, finetuned: Sequence[Any] = ()) -> Output:
    """Run `transport` or `merge` again as the record of an output says; refuse other inputs and settings.

    ``file`` is the ``transfusion.json`` of an output, the output's folder, or a LoRA file that was moved.
    Of the settings, only those count that say where inputs are now, and where to write.
    """
    if decided := [f"`{name}`" for name in recorded(settings) if name not in _PLACES]:
        raise SettingError(f"`repeat` decides {', '.join(decided)}", hint="leave it out")
    path = Path(file) / FILE if isdir(file) else Path(file)
    if not exists(path):
        raise CheckpointError(f"{path}: no such file", hint=f"give the {FILE} beside an output")
    metadata = read_metadata(path)
    if not metadata.get("repeatable", True):
        raise CheckpointError(
            f"{path}: the inputs of this run were in memory", hint="only runs from files can be repeated"
        )
    if finetuned and len(finetuned) != len(metadata["finetuned"]):
        raise SettingError(
            f"{len(finetuned)} fine-tune(s) given, and {path} records {len(metadata['finetuned'])}",
            hint="give all of them, in their order, or none",
        )
    kept, config = metadata["settings"], metadata["settings"].get("config")
    places = finetuned or [None] * len(metadata["finetuned"])
    tuned = [_opened(*one, config, path) for one in zip(metadata["finetuned"], places, strict=True)]
    asked: dict[str, Any] = {name: getattr(settings, name) for name in _NOW}
    asked |= {
        role: _opened(metadata[role], getattr(settings, role), config, path) for role in ("base", "onto")
    }
    asked |= {name: kept[name] for name in _KEPT if kept.get(name) is not None}
    asked |= {"alpha": metadata["alpha"], "dtype": metadata["dtype"], "vocabulary_share": 0.0}
    asked |= {"trust_base": True, "force_unrelated": True}  # both were decided then
    place: Any = settings.via or kept.get("via")
    place = place if place is not None and exists(place) else kept_pi(metadata, path.parent)
    if place is not None:
        asked["via"] = _require_pi(Alignment.load(place), metadata, place, path)
    elif not settings.dry_run:
        settings.progress.note("note: the file of π does not exist any more, so A and B are aligned again")
        asked["via"] = _aligned_again(metadata, path, asked)
    if metadata["verb"] == "merge":
        asked |= {name: metadata[name] for name in ("how", "weights", "density")}
        return merge(tuned, **asked, seed=metadata["seed"] or 0)
    if (refinement := kept.get("refinement")) is not None:
        asked |= {f"refine_{name}": refinement.get(name) for name in ("steps", "rank", "keep", "batch")}
        asked |= {"refine": True, "calibrate": refinement["calibrate"], "seed": refinement["seed"]}
        if (answers := kept.get("answers")) is not None:
            if not exists(answers):
                raise CheckpointError(
                    f"{answers}: the answers that {path} was learned from are not there any more",
                    hint="put the file back; a run without it is a new transport",
                )
            asked |= {"answers": answers, "calibrate": None}
        if settings.resources.jobs is None:  # the number of threads changes the last digits of sums
            asked["resources"] = replace(settings.resources, jobs=refinement["threads"])
    return transport(tuned[0], **asked)


def _opened(info: Mapping[str, str], place: str | Path | None, config: str | None, file: Path) -> Finetune:
    """Open an input at its new place, its recorded name or its recorded path; refuse another fingerprint."""
    if place is None:
        place = info["name"] if exists(info["name"]) or not exists(info["path"]) else info["path"]
    found = open_finetune(place, config)
    if found.fingerprint != info["fingerprint"]:
        raise MismatchError(
            f"{found.label} is not what it was when {file} was written: {info['fingerprint'][:12]}… then,"
            f" {found.fingerprint[:12]}… now",
            hint="give the place of the original; a run with other inputs is a new transport or merge",
        )
    return found


def _require_pi(found: Alignment, metadata: Mapping[str, Any], place: str | Path, file: Path) -> Alignment:
    """Return π; refuse another one than that of the run."""
    wanted = metadata["alignment"]["blake3"]
    if found.digest != wanted:
        raise MismatchError(
            f"{place} is another π than that of {file}: {wanted[:12]}… then, {found.digest[:12]}… now",
            hint="give the file of π that was used then as `via`",
        )
    return found


def _aligned_again(metadata: Mapping[str, Any], file: Path, asked: Mapping[str, Any]) -> Alignment:
    info = metadata["alignment"]
    try:
        policy = {key: info[key] for key in ("residual", "inner", "heads")}
        method = Method.from_json(info["method"], info["options"], policy)
    except (SettingError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file}: alignment.options: {str(error).splitlines()[0]}",
            hint="repeat it with the version that wrote it, or give the file of π as `via`",
        ) from error
    return align(
        asked["base"],
        asked["onto"],
        method=method,
        seed=info["seed"],
        dtype=info["options"]["dtype"],
        advice=bool(info["advice"]),
        vocabulary_share=0.0,
        force_unrelated=True,
        goes_on=metadata["settings"].get("refinement") is not None,
        resources=asked["resources"],
        progress=asked["progress"],
    )
