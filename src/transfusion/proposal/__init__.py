"""Proposals: a table drafted for a model by trials on it, and certified before anyone sees it.

The model is run with dimensions of its tensors permuted, and what comes out says which of them belong to
one axis. Nothing here knows a family.
"""

from transfusion.proposal.folders import propose_for
from transfusion.proposal.proposing import Proposal, propose

__all__ = ["Proposal", "propose", "propose_for"]
