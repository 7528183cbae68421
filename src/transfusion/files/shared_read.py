"""Reading a whole tensor on several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from transfusion.files.read_hashes import HashedSection
from transfusion.files.tensor_content import content
from transfusion.files.tensor_files import CHUNK, TensorInfo, open_tensor


class SharedRead:
    """Reads a tensor into memory and hashes it on the way; every thread that needs the tensor takes part."""

    def __init__(self, info: TensorInfo, into: Tensor, sections: Sequence[HashedSection] = ()) -> None:
        self._info, self._bytes, self._sections = info, content(into), sections
        self._starts = iter(range(0, info.nbytes, CHUNK))
        self._left = -(-info.nbytes // CHUNK)
        self._error: BaseException | None = None
        self._lock, self._done = threading.Lock(), threading.Event()
        if not self._left:
            self._done.set()

    def join(self) -> None:
        """Read blocks until none is left; return when other threads have read theirs as well."""
        if not self._done.is_set():
            try:
                self._read_blocks()
            except BaseException as error:
                self._error = error
                self._done.set()
                raise
            self._done.wait()
        if self._error is not None:
            raise self._error

    def _read_blocks(self) -> None:
        with open_tensor(self._info) as reader:
            while (start := self._next()) is not None:
                block = self._bytes[start : start + CHUNK]
                reader.read_into(block, start)
                self._count()
                for section in self._sections:
                    section.update(start, block, held=True)

    def _next(self) -> int | None:
        with self._lock:
            return next(self._starts, None)

    def _count(self) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                self._done.set()
