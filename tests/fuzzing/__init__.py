"""A fuzzer: files from outside, malformed in every way that is known, through the real command line.

A case is named by its format and its number, and is the same wherever it is made. ``python -m fuzzing FORMAT
NUMBER`` (with ``PYTHONPATH=tests``) runs one again and shows all of it. Numbers below `MUTANTS` are cases made by
hand; those from there on are random changes of valid files, drawn from a generator that the number seeds.
"""

from __future__ import annotations

from fuzzing.cases import MUTANTS, Case, Command, Place
from fuzzing.formats import FORMATS, cases
from fuzzing.running import LIMIT, Outcome, Runner

__all__ = ["FORMATS", "LIMIT", "MUTANTS", "Case", "Command", "Outcome", "Place", "Runner", "cases"]
