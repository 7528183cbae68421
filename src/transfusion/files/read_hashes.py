"""Hashes of tensors, taken from their bytes while these are read for something else."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from blake3 import blake3

_WAITING = 2**24
"""The bytes of one tensor that are kept until those before them have been read."""


class TensorHash:
    """The hash of one tensor from pieces of its bytes, which threads read in about the order of the file.

    A tensor that is read in quite another order, or in part, gets no hash.
    """

    def __init__(self, head: bytes | None, nbytes: int) -> None:
        """Begin with a ``head`` before the bytes; without one, only note whether any are read."""
        self.used = False
        """Whether any of its bytes were read."""
        self._hash, self._nbytes = blake3(head or b""), nbytes
        self._next, self._waiting = 0, dict[int, tuple[memoryview, int]]()
        """The next byte to hash; pieces by their first byte, with the bytes that are kept for each."""
        self._lock, self._hashing, self._unwanted = threading.Lock(), False, head is None

    def update(self, start: int, piece: memoryview, *, held: bool = False) -> None:
        """Hash a piece, or keep it until those before it have come; one that came before is passed over.

        A ``held`` piece stays in memory anyhow, and is not counted as kept.
        """
        with self._lock:
            if start < self._next or self._unwanted:
                return
            self._waiting[start] = piece, 0 if held else len(piece)
            if not held and sum(kept for _, kept in self._waiting.values()) > _WAITING:
                self._unwanted, self._waiting = True, {}
            if self._hashing:
                return  # another thread does, and goes on with this piece
            self._hashing = True
        while (following := self._following()) is not None:
            self._hash.update(following)

    def _following(self) -> memoryview | None:
        with self._lock:
            piece, _ = self._waiting.pop(self._next, (None, 0))
            self._hashing = piece is not None
            self._next += 0 if piece is None else len(piece)
            return piece

    def give_up(self) -> None:
        """Keep and hash no more pieces."""
        with self._lock:
            self._unwanted, self._waiting = True, {}

    def digest(self) -> bytes | None:
        """Return the hash, if all bytes have come."""
        complete = self._next == self._nbytes and not self._unwanted
        return self._hash.digest() if complete else None


@dataclass(frozen=True)
class HashedSection:
    """Some bytes of a stored tensor that are bytes of a tensor to be hashed, and where they are there."""

    hash: TensorHash
    first: int
    """The first byte in the stored tensor."""
    nbytes: int
    place: int = 0
    """The first byte in the tensor that is hashed."""

    def update(self, start: int, piece: memoryview, *, held: bool = False) -> None:
        """Hash those bytes of a piece that belong to this section."""
        first, last = max(start, self.first), min(start + len(piece), self.first + self.nbytes)
        if first < last:
            place = self.place + first - self.first
            self.hash.update(place, piece[first - start : last - start], held=held)
