"""The hashes of the models that an output is made of: taken before it is written, or while they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from blake3 import blake3

from transfusion.files.read_hashes import HashedSection, TensorHash
from transfusion.model.model import Model, take_hashes
from transfusion.runtime.engines import Engine

_ALL = "all"
"""The key of all inputs in one hash."""


class InputDigests:
    """The inputs of an output by their hashes, so that a file of it is kept only with the same inputs."""

    def __init__(self, models: Sequence[Model], engine: Engine, *, while_reading: bool) -> None:
        """Hash all tensors now; or, if tensors are held, ``while_reading`` each of them."""
        self._models, self._engine = [model.original or model for model in models], engine
        self._reading: dict[tuple[int, str], TensorHash] = {}
        if not while_reading:
            self.complete()
            return
        for number, model in enumerate(self._models):
            sections: dict[str, list[HashedSection]] = {}
            for name in model.architecture.tensors:
                found = self._reading[number, name] = _hash(model, name)
                for stored, section in _sections(model, name, found):
                    sections.setdefault(stored, []).append(section)
            model.checkpoint.hash_reads(sections)

    def used(self) -> dict[str, str]:
        """Return the hashes of all tensors that were read since the last call, or one of all inputs."""
        if not self._models:
            return {}
        if not self._reading:
            return {_ALL: self._all()}
        used = [key for key, found in self._reading.items() if found.used]
        self._keep(used)
        return {f"{number} {name}": self._digest(number, name) for number, name in used}

    def same(self, recorded: Mapping[str, str]) -> bool:
        """Whether the inputs have these hashes."""
        known = {
            f"{number} {name}": (number, name)
            for number, model in enumerate(self._models)
            for name in model.architecture.tensors
        }
        return all(
            (key == _ALL and digest == self._all()) or (key in known and digest == self._digest(*known[key]))
            for key, digest in recorded.items()
        )

    def complete(self) -> None:
        """Hash what was not hashed while it was read: all that was not read whole, or in another order."""
        self._keep(self._reading)
        take_hashes(*self._models, engine=self._engine)

    def _keep(self, keys: Iterable[tuple[int, str]]) -> None:
        """Keep the hashes of tensors that were read whole."""
        for number, name in keys:
            found = self._reading[number, name]
            found.used = False
            self._models[number].keep_digest(name, found.digest())
            found.give_up()  # a tensor that was not read whole is hashed now, and not by what follows

    def _digest(self, number: int, name: str) -> str:
        return self._models[number].digest_of(name, checked=False).hex()

    def _all(self) -> str:
        return blake3("".join(model.digest for model in self._models).encode()).hexdigest()


def _hash(model: Model, name: str) -> TensorHash:
    return TensorHash(None if model.has_digest(name) else model.digest_head(name), model.info(name).nbytes)


def _sections(model: Model, name: str, found: TensorHash) -> Iterator[tuple[str, HashedSection]]:
    """Yield the stored tensors that hold a tensor or its pieces, with the bytes there."""
    place = 0
    for piece in model.names[name].names:
        stored, first = model.checkpoint.stored_bytes(piece)
        nbytes = model.checkpoint.tensors[piece].nbytes
        yield stored, HashedSection(found, first, nbytes, place)
        place += nbytes
