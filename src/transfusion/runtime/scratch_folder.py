"""A temporary folder for large files: in memory where there is plenty of it, on disk otherwise."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IN_MEMORY = Path("/dev/shm")
"""A file system in memory, on Linux."""
SPARE = 4
"""The files may take this part of the free memory at the most: one in so many."""


@contextmanager
def scratch_folder(nbytes: int, *, on_disk: bool) -> Iterator[Path]:
    """Within the block there is a folder for files of about ``nbytes``.

    ``on_disk`` keeps them out of memory, in the folder that TMPDIR names: where memory is limited, and where
    workers in other processes or on other machines read them.
    """
    place = IN_MEMORY if not on_disk and _fits(nbytes) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


def _fits(nbytes: int) -> bool:
    if "TMPDIR" in os.environ or not os.access(IN_MEMORY, os.W_OK):
        return False
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return SPARE * nbytes < free and nbytes < shutil.disk_usage(IN_MEMORY).free
