"""The benchmark of functional alignment measures: it reads what `align` prints, on a small model."""

from __future__ import annotations

import pytest
import transformers

from functional.__main__ import kept_limits, measure
from functional.models import SUBJECTS, Subject, _drawn


@pytest.mark.slow
def test_a_run_is_measured_with_and_without_a_limit(tmp_path, monkeypatch):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=16)

    def small(folder, name):
        return _drawn(folder, "small", transformers.ViTForImageClassification, config)

    monkeypatch.setitem(SUBJECTS, "small", Subject("small", small, "800MB"))
    found = [measure("small", tmp_path, limit) for limit in ("", "800MB")]
    assert all(one.peak > 0 and one.floor > 0 and one.planned > 0 for one in found)
    assert kept_limits(found) == [], "the limit is kept, and π is the same"
