"""Models whose weights are in memory one layer at a time compute what whole models compute."""

from __future__ import annotations

import shutil
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from small_models import FIRST, OFTEN, often
from transfusion import align, predict
from transfusion.alignment.alignment import Alignment, random_maps
from transfusion.architecture.architecture import Policy
from transfusion.errors import ArchitectureError, CheckpointError, SettingError
from transfusion.matching import activations
from transfusion.matching.activations import ActivationPair, AxisPiece, run_on_probes
from transfusion.matching.functional import solve_axis
from transfusion.matching.heads_and_experts import match_heads
from transfusion.matching.methods import FunctionalOptions
from transfusion.model.model import Model
from transfusion.running.activations import ActivationStore
from transfusion.running.live_model import LiveModel
from transfusion.running.probes.inputs import random_inputs, run_model
from transfusion.running.streaming import RunConfig, StreamedModule, run_side_by_side
from transfusion.runtime.resources import PROGRAM, Resources
from transfusion.transport.plan import TransportPlan
from transfusion.verification.verify import compare

WHOLE_ONLY = frozenset(["marian", "llama4"])
"""Families whose module has parameters that files lack, or sends inputs to where a weight is."""
STREAMED = [family for family in sorted(FIRST) if family not in WHOLE_ONLY]


def inputs_of(model: Model, module, seed: int) -> dict[str, torch.Tensor]:
    config = getattr(module, "config", None)
    settings = config.to_dict() if hasattr(config, "to_dict") else config or model.config
    drawn = random_inputs(model.family, settings, batch=2, seed=seed)
    return {name: one.float() if one.is_floating_point() else one for name, one in drawn.items()}


