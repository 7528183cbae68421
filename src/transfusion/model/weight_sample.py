"""A sample of a model's weights: quickly read, and another one for other weights."""

from __future__ import annotations

from blake3 import blake3

from transfusion.files.tensor_content import content
from transfusion.model.model import Model

_TENSORS, _BYTES = 64, 4096
"""The most tensors in a sample, and the bytes of each. Files of π hold hashes of such samples."""


def weight_sample(model: Model) -> str:
    """Return the BLAKE3 hash of the first bytes of some tensors, however they are stored."""
    model = model.original or model
    total, names = blake3(), sorted(model.architecture.tensors)
    for name in names[:: -(-len(names) // _TENSORS)]:
        total.update(name.encode() + model.digest_head(name) + _first_bytes(model, name))
    return total.hexdigest()


def _first_bytes(model: Model, name: str) -> bytes:
    found = b""
    for piece in model.names[name].names:
        for block in model.checkpoint.blocks(piece):
            found += content(block)[: _BYTES - len(found)]
            if len(found) == _BYTES:
                return found
    return found
