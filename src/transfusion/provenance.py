"""Provenance: where an alignment comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transfusion import __version__
from transfusion.architecture import Heads, Inner, Policy, Residual


@dataclass(frozen=True)
class Provenance:
    """Where an alignment comes from: enough to trust it, or to refuse it."""

    family: str
    architecture: str
    """Digest of the architecture under the policy below."""
    policy: Policy
    method: str
    options: Mapping[str, Any]
    seed: int
    source: str
    """A, as the user wrote it."""
    source_digest: str
    target: str
    """B, as the user wrote it."""
    target_digest: str
    objective: tuple[float, ...] = ()
    """The inner product of π(A) and B: at the start, and after each sweep."""
    advice: Mapping[str, Any] = field(default_factory=dict)
    """Whether aligning these two models makes sense, with the numbers behind it; empty if not asked."""
    gap: float = 0.0
    """The largest share by which a better assignment of any one axis may exist, given all others: a bound
    from prices. Small axes are assigned exactly."""
    version: str = __version__
    run: Mapping[str, Any] = field(default_factory=dict)
    """How long it took and on what, if somebody looked."""

    @classmethod
    def recalled(cls, told: Mapping[str, Any]) -> Provenance:
        """What a file tells."""
        asked = told["policy"]
        policy = Policy(Residual(asked["residual"]), Inner(asked["inner"]), Heads(asked["heads"]))
        return cls(**{**told, "policy": policy, "objective": tuple(told["objective"])})
