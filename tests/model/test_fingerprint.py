"""The fingerprint of a model: its header and a fixed sample of every tensor, however the model is stored."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from small_models import CASES, finetuned
from tests.files.test_staging import in_shards
from transfusion.errors import AlignmentError
from transfusion.files import tensor_files
from transfusion.files.checkpoint import SPAN_BYTES, SPANS, Checkpoint
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.runtime.resources import Resources
from transfusion.transport.transport import transport

WIDE = torch.arange(40 * 256, dtype=torch.float32).reshape(40, 256)
"""More bytes than a sample has."""


@pytest.fixture(scope="module")
def inputs(made, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("fingerprints")
    a, b = in_shards(made("llama", 1), root / "a"), in_shards(made("llama", 2), root / "b")
    tuned = in_shards(finetuned(CASES["llama"], a, root / "whole"), root / "tuned", "20KB")
    align(a, b, method="random", output=root / "pi.safetensors")
    return {"base": a, "onto": b, "finetuned": tuned, "via": root / "pi.safetensors"}


def changed(folder: Path, place: Path, change) -> str:
    """The fingerprint of the model in a folder after a change of its tensors."""
    shutil.copytree(folder, place)
    state = load_file(place / "model.safetensors")
    change(state)
    save_file(state, place / "model.safetensors", {"format": "pt"})
    return Model.open(place).fingerprint


def test_it_is_the_same_however_a_model_is_stored(made, inputs, tmp_path):
    import transformers

    known = Model.open(made("llama", 1)).fingerprint
    assert Model.open(inputs["base"]).fingerprint == known
    module = transformers.AutoModelForCausalLM.from_pretrained(made("llama", 1))
    assert Model.open(module).fingerprint == known
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    shutil.copy(made("llama", 1) / "config.json", tmp_path)
    assert Model.open(tmp_path).fingerprint == known
    assert Model.open(made("llama", 2)).fingerprint != known


@pytest.mark.parametrize("case", ["mixtral"])
def test_it_is_the_same_for_a_tensor_in_pieces(case, made):
    import transformers

    whole = Model.open(transformers.MixtralForCausalLM.from_pretrained(made(case)))
    assert whole.fingerprint == Model.open(made(case)).fingerprint


def test_a_change_in_any_tensor_changes_it(made, tmp_path):
    folder = made("vit", 1)
    known = Model.open(folder).fingerprint
    for number, name in enumerate(Model.open(folder).checkpoint.tensors):

        def last(state, name=name):
            state[name].view(-1)[-1] += 0.5

        assert changed(folder, tmp_path / str(number), last) != known, name


def test_another_type_or_shape_changes_it(made, tmp_path):
    folder = made("vit", 1)

    def halve(state):
        state["layernorm.bias"] = state["layernorm.bias"].to(torch.float16)

    def classify(state):
        state["classifier.weight"] = torch.zeros(3, len(state["layernorm.bias"]))

    known = Model.open(folder).fingerprint
    found = [changed(folder, tmp_path / change.__name__, change) for change in (halve, classify)]
    assert len({known, *found}) == 3


def test_a_sample_has_the_ends_of_a_tensor_and_goes_across_its_pieces(tmp_path):
    save_file({"whole": WIDE, **{f"p{i}": WIDE[10 * i : 10 * i + 10].clone() for i in range(4)}}, tmp_path / "m.safetensors")  # fmt: skip
    stored, held = Checkpoint.open(tmp_path / "m.safetensors"), Checkpoint.of({"whole": WIDE})
    sample = stored.sample(["whole"])
    assert len(sample) == SPANS * SPAN_BYTES < WIDE.nbytes
    assert sample == held.sample(["whole"]) == stored.sample([f"p{i}" for i in range(4)])
    content = WIDE.numpy().tobytes()
    assert (sample[:SPAN_BYTES], sample[-SPAN_BYTES:]) == (content[:SPAN_BYTES], content[-SPAN_BYTES:])


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_transport_reads_every_tensor_once_beside_the_samples(jobs, inputs, tmp_path, monkeypatch):
    read, real = Counter(), tensor_files.read_into

    def counted(info, ranges):
        read[info.file.parent.name] += sum(len(buffer) for _, buffer in ranges)
        return real(info, ranges)

    monkeypatch.setattr(tensor_files, "read_into", counted)
    transport(**inputs, output=tmp_path / "moved", trust_base=True, resources=Resources(jobs=jobs))
    for role in ("base", "onto", "finetuned"):
        assert read[inputs[role].name] == Checkpoint.open(inputs[role]).nbytes
    record = json.loads((tmp_path / "moved" / "transfusion.json").read_text())
    named = {"base": record["base"], "onto": record["onto"], "finetuned": record["finetuned"][0]}
    for role, info in named.items():
        assert info["fingerprint"] == Model.open(inputs[role]).fingerprint


@pytest.mark.parametrize("role", ["base", "onto"])
def test_nothing_appears_if_pi_is_for_other_weights(role, inputs, tmp_path):
    other = shutil.copytree(inputs[role], tmp_path / "other")
    file = sorted(other.glob("*.safetensors"))[-1]
    state = load_file(file)
    next(iter(state.values())).view(-1)[0] += 0.5
    save_file(state, file, {"format": "pt"})
    (tmp_path / "here").mkdir()
    with pytest.raises(
        AlignmentError, match="this π was made .* the weights of .*, but .* has other weights"
    ):
        transport(**{**inputs, role: other}, output=tmp_path / "here" / "moved")
    assert not list((tmp_path / "here").iterdir())
