"""The function `rerun`: run `transport` or `merge` again with the recorded inputs and settings."""

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
from transfusion.model.model import Model
from transfusion.runtime.progress import SILENT, Progress, followed
from transfusion.runtime.resources import LOCAL, Resources
from transfusion.transport.adapters.lora_file import is_adapter, open_adapter
from transfusion.transport.output import Output
from transfusion.transport.record import FILE, kept_pi, read_metadata
from transfusion.transport.transport import merge, transport

_SETTINGS = ("new_tokens", "other_parts", "full", "head", "rank", "config", "architecture")
"""The recorded settings that are passed on as they are."""


@followed
def rerun(
    file: str | Path,
    *,
    finetuned: Sequence[str | Path] = (),
    base: str | Path | None = None,
    onto: str | Path | None = None,
    via: str | Path | None = None,
    output: str | Path | None = None,
    force: bool = False,
    dry_run: bool = False,
    resources: Resources = LOCAL,
    progress: Progress = SILENT,
) -> Output:
    """Run `transport` or `merge` again as the record of an output says; refuse other inputs.

    ``file`` is the ``transfusion.json`` of an output, the output's folder, or a LoRA file that was moved.
    ``finetuned``, ``base``, ``onto`` and ``via`` are the new places of inputs that were moved; their
    fingerprints must be the same.
    ``output`` is the folder to write; with ``force``, an existing output is replaced.
    ``dry_run`` prepares the output and writes nothing.
    ``resources`` are engine, threads, memory and device; ``progress`` follows the run.

    >>> moved = transfusion.transport("models/tuned", base="models/a", onto="models/b", via="pi.safetensors")
    >>> again = transfusion.rerun(moved.save("models/first"), output="models/second")
    """
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
    settings, config = metadata["settings"], metadata["settings"].get("config")
    places: Sequence[str | Path | None] = finetuned or [None] * len(metadata["finetuned"])
    tuned = [_opened(*one, config, path) for one in zip(metadata["finetuned"], places, strict=True)]
    bases: dict[str, Any] = {
        role: _opened(metadata[role], place, config, path) for role, place in (("base", base), ("onto", onto))
    }
    asked: dict[str, Any] = {name: settings[name] for name in _SETTINGS if settings.get(name) is not None}
    asked |= {"alpha": metadata["alpha"], "dtype": metadata["dtype"], "vocabulary_share": 0.0}
    asked |= {"trust_base": True, "force_unrelated": True}  # both were decided then
    asked |= {"output": output, "force": force, "dry_run": dry_run}
    asked |= {"resources": resources, "progress": progress}
    place = via or settings.get("via")
    kept = kept_pi(metadata, path.parent)
    if place is not None and exists(place):
        _require_pi(Alignment.load(place), metadata, place, path)
        asked["via"] = place
    elif kept is not None:
        asked["via"] = _require_pi(Alignment.load(kept), metadata, kept, path)
    elif not dry_run:
        progress.note("note: the file of π does not exist any more, so A and B are aligned again")
        asked["via"] = _aligned_again(metadata, path, **bases, resources=resources, progress=progress)
    if metadata["verb"] == "merge":
        asked |= {name: metadata[name] for name in ("how", "weights", "density")}
        return merge(tuned, **bases, **asked, seed=metadata["seed"] or 0)
    if (refinement := settings.get("refinement")) is not None:
        asked |= {"refine": True, "refine_steps": refinement["steps"], "refine_rank": refinement["rank"]}
        asked |= {"refine_keep": refinement["keep"], "calibrate": refinement["calibrate"]}
        asked |= {"seed": refinement["seed"]}
        if resources.jobs is None:  # the number of threads changes the last digits of sums
            asked["resources"] = replace(resources, jobs=refinement["threads"])
    return transport(tuned[0], **bases, **asked)


def _opened(
    info: Mapping[str, str], place: str | Path | None, config: str | None, file: Path
) -> Model | str | Path:
    """Open an input at its new place, its recorded name or its recorded path; refuse another fingerprint."""
    if place is None:
        place = info["name"] if exists(info["name"]) or not exists(info["path"]) else info["path"]
    adapter = is_adapter(place)
    found = open_adapter(place) if adapter else Model.open(place, config=config)
    if found.fingerprint != info["fingerprint"]:
        raise MismatchError(
            f"{found.label} is not what it was when {file} was written: {info['fingerprint'][:12]}… then,"
            f" {found.fingerprint[:12]}… now",
            hint="give the place of the original; a run with other inputs is a new transport or merge",
        )
    return found if isinstance(found, Model) else place


def _require_pi(found: Alignment, metadata: Mapping[str, Any], place: str | Path, file: Path) -> Alignment:
    """Return π; refuse another one than that of the run."""
    wanted = metadata["alignment"]["blake3"]
    if found.digest != wanted:
        raise MismatchError(
            f"{place} is another π than that of {file}: {wanted[:12]}… then, {found.digest[:12]}… now",
            hint="give the file of π that was used then as `via`",
        )
    return found


def _aligned_again(metadata: Mapping[str, Any], file: Path, base: Any, onto: Any, **common: Any) -> Alignment:
    info = metadata["alignment"]
    try:
        policy = {key: info[key] for key in ("residual", "inner", "heads")}
        method = Method.from_json(info["method"], info["options"], policy)
    except (SettingError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file}: alignment.options: {str(error).splitlines()[0]}",
            hint="repeat it with the version that wrote it, or give the file of π as `via`",
        ) from error
    dtype, advice = info["options"]["dtype"], bool(info["advice"])
    asked = {
        "seed": info["seed"],
        "dtype": dtype,
        "advice": advice,
        "vocabulary_share": 0.0,
        "force_unrelated": True,
    }
    return align(base, onto, method=method, **asked, **common)
