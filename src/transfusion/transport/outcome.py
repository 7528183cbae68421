"""What users want to know at the end of a run: what arrived, what it cost B, and how to load the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from shlex import quote
from statistics import fmean
from typing import Any

from transfusion.transport.refinement.settings import CHANGE

NOT_YOURS = "on inputs that are not your task's"
_WHOLE = {
    "same lineage": "the whole change, as it is",
    "alignable": "the whole change, moved to where A's units are in B",
}
_OWN, OUTPUTS = "own", "outputs like the fine-tune's"


@dataclass(frozen=True)
class Outcome:
    """The three sentences that a run ends with."""

    arrived: str
    cost: str
    load: str

    def rows(self) -> list[tuple[str, str]]:
        """Return them with their titles."""
        return [("arrived", self.arrived), ("cost to B", self.cost), ("load it", self.load)]


LITTLE = 0.1
"""The agreement, or the cosine, below which hardly anything has arrived."""


def outcome_of(metadata: Mapping[str, Any], place: str) -> Outcome:
    """Return what a run brought, from its record; ``place`` is where the output is."""
    if (refined := metadata.get("refinement")) is not None:
        arrived, cost = _of_refinement(refined)
    else:
        arrived, cost = _of_transport(metadata, place)
    return Outcome(arrived, cost, load_line(metadata, place))


def _of_refinement(refined: Mapping[str, Any]) -> tuple[str, str]:
    before, after = refined["before"], refined["after"]
    own = _OWN in after
    kinds = [_OWN] if own else list(after)
    shares = [fmean(one.get(kind, 0.0) for kind in kinds) for one in (before, after)]
    where = "on your inputs" if own else NOT_YOURS
    little = "hardly anything: " if shares[1] < LITTLE else ""
    if refined["measure"] != "answers":
        what = "outputs that change as the fine-tune's do" if refined["measure"] == CHANGE else OUTPUTS
        arrived = f"{little}{what}, cosine {shares[0]:.2f} → {shares[1]:.2f}, {where}"
        return arrived, f"cosine with B's own outputs {refined['kept']:.2f} on synthetic inputs"
    loss = "loss {:.3g} → {:.3g}".format(*refined["divergence"])
    arrived = f"{little}answers like the fine-tune's, {shares[0]:.0%} → {shares[1]:.0%} ({loss}), {where}"
    return arrived, f"B's own answers stay the same on {refined['kept']:.0%} of synthetic inputs"


def _of_transport(metadata: Mapping[str, Any], place: str) -> tuple[str, str]:
    shift = metadata.get("output_shift") or {}
    if all(shift.get(name) is not None for name in ("direction", "size", "reach")):
        own = metadata["settings"].get("calibrate") is not None
        where = "on your inputs" if own else NOT_YOURS
        arrived = (
            f"B's outputs change as A's did: cosine {shift['direction']:.2f}, {shift['size']:.2f} of its"
            f" size, {where}"
        )
        return arrived, f"there, B's outputs move by {shift['reach']:.2f} of their own spread"
    advice = metadata["alignment"].get("advice") or {}
    known = _WHOLE.get(advice.get("verdict", ""))
    measure = f"transfusion evaluate {quote(place)} --against {quote(metadata['onto']['name'])}"
    seen = metadata.get("file_format") or metadata.get("library") == "diffusers"
    cost = "look at what it makes" if seen else f"{measure} --data TASK --support DATA"
    return known or "not known: nothing shows that this π fits A and B", f"not measured: {cost}"


def load_line(metadata: Mapping[str, Any], place: str) -> str:
    """Return the line of Python that loads an output, as it can be pasted."""
    library, kind = metadata.get("library"), metadata.get("class")
    known = library in ("transformers", "diffusers")
    if metadata.get("file_format"):
        return f'pipeline.load_lora_weights("{place}")  # or as the file that was moved'
    of_b = f'{library}.{kind or "AutoModel"}.from_pretrained("{{}}")'
    if metadata["kind"] == "adapter":
        load = 'model = peft.PeftModel.from_pretrained({}, "{}")'
        if not known:
            return f"import peft; {load.format('b', place)}  # b: the new base, as you load it"
        b = of_b.format(metadata["onto"]["name"])
        if (labels := metadata.get("labels")) is not None:
            b = f"{b.removesuffix(')')}, num_labels={labels})"
        return f"import peft, {library}; {load.format(b, place)}"
    if (made_by := metadata.get("loaded_by")) is not None and not place.endswith(".safetensors"):
        return f'import sentence_transformers; model = sentence_transformers.{made_by}("{place}")'
    if known and not place.endswith(".safetensors"):
        return f"import {library}; model = {of_b.format(place)}"
    file = place if place.endswith(".safetensors") else f"{place}/model.safetensors"
    load = f'model.load_state_dict(safetensors.torch.load_file("{file}"))'
    return f"import safetensors.torch; {load}  # model: made as B is"
