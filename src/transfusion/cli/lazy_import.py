"""Import libraries without searching for garbage meanwhile.

Importing torch makes half a million objects that stay. Python's garbage collector looks through them again
and again, while they are made and at the end of the program: a third of the time of importing torch.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import transfusion


@contextmanager
def without_collection() -> Iterator[None]:
    """Stop the garbage collector for the ``with`` block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def load_library(verb: str) -> None:
    """Import torch and the function of a verb, once; the collector passes over what was imported."""
    if "torch" in sys.modules:
        return
    with without_collection():
        if verb in transfusion.__all__:
            getattr(transfusion, verb)
        gc.freeze()