def outputs(model: Model, how: RunConfig, count: int = 3) -> list[dict[str, torch.Tensor]]:
    """The outputs on some batches."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    with how.opened(model) as running:

        def run(number: int) -> None:
            found[number] = running.outputs(inputs_of(model, running.module, number))

        running.each(run, count)
    return [found[number] for number in range(count)]


@pytest.mark.parametrize("family", often(STREAMED, OFTEN))
def test_unit_by_layer_every_family_computes_the_same_bits(family, made):
    model = Model.open(made(FIRST[family]))
    whole, by_layer = (outputs(model, RunConfig(workers=2, limit=one)) for one in (None, 10**9))
    for one, other in zip(whole, by_layer, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("family", often(STREAMED, ["llama", "qwen2_moe", "t5", "vit"]))
def test_equivalence_is_proved_unit_by_layer(family, made):
    """π(A) computes what A computes, with rotated shortcuts; and the number is that of the whole model."""
    model = Model.open(made(FIRST[family])).under(Policy())
    planned = TransportPlan.planned(model, model).alignment
    pi = Alignment.of(random_maps(model.architecture, 3), model.architecture, planned.provenance)
    whole, by_layer = (compare(LiveModel.of(model, by_layer=one), pi) for one in (False, True))
    assert by_layer.equal
    assert by_layer == whole, "to the last digit"


def test_every_layer_is_loaded_once_for_all_batches_and_dropped(made):
    model = Model.open(made("llama"))
    streamed = StreamedModule(model)
    batches = [inputs_of(model, streamed.module, seed) for seed in range(5)]
    with streamed.loading():
        run_side_by_side(lambda number: streamed.module(**batches[number]) and None, 5, 2, streamed)
        held = [name for name, one in streamed.module.named_parameters() if not one.is_meta]
        assert {name.split(".")[2] for name in held if ".layers." in name} <= {"2"}, "the last layer only"
    assert streamed.loads == len(streamed.layers) == 3 + 2, "three blocks, the table and the projection"
    kept = {name for name, one in streamed.module.named_parameters() if not one.is_meta}
    assert kept == {"model.norm.weight"}


def test_only_some_passes_run_at_a_time():
    running, most, lock = [0], [0], threading.Lock()
    meet = threading.Barrier(3)

    def run(number: int) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        meet.wait(timeout=60)  # three do run together: nobody else would let them go on
        with lock:
            running[0] -= 1

    run_side_by_side(run, 9, 3)
    assert most == [3]


def test_an_error_in_one_pass_ends_all(made):
    """Also of those that wait in front of a layer."""
    model = Model.open(made("llama"))
    streamed = StreamedModule(model)
    inputs = inputs_of(model, streamed.module, 0)

    def run(number: int) -> None:
        if number == 3:
            raise ZeroDivisionError("of the fourth")
        streamed.module(**inputs)

    with streamed.loading(), pytest.raises(ZeroDivisionError, match="of the fourth"):
        run_side_by_side(run, 5, 2, streamed)


@pytest.mark.parametrize("layer", ["model.layers.0", "lm_head"])
def test_passes_through_other_layers_are_refused(layer, made):
    """Nobody waits for a pass that is over, or that is elsewhere."""
    model = Model.open(made("llama"))
    streamed = StreamedModule(model)
    inputs = inputs_of(model, streamed.module, 0)

    def run(number: int) -> None:
        if number < 3:
            streamed.module(**inputs)
        elif layer == "lm_head":  # without the layers in front of it
            streamed.module.lm_head(torch.zeros(1, 1, model.config["hidden_size"]))

    with streamed.loading(), pytest.raises(ArchitectureError, match="differ in the layers"):
        run_side_by_side(run, 5, 2, streamed)


def test_what_files_lack_is_named(made):
    with pytest.raises(ArchitectureError, match="embed_positions.weight of MarianMTModel is not in the file"):
        StreamedModule(Model.open(made(FIRST["marian"])))


def test_such_a_model_runs_whole_and_says_so(made):
    notes: list[str] = []
    model = Model.open(made(FIRST["marian"]))
    with RunConfig(limit=10**9, note=notes.append).opened(model) as running:
        assert running.streamed is None
    assert len(notes) == 1
    assert "runs whole" in notes[0]
    with pytest.raises(ArchitectureError, match="is not in the file"), RunConfig(limit=1000).opened(model):
        pass


@pytest.mark.parametrize(
    "name", often(["vit-classifier", "bert-classifier", "llama", "mixtral"], ["bert-classifier", "llama"])
)
def test_a_limit_changes_nothing_but_the_memory(name, made):
    """Maps, qualities and predictions have the same bits."""
    a, b = made(name, 1), made(name, 2)
    free = align(a, b, method="functional", resources=Resources(jobs=2))
    limited = align(a, b, method="functional", resources=Resources(jobs=1, memory=10**9))
    assert limited.digest == free.digest, "nor does the number of threads"
    assert limited.provenance == free.provenance
    found = [predict(a, b, via=free, resources=one) for one in (Resources(), Resources(memory=10**9))]
    assert found[0] == found[1]


def test_the_default_keeps_to_a_limit_too(shuffled):
    a, b = shuffled("bert-classifier")
    free, limited = (align(a, b, resources=Resources(memory=one)) for one in (None, 10**9))
    assert limited.digest == free.digest


def test_tables_that_are_read_by_rows_count_as_they_do_whole(made, monkeypatch):
    a, b = (Model.open(made("bert", seed)) for seed in (1, 2))
    options = FunctionalOptions(probes=8, samples=80)
    with run_on_probes(a, b, options) as probed:
        evidence = probed
        points = [space.id for space in evidence.architecture.moving() if space.stream]
        whole = {id: evidence.weight_covariance(id, {}) for id in points}
        monkeypatch.setattr(activations, "NUMBERS", 100)
        by_rows = {id: evidence.weight_covariance(id, {}) for id in points}
    assert any(one is not None for one in whole.values())
    for id, one in whole.items():
        if one is not None:
            torch.testing.assert_close(by_rows[id], one)


@pytest.mark.parametrize("limit", [None, 10**9])
def test_passes_remember_nothing_for_a_next_token(limit, made):
    """Keys and values of all blocks, of all batches, would be in memory together. Texts ask for them."""
    model = Model.open(made("llama"))
    with RunConfig(limit=limit).opened(model) as running:
        inputs = inputs_of(model, running.module, 0)
        assert running.module(**inputs).past_key_values is None
        assert running.module(**inputs, use_cache=True).past_key_values is not None


@pytest.mark.parametrize("axis", ["layer.0.ffn", "heads"])
def test_samples_are_in_memory_one_module_at_a_time(axis, made, monkeypatch):
    a, b = (Model.open(made("llama", seed)) for seed in (1, 2))
    seen: list[weakref.ref[AxisPiece]] = []
    pieces = ActivationPair.pieces

    def watched(self: ActivationPair, id: str) -> Iterator[AxisPiece]:
        for piece in pieces(self, id):
            assert not any(one() is not None for one in seen)
            seen.append(weakref.ref(piece))
            yield piece

    options = FunctionalOptions(probes=8, samples=80)
    with run_on_probes(a, b, options) as probed:
        heads = probed.parent_axes[0]
        monkeypatch.setattr(ActivationPair, "pieces", watched)
        if axis == "heads":
            assert match_heads(probed, heads, options, {})
        else:
            assert solve_axis(probed, axis, options)
    assert len(seen) >= 3, "of several modules: what they write, and what they read"


def test_too_little_memory_is_refused_before_any_work(made):
    a, b = (Model.open(made("llama", seed)) for seed in (1, 2))
    with pytest.raises(SettingError, match="is too little: running a model layer by layer takes"):
        align(a, b, method="functional", resources=Resources(memory=PROGRAM + 1000))


def test_a_module_that_sends_its_inputs_after_unloaded_weights_is_not_run(made):
    """Llama 4 asks where its embeddings are: its token ids would be lost, and the outputs arbitrary."""
    model = Model.open(made("llama4"))
    with pytest.raises(ArchitectureError, match="asks for the place of weights that are not loaded yet"):
        StreamedModule(model)
    streamed = StreamedModule(replace(model, family=replace(model.family, whole_only=False)))
    inputs = inputs_of(model, streamed.module, 0)
    with streamed.loading(), pytest.raises(RuntimeError, match="weights are not loaded yet"):
        run_model(streamed.module, model.family, inputs, double=False)


def test_damaged_weights_are_named_where_they_are_loaded(made, tmp_path):
    """Not the barrier that breaks for the other passes."""
    folder = Path(shutil.copytree(made("llama"), tmp_path / "damaged"))
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="up_proj.weight contains NaN"):
        outputs(Model.open(folder), RunConfig(workers=2, limit=10**9))


def test_a_module_that_is_called_twice_keeps_the_samples_of_both_calls(tmp_path):
    store = ActivationStore(tmp_path, batches=2)
    for batch, value in ((1, 3.0), (0, 1.0), (0, 2.0)):
        store.write("shared/output", batch, torch.full((2, 4), value))
    assert store.samples("shared", "output")[:, 0].tolist() == [1, 1, 2, 2, 3, 3]
