"""Proposed tables: from a live module, or the class that a config.json names, to a certified draft."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transfusion.architecture.table import Config, Family, Table
from transfusion.errors import ArchitectureError, LayoutError, TransfusionError, VerificationError, listing
from transfusion.families import SUFFIX, read_families
from transfusion.files.publishing import publish_file, require_writable, write_text
from transfusion.files.references import resolve
from transfusion.model.model import input_files
from transfusion.model.recognition import require_sensible
from transfusion.running.building import class_named_in, class_of_transformers
from transfusion.running.live_model import LiveModel
from transfusion.running.probes.inputs import random_inputs
from transfusion.runtime.untrusted_files import path_inside, read_json
from transfusion.verification.certify import Certificate, certify
from transfusion.verification.drafting.analysis import Analysis
from transfusion.verification.drafting.table import Draft, counts_blocks, require_word
from transfusion.verification.drafting.trials import Trials, drawn, empty_family

BLOCKS = 2
"""The number of blocks of the model that is analysed."""
LARGE = 300_000_000
"""A model with more parameters is certified with `BLOCKS` blocks instead of all."""
HUGE = 4_000_000_000
"""A model with more parameters in `BLOCKS` blocks is refused."""
MOST = 1000
"""A model with more blocks is refused."""


def propose_for(
    reference: str | Path, *, config: Path | None = None, output: Path | None = None, force: bool = False
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
        if output.suffix != SUFFIX:
            raise ArchitectureError(
                f"{output}: a draft is a text whose name ends in {SUFFIX}",
                hint=f"give {output.with_suffix(SUFFIX)}, which `architecture` reads",
            )
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
    for key, depth in settings.items():
        if counts_blocks(key, depth) and depth > MOST:
            raise ArchitectureError(
                f"{file}: {key} = {depth}, and at most {MOST} blocks are allowed",
                hint="give the configuration of a model with fewer blocks; the table is the same",
            )
    try:
        short, depth = _shortened(made_by, settings)
        if (parameters := _parameters(made_by, short)) > HUGE:
            raise ArchitectureError(
                f"{file}: {BLOCKS} blocks of this model have {parameters} parameters; at most {HUGE} are"
                " allowed",
                hint="give the configuration of a smaller model; the table is the same",
            )
        small = _made(made_by, short)
        inputs = _inputs(small)
    except TransfusionError:
        raise
    except Exception as error:  # of any type: classes raise what they like
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ArchitectureError(
            f"{file}: transformers cannot build a {class_name} from it ({reason[0]:.200})",
            hint="download the model's own config.json",
        ) from error
    proposal = propose(small, small.config.to_dict(), name, inputs).require()
    if depth is None:
        return proposal
    if _parameters(made_by, settings) > LARGE:
        return replace(proposal, certified_on=f"{BLOCKS} of {depth} blocks, because the model is large")
    whole = _made(made_by, settings)
    live = _bound(drawn(whole, seed=1), proposal.family, whole.config.to_dict(), inputs)
    return replace(proposal, certificate=certify(live), certified_on=f"all {depth} blocks")


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


def _inputs(module: Any) -> dict[str, Tensor]:
    """Return random inputs of the class's main input."""
    kind = "image" if getattr(module, "main_input_name", "") == "pixel_values" else "tokens"
    try:
        return random_inputs(empty_family("transformers", (kind,)), module.config.to_dict(), batch=2)
    except KeyError as error:
        raise ArchitectureError(
            f"no inputs can be made for {type(module).__name__}: its configuration has no {error}",
            hint="call transfusion.verification.drafting.propose.propose with your own inputs",
        ) from error


@dataclass(frozen=True)
class ProposedTable:
    """A drafted table: as a family, as text, and with its certificate."""

    family: Family
    table: Table
    text: str
    """The text, for ``--architecture``."""
    certificate: Certificate
    lost: tuple[str, ...] = ()
    """Tensors whose layout was not found."""
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """The inputs that the model was run on."""
    certified_on: str = "the model as given"

    @property
    def passed(self) -> bool:
        return self.certificate.passed and not self.lost

    def require(self) -> ProposedTable:
        """Return the proposal; refuse one with missing layouts or failed tests."""
        checks, failures = self.certificate.checks, self.certificate.failures
        failed = f"{len(failures)} of {len(checks)} checks failed: {listing(failures)}"
        if self.lost:
            raise VerificationError(
                f"{len(self.lost)} tensor(s) were not understood: {listing(self.lost)}"
                + (f"; {failed}" if failures else ""),
                hint="every layout that was tried changes the outputs; write a table by hand, as"
                " docs/your-own.md shows",
            )
        if failures:
            raise VerificationError(
                f"the draft is wrong about the model: {failed}",
                hint="write a table by hand, as docs/your-own.md shows",
            )
        return self


def propose(
    module: nn.Module, config: Config, family_name: str, inputs: Mapping[str, Tensor]
) -> ProposedTable:
    """Draft a table for a live module by trials, and certify it on the module.

    Args:
        module: The module. Only the names and shapes of its parameters count; trials use random values.
        config: Its configuration; head counts are taken from it.
        family_name: The name of the new family.
        inputs: Inputs of its forward, by name.

    >>> model = transformers.ViTForImageClassification.from_pretrained("models/a")
    >>> images = {"pixel_values": torch.randn(2, 3, 12, 12, dtype=torch.float64)}
    >>> proposed = propose(model, model.config.to_dict(), "my-vit", images)
    >>> proposed.passed, proposed.family.name
    (True, 'my-vit')
    """
    library = "transformers" if hasattr(module, "base_model_prefix") else "mine"
    with torch.no_grad():
        trials = Trials(module, library, inputs)
        base = f"{getattr(module, 'base_model_prefix', '')}."
        prefix = base if base != "." and any(name.startswith(base) for name in trials.parameters) else ""
        found = Analysis(trials, config)
        draft = Draft(found, config, prefix)
        text = draft.text(require_word(family_name), type(module).__name__, library, inputs)
        (family,) = read_families(text, f"the draft of {family_name}")
        live = _bound(trials.module, family, config, inputs)
        certificate = certify(live)
    table = family.table(config, frozenset(live.architecture.tensors))
    return ProposedTable(family, table, text, certificate, tuple(found.lost), inputs)


def _bound(module: nn.Module, family: Family, config: Config, inputs: Mapping[str, Tensor]) -> LiveModel:
    try:
        return replace(LiveModel.from_module(module, family, config), inputs=inputs)
    except (ArchitectureError, LayoutError) as error:
        raise VerificationError(
            f"the draft does not fit the model it was made for: {error.message}",
            hint="write a table by hand, as docs/your-own.md shows",
        ) from error
