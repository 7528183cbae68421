"""Models to evaluate: opened as they are, or an adapter folded into its base in memory."""

from __future__ import annotations

from os.path import isdir
from pathlib import Path

from torch import nn

from transfusion.errors import CheckpointError, SettingError
from transfusion.model.model import Model, Reference
from transfusion.transport.adapters.adapter_opening import is_adapter, open_adapter
from transfusion.transport.dense_transport import DenseTransport
from transfusion.transport.output_record import recorded_base
from transfusion.transport.transport_plan import TransportPlan


def open_model(
    reference: Model | Reference, base: Model | Reference | None = None, *, trust_base: bool = False
) -> Model:
    """Open a model; fold an adapter into ``base``, or into the folder that its configuration names."""
    if isinstance(reference, Model):
        return reference
    try:
        return Model.open(reference)
    except CheckpointError:
        if not isinstance(reference, str | Path) or not isdir(reference) or not is_adapter(reference):
            raise
    base = named_base(reference) if base is None else base
    return fold(reference, base if isinstance(base, Model) else Model.open(base), trust_base=trust_base)


def named_base(finetuned: Model | Reference) -> str:
    """Return the base that an adapter's configuration names, if that is a folder here; refuse otherwise."""
    if not isinstance(finetuned, str | Path) or not is_adapter(finetuned):
        raise SettingError("`base`: the model that was fine-tuned is not given", hint="give A as `base`")
    named = open_adapter(finetuned).config.get("base_model_name_or_path")
    if not isinstance(named, str) or not isdir(named):
        origin = f"{named}, which is no folder here" if named else "no base"
        raise CheckpointError(
            f"{finetuned}: this is an adapter, and its configuration names {origin}",
            hint="give its base as `base`: the model that it was trained on, or moved onto",
        )
    return named


def fold(adapter: str | Path, base: Model, *, trust_base: bool = False) -> Model:
    """Return the base with an adapter folded into its weights: in memory, with the base's tokenizer."""
    check = not trust_base and recorded_base(open_adapter(adapter).checkpoint.root) is not None
    plan = TransportPlan.planned(base, base, hashed=check)
    folded = plan.transport(adapter, full=True, trust_base=not check)
    assert isinstance(folded, DenseTransport)
    model = hold(folded.module(), folded)
    model.checkpoint.label = str(adapter)
    root = base.checkpoint.root
    model.checkpoint.auxiliary_folder = root if root.is_dir() else base.checkpoint.auxiliary_folder
    return model


def hold(module: nn.Module, output: DenseTransport) -> Model:
    """Return the model of an output's module; modules of some libraries do not keep their configuration."""
    return Model.open(module, config=None if hasattr(module, "config") else output.config())
