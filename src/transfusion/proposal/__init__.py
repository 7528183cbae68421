"""Proposals: a table drafted for a model by trials on it, and certified before anyone sees it.

The model is run with dimensions of its tensors permuted, and what comes out says which of them belong to
one axis. Nothing here knows a family. What is certified is the text of the draft, run as a file would be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from transfusion.certification import Certificate, certify, free_axes
from transfusion.errors import VerificationError, listing
from transfusion.live import Live
from transfusion.proposal.drafting import draft
from transfusion.proposal.laboratory import Laboratory
from transfusion.proposal.survey import survey
from transfusion.proposal.writing import write
from transfusion.tables import Config, Family, Table

__all__ = ["Proposal", "propose"]


@dataclass(frozen=True)
class Proposal:
    """A drafted table: as an object, as a file, and with what certification found."""

    family: Family
    table: Table
    text: str
    """A file for ``--architecture``."""
    certificate: Certificate
    lost: tuple[str, ...] = ()
    """Tensors that were not understood."""

    @property
    def passed(self) -> bool:
        return self.certificate.passed and not self.lost

    def require(self) -> Proposal:
        """This proposal, if all of it was understood and certified."""
        if self.lost:
            raise VerificationError(
                f"{len(self.lost)} tensor(s) were not understood: {listing(self.lost)}",
                hint="no layout that was tried leaves the outputs as they are; write their rows by hand",
            )
        if not self.certificate.passed:
            failures = self.certificate.failures
            raise VerificationError(
                f"the draft is not certified: {len(failures)} of {len(self.certificate.checks)} checks failed",
                hint="; ".join(map(str, failures)),
            )
        return self


def propose(module: nn.Module, config: Config, family_name: str, inputs: Mapping[str, Tensor]) -> Proposal:
    """Draft a table for a live module from its tensors' names and shapes, the head counts in its
    configuration and numerical trials on ``inputs``; and certify it on the same module.
    """
    library = "transformers" if hasattr(module, "base_model_prefix") else "mine"
    with torch.no_grad():
        lab = Laboratory(module, library, inputs)
        base = f"{getattr(module, 'base_model_prefix', '')}."
        prefix = base if base != "." and any(name.startswith(base) for name in lab.parameters) else ""
        found = survey(lab, config)
        drafted = draft(found, config, prefix)
        text = write(drafted, family_name, type(module).__name__, library, config, inputs)
        space: dict[str, object] = {"__name__": family_name}
        exec(compile(text, f"<draft of {family_name}>", "exec"), space)
        (family,) = space["FAMILIES"]  # type: ignore[misc]
        live = replace(Live.from_module(lab.module, family, config), inputs=inputs)
        certificate = certify(live)
        if not certificate.passed:
            broken = (check for check in free_axes(live) if not check.passed)
            certificate = Certificate((*certificate.checks, *broken))
        table = family.table(config, frozenset(live.architecture.tensors))
    return Proposal(family, table, text, certificate, tuple(drafted.lost))
