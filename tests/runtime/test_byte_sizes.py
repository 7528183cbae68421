"""Sizes as people write them."""

from __future__ import annotations

import pytest

from transfusion.errors import SettingError
from transfusion.runtime.resources import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1B", 1),
        ("7kB", 7_000),
        ("512MB", 512_000_000),
        ("2GB", 2_000_000_000),
        ("2 gb", 2_000_000_000),
        (" 1.5GiB ", 1_610_612_736),
        ("3KiB", 3_072),
        ("64MiB", 67_108_864),
        ("1TB", 10**12),
        ("1TiB", 2**40),
    ],
)
def test_decimal_and_binary_units(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "2", "GB", "-2GB", "2 G B", "2XB", "0GB", "0.1B", "1e3MB", "two GB", "2GB!", "٢GB", "inf GB"]
)
def test_what_is_no_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(SettingError, match="is not a size\nhint: .* 512MB, 2GB or 1.5GiB") as refused:
        parse_bytes(text)
    assert refused.value.exit_code == 2  # wrong usage


def test_a_number_too_long_to_be_a_size_is_refused() -> None:
    with pytest.raises(SettingError, match="is not a size"):
        parse_bytes("9" * 400 + "GB")


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (2e6, "2.0 MB"), (3e12, "3000.00 GB")],
)
def test_sizes_in_words(count: float, words: str) -> None:
    assert format_bytes(count) == words
