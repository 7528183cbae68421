"""Proposed tables: from a live module to a certified draft. Its source is written and never run here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from transfusion.architecture.table import Config, Family, Table
from transfusion.errors import ArchitectureError, LayoutError, VerificationError, listing
from transfusion.running.live_model import LiveModel
from transfusion.verification.certify import Certificate, certify
from transfusion.verification.drafting.analysis import analyse
from transfusion.verification.drafting.declarations import declare
from transfusion.verification.drafting.draft import draft
from transfusion.verification.drafting.draft_family import family_of
from transfusion.verification.drafting.draft_source import write
from transfusion.verification.drafting.probe_model import ProbeModel, drawn


@dataclass(frozen=True)
class ProposedTable:
    """A drafted table: as a family, as source, and with its certificate."""

    family: Family
    table: Table
    text: str
    """The source, for ``--architecture``."""
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

    def certified(self, module: nn.Module, config: Config, on: str) -> ProposedTable:
        """Return the draft with the certificate of another module of its class."""
        live = _bound(drawn(module, seed=1), self.family, config, self.inputs)
        return replace(self, certificate=certify(live), certified_on=on)


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
        probe = ProbeModel(module, library, inputs)
        base = f"{getattr(module, 'base_model_prefix', '')}."
        prefix = base if base != "." and any(name.startswith(base) for name in probe.parameters) else ""
        drafted = draft(analyse(probe, config), config, prefix)
        declaration = declare(drafted, family_name, type(module).__name__, library, config, inputs)
        family = family_of(drafted, declaration)
        live = _bound(probe.module, family, config, inputs)
        certificate = certify(live)
    table = family.table(config, frozenset(live.architecture.tensors))
    text = write(drafted, declaration)
    return ProposedTable(family, table, text, certificate, tuple(drafted.lost), inputs)


def _bound(module: nn.Module, family: Family, config: Config, inputs: Mapping[str, Tensor]) -> LiveModel:
    try:
        return replace(LiveModel.from_module(module, family, config), inputs=inputs)
    except (ArchitectureError, LayoutError) as error:
        raise VerificationError(
            f"the draft does not fit the model it was made for: {error.message}",
            hint="write a table by hand, as docs/your-own.md shows",
        ) from error
