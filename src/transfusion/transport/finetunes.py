"""Opening a fine-tune: a model, or an adapter with the base that it was trained on."""

from __future__ import annotations

from os.path import exists, expanduser, samefile
from pathlib import Path
from typing import TypeAlias

from transfusion.errors import MismatchError, TransfusionError
from transfusion.model.model import Model, Reference
from transfusion.model.pair import ConfigArgument, open_model
from transfusion.runtime.progress import SILENT, Progress
from transfusion.transport.adapters.adapter import Adapter
from transfusion.transport.adapters.lora_file import LoraFile, is_adapter, open_adapter

Finetune: TypeAlias = Model | Reference

_SWAPPED = "are `base` and `onto` swapped? If its record is wrong, insist with `trust_base`"


def open_finetune(
    finetuned: Finetune,
    base: Model,
    onto: Model,
    config: ConfigArgument = None,
    progress: Progress = SILENT,
    *,
    trust_base: bool = False,
) -> Model | str | Path:
    """Open a fine-tuned model. An adapter stays a reference; warn if it names another base, refuse B."""
    if isinstance(finetuned, str | Path) and is_adapter(finetuned):
        adapter = open_adapter(finetuned)
        if isinstance(adapter, LoraFile) and (other := adapter.other_base(base)):
            progress.warn(
                f"{adapter.label} says that it was trained on {other}, and {base.label} is a"
                f" {base.family.name}: if that is another model, give it as `base`"
            )
        if isinstance(adapter, LoraFile) and not trust_base and adapter.was_trained_on(onto, base):
            raise MismatchError(
                f"{adapter.label} says that it was trained on {adapter.trained_on}, and that is the model to"
                " move it onto",
                hint=_SWAPPED,
            )
        named = adapter.config.get("base_model_name_or_path")
        if named and not _is_base(str(named), adapter, base):
            recorded = f"{adapter.label} says that it was trained on {named}"
            if not trust_base and _is_base(str(named), adapter, onto):
                raise MismatchError(
                    f"{recorded}, and that is the model to move it onto",
                    hint=_SWAPPED,
                )
            progress.warn(
                f"{recorded}, and the base is {base.label}: if that is another model, give it as `base`"
            )
        return finetuned
    return open_model(finetuned, config)


def _is_base(named: str, adapter: Adapter, base: Model) -> bool:
    """Whether the base that an adapter names is the given one: the same reference, path or content."""
    name, _, revision = base.label.partition("@")
    on_hub = named == name and not exists(expanduser(named))
    if named == base.label or (on_hub and adapter.config.get("revision") in (None, revision)):
        return True
    if base.checkpoint.in_memory:
        return False
    folder = adapter.checkpoint.root if adapter.checkpoint.root.is_dir() else adapter.checkpoint.root.parent
    places = [path for path in (Path(expanduser(named)), folder / expanduser(named)) if exists(path)]
    return any(samefile(path, base.checkpoint.root) for path in places) or any(
        _same_content(path, base) for path in places
    )


def _same_content(path: Path, base: Model) -> bool:
    try:
        model, base = Model.open(path), base.original or base
        return model.fingerprint == base.fingerprint
    except TransfusionError:  # a folder of this name is no model
        return False
