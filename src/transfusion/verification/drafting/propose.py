"""Proposing: from a live module to a certified draft, whose text is written and never run here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from transfusion.architecture.table import Config, Family, Table
from transfusion.errors import ArchitectureError, LayoutError, VerificationError, listing
from transfusion.live.live_model import LiveModel
from transfusion.verification.certification import Certificate, certify, free_axes
from transfusion.verification.drafting.analysis import analyse
from transfusion.verification.drafting.declarations import declare
from transfusion.verification.drafting.draft import draft
from transfusion.verification.drafting.draft_family import family_of
from transfusion.verification.drafting.draft_source import write
from transfusion.verification.drafting.probe_model import ProbeModel, drawn


@dataclass(frozen=True)
class ProposedTable:
    """A drafted table: as an object, as a file, and with what certification found."""

    family: Family
    table: Table
    text: str
    """A file for ``--architecture``."""
    certificate: Certificate
    lost: tuple[str, ...] = ()
    """Tensors that were not understood."""
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """What the model was fed."""
    certified_on: str = "the model as given"

    @property
    def passed(self) -> bool:
        return self.certificate.passed and not self.lost

    def require(self) -> ProposedTable:
        """The proposal itself, if all of it was understood and certified."""
        checks, failures = self.certificate.checks, self.certificate.failures
        said = f"{len(failures)} of {len(checks)} checks failed: {listing(failures)}"
        if self.lost:
            raise VerificationError(
                f"{len(self.lost)} tensor(s) were not understood: {listing(self.lost)}"
                + (f"; {said}" if failures else ""),
                hint="no layout that was tried leaves the outputs as they are; write a table by hand, as"
                " docs/your-own.md shows",
            )
        if failures:
            raise VerificationError(
                f"the draft does not tell the truth about the model: {said}",
                hint="write a table by hand, as docs/your-own.md shows",
            )
        return self

    def certified(self, module: nn.Module, config: Config, on: str) -> ProposedTable:
        """The same draft, certified on another module of its class."""
        live = _bound(drawn(module, seed=1), self.family, config, self.inputs)
        return replace(self, certificate=_certificate(live), certified_on=on)


def propose(
    module: nn.Module, config: Config, family_name: str, inputs: Mapping[str, Tensor]
) -> ProposedTable:
    """A table for a live module, drafted from its tensors' names and shapes, the head counts in its
    configuration and numerical trials on ``inputs``, and certified on the same module.
    """
    library = "transformers" if hasattr(module, "base_model_prefix") else "mine"
    with torch.no_grad():
        probe = ProbeModel(module, library, inputs)
        base = f"{getattr(module, 'base_model_prefix', '')}."
        prefix = base if base != "." and any(name.startswith(base) for name in probe.parameters) else ""
        drafted = draft(analyse(probe, config), config, prefix)
        said = declare(drafted, family_name, type(module).__name__, library, config, inputs)
        family = family_of(drafted, said)
        live = _bound(probe.module, family, config, inputs)
        certificate = _certificate(live)
    table = family.table(config, frozenset(live.architecture.tensors))
    return ProposedTable(family, table, write(drafted, said), certificate, tuple(drafted.lost), inputs)


def _bound(module: nn.Module, family: Family, config: Config, inputs: Mapping[str, Tensor]) -> LiveModel:
    try:
        return replace(LiveModel.from_module(module, family, config), inputs=inputs)
    except (ArchitectureError, LayoutError) as error:
        raise VerificationError(
            f"the draft does not fit the model it was made for: {error.message}",
            hint="write a table by hand, as docs/your-own.md shows",
        ) from error


def _certificate(live: LiveModel) -> Certificate:
    certificate = certify(live)
    if certificate.passed:
        return certificate
    broken = (check for check in free_axes(live) if not check.passed)
    return Certificate((*certificate.checks, *broken))
