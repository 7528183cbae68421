"""Trials of language models that others trained."""

from __future__ import annotations

from zoo.trials import Trial

TRIALS: tuple[Trial, ...] = ()
