"""Drafts for the class that a folder's config.json names. Parameters are random: no weights are needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.architecture.config_schema import require_sensible
from transfusion.architecture.table import Config
from transfusion.errors import ArchitectureError, TransfusionError
from transfusion.files.publishing import publish_file, require_writable, write_text
from transfusion.files.references import resolve
from transfusion.model.bases import input_files
from transfusion.running.model_classes import class_named_in, class_of_transformers
from transfusion.running.probes.random_inputs import random_inputs
from transfusion.runtime.untrusted_files import path_inside, read_json
from transfusion.verification.drafting.axis_labels import counts_blocks
from transfusion.verification.drafting.declarations import require_word
from transfusion.verification.drafting.probe_model import empty_family
from transfusion.verification.drafting.propose import ProposedTable, propose

BLOCKS = 2
"""The number of blocks of the model that is analysed."""
LARGE = 300_000_000
"""A model with more parameters is certified with `BLOCKS` blocks instead of all."""
HUGE = 4_000_000_000
"""A model with more parameters in `BLOCKS` blocks is refused."""
MOST = 1000
"""A model with more blocks is refused."""


def propose_for(
    reference: str | Path,
    *,
    config: Path | None = None,
    output: Path | None = None,
    force: bool = False,
) -> ProposedTable:
    """Draft and certify a table for the class that a model's config.json names.

    Args:
        reference: The folder or file of a model, or a hub id. Its weights are not read.
        config: Another config.json.
        output: A file to write the draft to.
        force: Replace an existing file.
    """
    root = resolve(reference)
    if output is not None:
        require_writable(output, force=force, inputs=input_files(root), folder=False)
    proposal = _propose(reference, root, config).require()
    if output is not None:
        publish_file(output, lambda staged: write_text(staged, proposal.text), force=force)
    return proposal


def _propose(reference: str | Path, root: Path, config: Path | None) -> ProposedTable:
    file = config or (root / "config.json" if root.is_dir() else root.parent / "config.json")
    if not file.exists():
        raise ArchitectureError(
            f"{reference}: there is no config.json to make a draft from",
            hint="put the model's config.json beside the weights, or give it as `config`",
        )
    settings = read_json(file if config else path_inside(file.parent, file))
    require_sensible(settings, str(file))
    class_name = class_named_in(settings, str(file))
    if class_name is None:
        raise ArchitectureError(
            f"{file}: it names no class",
            hint="add 'architectures' to config.json; or call verification.drafting.propose on the module",
        )
    name = require_word(settings.get("model_type") or class_name.lower())
    made_by = class_of_transformers(settings, str(file))
    _refuse_endless(file, settings)
    with _library_errors(file, class_name):
        short, depth = _shortened(made_by, settings)
        _refuse_huge(file, _parameters(made_by, short))
        small = _made(made_by, short)
        config_of_small = small.config.to_dict()
        inputs = _inputs(small, config_of_small)
    proposal = propose(small, config_of_small, name, inputs).require()
    if depth is None:
        return proposal
    if _parameters(made_by, settings) > LARGE:
        return replace(proposal, certified_on=f"{BLOCKS} of {depth} blocks, because the model is large")
    whole = _made(made_by, settings)
    return proposal.certified(whole, whole.config.to_dict(), f"all {depth} blocks")


def _refuse_endless(file: Path, settings: Config) -> None:
    for key, depth in settings.items():
        if counts_blocks(key, depth) and depth > MOST:
            raise ArchitectureError(
                f"{file}: {key} = {depth}, and at most {MOST} blocks are allowed",
                hint="give the configuration of a model with fewer blocks; the table is the same",
            )


def _refuse_huge(file: Path, parameters: int) -> None:
    if parameters > HUGE:
        raise ArchitectureError(
            f"{file}: {BLOCKS} blocks of this model have {parameters} parameters; at most {HUGE} are allowed",
            hint="give the configuration of a smaller model; the table is the same",
        )


@contextmanager
def _library_errors(file: Path, class_name: str) -> Iterator[None]:
    """Turn the library's errors about a configuration into an `ArchitectureError`."""
    try:
        yield
    except TransfusionError:
        raise
    except Exception as error:  # of any type: classes raise what they like
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ArchitectureError(
            f"{file}: transformers cannot build a {class_name} from it ({reason[0]:.200})",
            hint="download the model's own config.json",
        ) from error


def _made(made_by: Any, settings: Config) -> Any:
    return made_by(made_by.config_class.from_dict(deepcopy(dict(settings))))


def _parameters(made_by: Any, settings: Config) -> int:
    """Return the number of parameters of a model, without allocating them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in _made(made_by, settings).parameters())


def _shortened(made_by: Any, settings: Config) -> tuple[Config, int | None]:
    """Return the settings with `BLOCKS` blocks, and the full number of blocks; None if it has no more."""
    given = made_by.config_class.from_dict(deepcopy(dict(settings))).to_dict()
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
    """Return random inputs of the class's main input."""
    kind = "image" if getattr(module, "main_input_name", "") == "pixel_values" else "tokens"
    try:
        return random_inputs(empty_family("transformers", (kind,)), config, batch=2)
    except KeyError as error:
        raise ArchitectureError(
            f"no inputs can be made for {type(module).__name__}: its configuration has no {error}",
            hint="call transfusion.verification.drafting.propose.propose with your own inputs",
        ) from error
