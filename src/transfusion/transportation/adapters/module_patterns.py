"""Patterns: regular expressions from an adapter's configuration, which nobody vouches for, within limits."""

from __future__ import annotations

import re
from functools import lru_cache
from time import process_time
from typing import Any

import regex

from transfusion.errors import AdapterError

LONGEST = 1_000
"""A pattern of more characters is refused."""
MOST = 10_000
"""A table of more patterns is refused."""
SECONDS = 2.0
"""So much time all patterns of a table have together; ordinary ones take microseconds each."""

_HINT = "write the name of the module, or its end, in adapter_config.json"


class ModulePatterns:
    """The patterns of a table, in their order; each is met by names that it ends."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        if len(texts) > MOST:
            raise AdapterError(f"{len(texts)} patterns, and at most {MOST} are tried", hint=_HINT)
        self._compiled = {text: _compiled(text) for text in texts}
        self._left = SECONDS

    def first(self, name: str) -> str | None:
        """The first pattern that a name meets."""
        return next((text for text, one in self._compiled.items() if self._meets(name, text, one)), None)

    def _meets(self, name: str, text: str, pattern: Any) -> bool:
        start = process_time()
        try:
            return pattern.match(name, timeout=max(self._left, 0.01)) is not None
        except TimeoutError as error:
            raise AdapterError(
                f"the pattern {_shown(text)} takes too long to be tried on {name}", hint=_HINT
            ) from error
        finally:
            self._left -= process_time() - start


@lru_cache(maxsize=16)
def patterns(texts: tuple[str, ...]) -> ModulePatterns:
    """The patterns, made ready once."""
    return ModulePatterns(texts)


def _compiled(text: str) -> Any:
    """A pattern as PEFT means it: what it describes ends the name of a module."""
    if len(text) > LONGEST:
        raise AdapterError(
            f"the pattern {_shown(text)} has {len(text)} characters, and at most {LONGEST} are tried",
            hint=_HINT,
        )
    try:
        re.compile(text)  # PEFT's dialect; the other one knows more
        return regex.compile(rf"(.*\.)?({text})$")
    except (re.error, regex.error, RecursionError, OverflowError, ValueError) as error:
        raise AdapterError(
            f"the pattern {_shown(text)} is no regular expression ({str(error).splitlines()[0]})", hint=_HINT
        ) from error


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}…")
