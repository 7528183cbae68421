"""Sizes of memory and files as text: parse "2GB", format 2.00 GB."""

from __future__ import annotations

import re
from math import isfinite

from transfusion.errors import SettingError

_LETTERS = "kmgt"
_UNITS = {
    "b": 1,
    **{f"{letter}b": 1000 ** (power + 1) for power, letter in enumerate(_LETTERS)},
    **{f"{letter}ib": 1024 ** (power + 1) for power, letter in enumerate(_LETTERS)},
}


def parse_bytes(text: str) -> int:
    """Return the number of bytes that a text such as "2GB" names.

    >>> parse_bytes("2GB"), parse_bytes("1.5 GiB"), parse_bytes("512mb")
    (2000000000, 1610612736, 512000000)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text, re.ASCII)
    unit = _UNITS.get(found[2].lower()) if found else None
    count = float(found[1]) * unit if found and unit else 0.0
    if not isfinite(count) or count < 1:
        raise SettingError(
            f"{text!r} is not a size", hint="give a number and a unit, such as 512MB, 2GB or 1.5GiB"
        )
    return int(count)


def format_bytes(count: float) -> str:
    """Return a number of bytes as text.

    >>> format_bytes(12), format_bytes(2_500_000), format_bytes(3e9)
    ('12 bytes', '2.5 MB', '3.00 GB')
    """
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def at_least(count: int) -> str:
    """Return a number of bytes as text, rounded up.

    >>> at_least(337_650_000), at_least(2_001_000_000)
    ('338.0 MB', '2.01 GB')
    """
    digit = 10**6 if count < 999 * 10**6 else 10**7
    return format_bytes(-(-count // digit) * digit)
