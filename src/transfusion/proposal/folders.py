"""A live module from a folder's config.json alone: a draft needs no weights, for it draws its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.errors import ArchitectureError
from transfusion.inputs import read_json
from transfusion.live import library
from transfusion.probes import probes
from transfusion.proposal.labels import counts_blocks
from transfusion.proposal.laboratory import nobody
from transfusion.proposal.proposing import Proposal, propose
from transfusion.references import resolve
from transfusion.tables import Config

BLOCKS = 2
"""A draft is made on so many blocks, and then certified on as many as the model has."""
LARGE = 300_000_000
"""With more parameters than this, the certificate is for the model with `BLOCKS` blocks, and says so."""


def propose_for(reference: str | Path, *, config: Path | None = None) -> Proposal:
    """Draft and certify a table for the class that a folder's config.json names."""
    root = resolve(reference)
    file = config or (root / "config.json" if root.is_dir() else root.parent / "config.json")
    if not file.exists():
        raise ArchitectureError(
            f"{reference}: a draft is made from a config.json, and there is none",
            hint="put the model's config.json beside the weights, or give it with --config",
        )
    settings = read_json(file)
    transformers = library("transformers")
    names = settings.get("architectures") or []
    made_by = getattr(transformers, names[0], None) if names else None
    if made_by is None:
        named = f"names a class {names[0]} that transformers does not have" if names else "names no class"
        raise ArchitectureError(
            f"{file}: it {named}",
            hint="give 'architectures' in config.json; or call transfusion.proposal.propose on the module",
        )
    name = str(settings.get("model_type") or names[0].lower())
    short, depth = _shortened(made_by, settings)
    small = _made(made_by, short)
    config_of_small = small.config.to_dict()
    proposal = propose(small, config_of_small, name, _inputs(small, config_of_small)).require()
    if depth is None:
        return proposal
    if _parameters(made_by, settings) > LARGE:
        return replace(proposal, certified_on=f"{BLOCKS} of {depth} blocks, for the model is large")
    whole = _made(made_by, settings)
    return proposal.certified(whole, whole.config.to_dict(), f"all {depth} blocks")


def _made(made_by: Any, settings: Config) -> Any:
    return made_by(made_by.config_class.from_dict(dict(settings)))


def _parameters(made_by: Any, settings: Config) -> int:
    """How many parameters a model has, without making them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in _made(made_by, settings).parameters())


def _shortened(made_by: Any, settings: Config) -> tuple[Config, int | None]:
    """The settings of the same model with few blocks, and how many it has; None where it has no more."""
    given = made_by.config_class.from_dict(dict(settings)).to_dict()
    size = _parameters(made_by, settings)
    for key, depth in given.items():
        if not counts_blocks(key, depth) or depth <= BLOCKS:
            continue
        lists = {name: v[:BLOCKS] for name, v in given.items() if isinstance(v, list) and len(v) == depth}
        short = {**settings, key: BLOCKS, **lists}
        if _parameters(made_by, short) < size:
            return short, depth
    return settings, None


def _inputs(module: nn.Module, config: Config) -> dict[str, Tensor]:
    """Random inputs of the kind that the class says it takes first."""
    kind = "image" if getattr(module, "main_input_name", "") == "pixel_values" else "tokens"
    try:
        return probes(nobody("transformers", (kind,)), config, batch=2)
    except KeyError as error:
        raise ArchitectureError(
            f"no inputs can be made for {type(module).__name__}: its configuration has no {error}",
            hint="call transfusion.proposal.propose with inputs of your own",
        ) from error
