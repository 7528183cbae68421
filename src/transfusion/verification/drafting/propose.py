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
from transfusion.errors import ArchitectureError, LayoutError, VerificationError, listing
from transfusion.families import SUFFIX, python_module, read_families
from transfusion.files.publishing import publish_file, require_writable, write_text
from transfusion.files.references import resolve
from transfusion.model.model import input_files
from transfusion.model.recognition import require_sensible
from transfusion.running.building import class_named_in, new_module
from transfusion.running.live_model import LiveModel
from transfusion.running.probes.inputs import in_dtype, random_inputs
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

KINDS = {"pixel_values": "image", "input_features": "spectrogram"}
"""Kinds of inputs other than tokens, by the name of a class's main input."""
OWN = ("build", "make_inputs")
"""What a file with a class of the user's own defines."""


def propose_for(
    reference: str | Path,
    *,
    architecture: str | Path | None = None,
    config: Path | None = None,
    output: Path | None = None,
    force: bool = False,
) -> ProposedTable:
    """Draft and certify a table for the class that a model's config.json names, or that a file defines.

    Args:
        reference: The folder or file of a model, or a hub id. Its weights are not read.
        architecture: A file of Python with a class of your own. It defines ``build(config)``, and
            ``make_inputs(config, count, generator)`` unless the inputs are ids of a ``vocab_size``.
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
    file = config or (root / "config.json" if root.is_dir() else root.parent / "config.json")
    if not file.exists():
        raise ArchitectureError(
            f"{reference}: there is no config.json to make a draft from",
            hint="put the model's config.json beside the weights, or give it as `config`",
        )
    settings = read_json(file if config else path_inside(file.parent, file))
    require_sensible(settings, str(file))
    source = file if architecture is None else Path(architecture)
    family = _library_class(settings, file) if architecture is None else _own_class(source)
    family = replace(family, name=require_word(settings.get("model_type") or family.name))
    proposal = _propose(family, settings, file, source).require()
    if output is not None:
        publish_file(output, lambda staged: write_text(staged, proposal.text), force=force)
    return proposal


def _library_class(settings: Config, file: Path) -> Family:
    """Return a family without a table, for the class of transformers that a config.json names."""
    name = class_named_in(settings, str(file))
    if name is None:
        raise ArchitectureError(
            f"{file}: it names no class",
            hint="add 'architectures' to config.json; or give a file with build(config) as `architecture`",
        )
    return replace(empty_family("transformers"), name=name.lower())


def _own_class(file: Path) -> Family:
    """Return a family without a table, for the class of a file of the user's own, which is run."""
    defined = {} if file.suffix == SUFFIX else vars(python_module(file.resolve()))
    if "build" not in defined:
        raise ArchitectureError(
            f"{file}: it defines no build, which returns the module to make a draft from",
            hint="give a file of Python with build(config), as examples/small_translator.py has it",
        )
    own = {name: defined[name] for name in OWN if name in defined}
    return replace(empty_family("mine"), name=file.stem, **own)


def _propose(family: Family, settings: Config, file: Path, source: Path) -> ProposedTable:
    label = f"{source}" if source == file else f"{source} with {file}"
    for key, depth in settings.items():
        if counts_blocks(key, depth) and depth > MOST:
            raise ArchitectureError(
                f"{file}: {key} = {depth}, and at most {MOST} blocks are allowed",
                hint="give the configuration of a model with fewer blocks; the table is the same",
            )
    short, depths = _shortened(family, settings, label)
    if (parameters := _count(_outline(family, short, label))) > HUGE:
        raise ArchitectureError(
            f"{file}: {BLOCKS} blocks of this model have {parameters} parameters; at most {HUGE} are allowed",
            hint="give the configuration of a smaller model; the table is the same",
        )
    small = new_module(family, deepcopy(dict(short)), label)
    config = _config_of(small, short)
    inputs = _inputs(family, small, config, source)
    proposal = propose(small, config, family.name, inputs).require()
    own = {name: getattr(family, name) for name in OWN}
    proposal = replace(proposal, family=replace(proposal.family, **own))
    if not depths:
        return proposal
    blocks = " + ".join(map(str, depths))
    if _count(_outline(family, settings, label)) > LARGE:
        return replace(proposal, certified_on=f"{BLOCKS} of {blocks} blocks, because the model is large")
    whole = new_module(family, deepcopy(dict(settings)), label)
    live = _bound(drawn(whole, seed=1), proposal.family, _config_of(whole, settings), inputs)
    return replace(proposal, certificate=certify(live), certified_on=f"all {blocks} blocks")


def _outline(family: Family, settings: Config, label: str) -> nn.Module:
    """Return a model whose parameters have no values; with values, if the user's own code needs them."""
    try:
        with torch.device("meta"):
            return new_module(family, deepcopy(dict(settings)), label)
    except ArchitectureError:
        if family.build is None:
            raise
        return new_module(family, deepcopy(dict(settings)), label)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _config_of(module: Any, settings: Config) -> Config:
    """Return all settings of a model: a library's class adds those that a file leaves out."""
    config: Config = module.config.to_dict() if hasattr(module, "base_model_prefix") else settings
    return config


def _shortened(family: Family, settings: Config, label: str) -> tuple[Config, list[int]]:
    """Return the settings with `BLOCKS` blocks in every stack, and the numbers of blocks that were more."""
    module = _outline(family, settings, label)
    given, tensors = _config_of(module, settings), len(list(module.parameters()))
    short, depths = settings, []
    for key, depth in given.items():
        if not counts_blocks(key, depth) or depth <= BLOCKS:
            continue
        lists = {name: v[:BLOCKS] for name, v in given.items() if isinstance(v, list) and len(v) == depth}
        tried = {**short, key: BLOCKS, **lists}
        if (fewer := len(list(_outline(family, tried, label).parameters()))) < tensors:
            short, tensors = tried, fewer
            depths.append(depth)
    return short, depths


def _inputs(family: Family, module: Any, config: Config, source: Path) -> dict[str, Tensor]:
    """Return random inputs: those of the user's own function, or of the class's main input."""
    if family.build is not None and family.make_inputs is None and "vocab_size" not in config:
        raise ArchitectureError(
            f"{source}: it defines no make_inputs, and config.json has no vocab_size to draw ids from",
            hint="add make_inputs(config, count, generator), which returns the tensors of forward by name, as"
            " in examples/small_translator.py",
        )
    kind = KINDS.get(getattr(module, "main_input_name", ""), "tokens")
    inputs = random_inputs(replace(family, inputs=(kind,)), config, batch=2)
    return in_dtype(inputs, torch.float64)


# ── proposals ────────────────────────────────────────────────────────────────────────────────


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

    def use(self, file: Path) -> str:
        """Return the lines of Python that use the draft of a class in a file; none for a library's class."""
        if self.family.build is None:
            return ""
        own = [name for name in OWN if getattr(self.family, name) is not None]
        given = "".join(f", {name}={name}" for name in own)
        text = f"Path({str(file)!r}).read_text(encoding='utf-8')"
        return (
            "from pathlib import Path\nfrom transfusion.families import read_families\n"
            f"FAMILIES = read_families({text}, {str(file)!r}{given})"
        )

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
        whole = drawn(module, seed=1) if trials.split() else trials.module
        live = _bound(whole, family, config, inputs)
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
