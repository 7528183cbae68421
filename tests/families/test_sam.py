"""SAM answers with three masks, or with one: both are certified."""

from __future__ import annotations

from dataclasses import replace

from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel
from transfusion.verification.certify import certify


def test_the_only_mask_stays_the_same_too(made):
    live = LiveModel.of(Model.open(made("sam")))
    three = live.outputs()["pred_masks"]
    arrange = live.family.arrange
    one = replace(live.family, arrange=lambda *given: {**arrange(*given), "multimask_output": False})
    live = replace(live, family=one)
    assert (three.shape[2], live.outputs()["pred_masks"].shape[2]) == (3, 1)
    # Units that only the other masks have do not show here, so only what must not change is asked for.
    failures = [check for check in certify(live).failures if not check.should_change]
    assert not failures, failures
