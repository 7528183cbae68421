"""Opening a fine-tune: a model, or an adapter with the base that it was trained on."""

from __future__ import annotations

from dataclasses import replace
from os.path import exists, expanduser, samefile
from pathlib import Path
from typing import TypeAlias

from transfusion.errors import MismatchError, TransfusionError
from transfusion.model.model import Model, Reference
from transfusion.model.pair import ConfigArgument, open_model
from transfusion.runtime.progress import SILENT, Progress
from transfusion.transport.adapters.adapter import Adapter
from transfusion.transport.adapters.lora_file import LoraFile, OtherParts, is_adapter, open_adapter

Finetune: TypeAlias = Model | Adapter
_SWAPPED = "are `base` and `onto` swapped? If its record is wrong, insist with `trust_base`"


def open_finetune(
    reference: Finetune | Reference,
    config: ConfigArgument = None,
    others: OtherParts | str = OtherParts.REFUSE,
) -> Finetune:
    """Open a fine-tune, once for a whole run.

    ``others`` says what becomes of the parts of a LoRA file that change another model than A.
    """
    if isinstance(reference, str | Path) and is_adapter(reference):
        return open_adapter(reference, others)
    if isinstance(reference, LoraFile):
        return replace(reference, others=OtherParts(others))
    if isinstance(reference, Adapter):
        return reference
    if (model := open_model(reference, config)).is_quantised:
        raise MismatchError(
            f"{model.label} is quantised: what it learned cannot be told from what its bits leave out",
            hint="give the fine-tune's original weights, or its adapter with the quantised model as `base`",
        )
    return model


def check_named_base(
    tuned: Finetune, base: Model, onto: Model, progress: Progress = SILENT, *, trust_base: bool = False
) -> None:
    """Refuse an adapter that says it was trained on B; warn if it names another model than A."""
    if not isinstance(tuned, Adapter):
        return
    named, on_b = tuned.config.get("base_model_name_or_path"), False
    if isinstance(tuned, LoraFile):
        if other := tuned.other_base(base):
            progress.warn(
                f"{tuned.label} says that it was trained on {other}, and {base.label} is a"
                f" {base.family.name}: if that is another model, give it as `base`"
            )
        if tuned.was_trained_on(onto, base):
            named, on_b = tuned.trained_on, True
    if not named or (not on_b and _is_base(str(named), tuned, base)):
        return
    recorded = f"{tuned.label} says that it was trained on {named}"
    if not trust_base and (on_b or _is_base(str(named), tuned, onto)):
        raise MismatchError(f"{recorded}, and that is the model to move it onto", hint=_SWAPPED)
    progress.warn(f"{recorded}, and the base is {base.label}: if that is another model, give it as `base`")


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
