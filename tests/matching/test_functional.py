"""Functional alignment: planted bases are found again, fine-tunes and adapters arrive, and all is told."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from planting import ANATOMIES, Plant, plant
from small_models import CASES, FIRST, VIT, finetuned, often
from tests.families.test_every_family import adapted, loaded, stored, with_adapter
from tests.transport.test_adapter import outputs_with, train_adapter
from transfusion.alignment.alignment import Alignment
from transfusion.alignment.maps import Map
from transfusion.architecture.architecture import HeadPolicy
from transfusion.architecture.table import Symmetry
from transfusion.errors import AdapterError, AlignmentError, ArchitectureError, LibraryError, SettingError
from transfusion.families import all_families
from transfusion.matching import activations, functional
from transfusion.matching.activations import AxisPiece
from transfusion.matching.align import align
from transfusion.matching.functional import AxisSums, PredictionQuality
from transfusion.matching.heads_and_experts import _HeadCovariances
from transfusion.matching.methods import METHODS, FunctionalOptions, Method, MlpSolver, preset
from transfusion.matching.procrustes import covariance
from transfusion.model.model import Model
from transfusion.running import building, streaming
from transfusion.running.activations import HELD_OUT, OUTPUT
from transfusion.running.live_model import LiveModel, largest_difference
from transfusion.running.probes.probed_model import Probes
from transfusion.runtime import optional_libraries
from transfusion.transport.apply import apply
from transfusion.transport.output import Output
from transfusion.transport.transport import transport

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:Unsupported layer type")

"""Families whose experts are no modules of their own, so that nobody can listen to them."""
SETTINGS = {
    "vit": ("vit-classifier", {}),
    "vit-larger": ("vit-classifier", {"larger": 2.0, "sizes": (3.0, 0.5)}),
    "bert": ("bert-classifier", {}),
    "bert-larger": ("bert-classifier", {"sizes": (3.0, 0.5)}),
    "llama": ("llama", {}),
    "llama-larger": ("llama", {"sizes": (3.0, 0.5)}),
}
every_plant = pytest.mark.parametrize(
    "name", often(SETTINGS, ["vit-larger", "bert", "llama", "llama-larger"])
)
three_plants = pytest.mark.parametrize("name", ["vit-larger", "bert", "llama-larger"])


def outputs(folder: Path) -> dict[str, torch.Tensor]:
    return LiveModel.of(Model.open(folder)).outputs()


@pytest.fixture(scope="session")
def plants(tmp_path_factory) -> Callable[[str], Plant]:
    """A and B that compute the same in bases that are turned: ``plants("vit")``."""

    @cache
    def make(name: str) -> Plant:
        case, settings = SETTINGS[name]
        return plant(case, tmp_path_factory.mktemp(name), **settings)

    return make


@pytest.fixture(scope="session")
def found(plants) -> Callable[[str], Alignment]:
    """What is found between the two, once."""
    return cache(lambda name: align(plants(name).a, plants(name).b, method="functional"))


@pytest.fixture(scope="session")
def strangers(made) -> Callable[[str], Alignment]:
    """What is found between two models that have nothing to do with each other, once."""

    @cache
    def find(case: str) -> Alignment:
        within = preset("functional").changed(heads="matched")
        return align(made(case, 1), made(case, 2), method=within)

    return find


# ── planted shuffles, in every family ────────────────────────────────────────────────────────


@dataclass(frozen=True)
class TransportPlan:
    """A fine-tune of A on its way to B, which is A shuffled."""

    a: Path
    b: Path
    tuned: Path
    root: Path

    @cached_property
    def pi(self) -> Alignment:
        return align(self.a, self.b, method=preset("functional").changed(probes=64))

    @cached_property
    def moved(self) -> Path:
        return transport(self.tuned, base=self.a, onto=self.b, via=self.pi).save(self.root / "moved")


@pytest.fixture(scope="module")
def journeys(shuffled, tmp_path_factory) -> Callable[[str], TransportPlan]:
    @cache
    def find(family: str) -> TransportPlan:
        case, root = CASES[FIRST[family]], tmp_path_factory.mktemp(family)
        a, b = shuffled(case.name)
        return TransportPlan(a, b, finetuned(case, a, root / "tuned"), root)

    return find


HIDDEN = [
    *("exaone4", "gpt_oss", "llama4", "llama4-vision", "sam", "sam-vision", "sam3"),
    *("gemma4", "gemma4-vision", "granitemoehybrid", "mamba2", "nemotron_h"),
    "parakeet_transducer",
    *("qwen3_5", "qwen3_5-vision", "qwen3_5_moe", "qwen3_5_moe-vision", "qwen3_next"),
]
"""Families with units of experts, of layers with a state, or in one order for all heads, that no module shows."""
NEARLY = {"gemma3-vision": 0.05, "mistral3": 0.05}
"""A norm follows the tower, and its scale is not folded into what reads it."""
DENOISERS = (one.name for one in all_families() if one.library == "diffusers" and one.name in FIRST)
MODULATED = sorted([*DENOISERS, "deepseek_v4"])
"""Families whose stream may be permuted only: the time step multiplies it unit by unit, or it is several streams."""
SHOWN = [family for family in sorted(FIRST) if family not in (*HIDDEN, *MODULATED)]


@pytest.mark.parametrize("family", often(HIDDEN, ["llama4"]))
def test_units_that_no_module_shows_are_refused(family, journeys):
    with pytest.raises(AlignmentError, match="shows what the units of") as refusal:
        _ = journeys(family).pi
    assert "compares weights" in str(refusal.value)


@pytest.mark.parametrize("family", often(MODULATED, ["flux"]))
def test_streams_that_cannot_be_rotated_are_refused(family, journeys):
    with pytest.raises(AlignmentError, match="functional alignment rotates the residual stream"):
        _ = journeys(family).pi


@pytest.mark.parametrize("family", often(SHOWN, ["clip", "falcon", "gpt2", "t5"]))
def test_a_fine_tune_arrives_where_b_is_a_shuffled(family, journeys):
    plan = journeys(family)
    truth = align(plan.a, plan.a, method="random", residual="tied", seed=3)  # as `shuffled` made B
    under = Model.open(plan.a).under(truth.provenance.policy)
    tuned = replace(LiveModel.of(Model.open(plan.tuned)), architecture=under.architecture)
    wanted, before = tuned.expected(truth, tuned.outputs()), outputs(plan.b)
    effect = largest_difference(wanted, before)
    assert effect > 1e-2, "the fine-tune did nothing"
    assert largest_difference(wanted, outputs(plan.moved)) < NEARLY.get(family, 1e-4) * effect
    advice = plan.pi.provenance.advice
    assert advice["found"] == pytest.approx(1, abs=1e-4 if family in NEARLY else 1e-6)
    assert advice["identity"] < 0.9


# ── planted rotations ────────────────────────────────────────────────────────────────────────


@every_plant
def test_what_was_planted_computes_the_same(name, plants):
    planted = plants(name)
    of_a, of_b = outputs(planted.a), outputs(planted.b)
    assert largest_difference(of_a, of_b) < 1e-5
    assert largest_difference(of_a, outputs(planted.tuned)) > 1
    weights = [load_file(folder / "model.safetensors") for folder in (planted.a, planted.b)]
    stays = [key for key in weights[0] if torch.allclose(weights[0][key], weights[1][key], atol=1e-3)]
    assert len(stays) < len(weights[0]) / 4, "nearly nothing is as it was"


@every_plant
def test_a_planted_rotation_is_found(name, plants, found):
    planted, pi = plants(name), found(name)
    stream = [map_ for id, map_ in pi.maps.items() if id.endswith((".x", ".y"))]
    assert len(stream) == 7
    for map_ in stream:
        assert map_.rotates
        assert torch.allclose(torch.from_numpy(map_.matrix[0]).double(), planted.stream, atol=1e-5)
        assert map_.produced.tolist() == pytest.approx([planted.larger], rel=1e-5)
        assert map_.read.tolist() == pytest.approx([1], rel=1e-5), "the norm takes care of it"
    for id, map_ in pi.maps.items():
        if id.endswith((".head", ".group")):
            assert map_.permutes
            assert map_.is_identity()
        if id.endswith(".vo"):
            sizes = [planted.sizes[row % len(planted.sizes)] for row in range(map_.blocks)]
            assert map_.produced.tolist() == pytest.approx(sizes, rel=1e-4)
            assert map_.read.tolist() == pytest.approx(sizes, rel=1e-4)


@every_plant
def test_a_fine_tune_arrives_where_b_is_a_turned(name, plants, found, tmp_path):
    planted = plants(name)
    moved = transport(planted.tuned, base=planted.a, onto=planted.b, via=found(name)).save(tmp_path / "moved")
    wanted = outputs(planted.tuned)
    effect = largest_difference(wanted, outputs(planted.b))
    assert largest_difference(wanted, outputs(moved)) < 1e-5 * effect


@pytest.mark.parametrize("name", often(["vit", "bert", "llama"], ["bert", "llama"]))
def test_no_permutation_could_do_this(name, plants, tmp_path):
    planted = plants(name)
    pi = align(planted.a, planted.b, advice=False)
    moved = transport(planted.tuned, base=planted.a, onto=planted.b, via=pi).save(tmp_path / "moved")
    wanted = outputs(planted.tuned)
    assert largest_difference(wanted, outputs(moved)) > 0.1 * largest_difference(wanted, outputs(planted.b))


@pytest.mark.parametrize("name", often(["vit-larger", "llama-larger"], ["vit-larger"]))
def test_without_sizes_it_does_not_arrive(name, plants, tmp_path):
    planted = plants(name)
    same_size = align(planted.a, planted.b, method=preset("functional").changed(scaled=False))
    rotations = [map_ for map_ in same_size.maps.values() if map_.rotates]
    assert all(set(map_.produced) == set(map_.read) == {1} for map_ in rotations)
    moved = transport(planted.tuned, base=planted.a, onto=planted.b, via=same_size).save(tmp_path / "moved")
    wanted = outputs(planted.tuned)
    assert largest_difference(wanted, outputs(moved)) > 1e-2 * largest_difference(wanted, outputs(planted.b))


@three_plants
def test_the_way_back_leads_home(name, plants, found, tmp_path):
    """From B by π⁻¹, what was moved onto B is the fine-tune of A again, whatever the norms of both."""
    planted, pi = plants(name), found(name)
    there = transport(planted.tuned, base=planted.a, onto=planted.b, via=pi).save(tmp_path / "there")
    home = transport(there, base=planted.b, onto=planted.a, via=pi.inverse()).save(tmp_path / "home")
    wanted = outputs(planted.tuned)
    assert largest_difference(wanted, outputs(home)) < 1e-5 * largest_difference(wanted, outputs(planted.a))


@every_plant
def test_norms_are_moved_with_those_that_read_through_them(name, plants, found):
    """Where only branches read the stream through a norm, B's own scale stays, and its readers bear it all."""
    planted, pi = plants(name), found(name)
    anatomy = ANATOMIES[planted.case.name](planted.case.build(1))
    assert len(pi.folds) == sum(len(readers) for _, readers in anatomy.read_through)
    assert len({fold.norm for fold in pi.folds.values()}) == len(anatomy.read_through)
    assert {fold.offset for fold in pi.folds.values()} == {0.0}
    moved = transport(planted.tuned, base=planted.a, onto=planted.b, via=pi).state_dict()
    a, tuned, model = map(Model.open, (planted.a, planted.tuned, planted.b))
    for tensor in model.architecture.tensors:
        (stored_as,) = model.names[tensor].names
        stays = tensor.rpartition(".")[0] in pi.norms and tensor.endswith(".weight")
        stays = stays or torch.equal(a.read(tensor), tuned.read(tensor))
        assert torch.equal(moved[stored_as], model.read(tensor)) == stays, tensor


# ── heads ────────────────────────────────────────────────────────────────────────────────────


def test_a_head_that_only_the_fine_tune_has_reads_through_the_norm_of_b(plants, found, tmp_path):
    """A has another head in its place, and shows what it is read through."""
    planted = plants("llama")
    tuned = finetuned(CASES["llama-classifier"], planted.a, tmp_path / "tuned")
    moved = transport(tuned, base=planted.a, onto=planted.b, via=found("llama")).save(tmp_path / "moved")
    wanted = outputs(tuned)
    size = max(float(value.abs().max()) for value in wanted.values())
    assert largest_difference(wanted, outputs(moved)) < 1e-5 * size


def test_a_head_that_b_lacks_reads_through_the_norm_of_b(plants, tmp_path):
    planted = plants("vit-larger")
    LiveModel.of(Model.open(planted.b)).module.vit.float().save_pretrained(tmp_path / "b")
    moved = transport(planted.tuned, base=planted.a, onto=tmp_path / "b", method="functional")
    wanted = outputs(planted.tuned)
    size = max(float(value.abs().max()) for value in wanted.values())
    assert largest_difference(wanted, outputs(moved.save(tmp_path / "moved"))) < 1e-5 * size


def test_a_head_beside_an_adapter_reads_through_the_norm_of_b(plants, found, tmp_path):
    planted, head = plants("llama"), CASES["llama-classifier"]
    whole = {}
    for role, base in (("a", planted.a), ("b", planted.b)):  # the same class on top of both
        module = head.build(9)
        module.model.load_state_dict(LiveModel.of(Model.open(base)).module.model.state_dict())
        whole[role] = head.store(module, tmp_path / f"{role}-with-head")
    train_adapter(
        whole["a"], tmp_path / "adapter", ["q_proj"], modules_to_save=["score"], task_type="SEQ_CLS"
    )
    moved = transport(tmp_path / "adapter", base=planted.a, onto=planted.b, via=found("llama"))
    moved.save(tmp_path / "moved")
    wanted = outputs_with(tmp_path / "adapter", whole["a"])
    size = max(float(value.abs().max()) for value in wanted.values())
    assert largest_difference(wanted, outputs_with(tmp_path / "moved", whole["b"])) < 1e-5 * size


# ── adapters ─────────────────────────────────────────────────────────────────────────────────


@three_plants
def test_an_adapter_keeps_its_rank_and_does_on_b_what_it_did_on_a(name, plants, found, tmp_path):
    planted = plants(name)
    adapter = adapted(planted.a, tmp_path / "adapter")
    moved = transport(adapter, base=planted.a, onto=planted.b, via=found(name))
    assert isinstance(moved, Output)
    moved.save(tmp_path / "moved")
    was, is_now = stored(adapter), stored(tmp_path / "moved")
    assert {key: value.shape for key, value in was.items()} == {k: v.shape for k, v in is_now.items()}
    assert all(3 in value.shape for value in is_now.values())
    wanted = with_adapter(adapter, planted.a)
    effect = largest_difference(wanted, outputs(planted.b))
    assert effect > 1e-2, "the adapter did nothing"
    assert largest_difference(wanted, with_adapter(tmp_path / "moved", planted.b)) < 1e-4 * effect


@pytest.mark.parametrize(
    "case", often(["vit-classifier", "bert-classifier", "llama", "gpt2"], ["vit-classifier", "gpt2"])
)
def test_of_an_adapter_the_product_is_moved(case, strangers, made, tmp_path):
    """Merged before or after the transport, between any two models, norms of their own on both sides."""
    a, b, pi = made(case, 1), made(case, 2), strangers(case)
    assert pi.folds
    adapter = adapted(a, tmp_path / "adapter")
    merged = transport(adapter, base=a, onto=a, method="naive", full=True).save(tmp_path / "merged")
    before = transport(merged, base=a, onto=b, via=pi, alpha=1.0).save(tmp_path / "before")
    after = transport(adapter, base=a, onto=b, via=pi, alpha=1.0, full=True).save(tmp_path / "after")
    first, second, base = (Model.open(folder) for folder in (before, after, b))
    changed = 0
    for tensor in first.architecture.tensors:
        one, other = first.read(tensor), second.read(tensor)
        change = (one - base.read(tensor)).abs().max()
        changed += bool(change > 1e-2)
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5 * max(1, float(change))), tensor
    assert changed == len(stored(adapter)) // 2
    assert LiveModel.of(second).outputs()
    assert loaded(after)


def test_what_belongs_to_single_units_is_not_turned(plants, found, tmp_path):
    planted = plants("llama")
    train_adapter(planted.a, tmp_path / "adapter", ["q_proj", "o_proj"], use_dora=True)
    with pytest.raises(AdapterError, match="under permutations only, and this π has a rotation for layer"):
        transport(tmp_path / "adapter", base=planted.a, onto=planted.b, via=found("llama")).state_dict()


# ── what maps are worth ──────────────────────────────────────────────────────────────────────


@every_plant
def test_a_planted_truth_predicts_everything(name, found):
    advice = found(name).provenance.advice
    assert advice["verdict"] == "predicted"
    assert advice["text"].startswith("100% of B's activations are predicted from A's, ")
    assert {id.rpartition(".")[2] for id in advice["axes"]} >= {"x", "y", "ffn"}
    for quality in advice["axes"].values():
        assert quality["found"] == pytest.approx(1, abs=1e-6)
    assert max(advice["identity"], advice["null"]) < 0.8


def test_no_more_than_all_of_many_activations_is_predicted():
    many = 3 * torch.randn(768, 13000, generator=torch.Generator().manual_seed(0)) + 0.5
    assert functional.predicted(many, 2 * many) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("case", ["vit-classifier", "llama"])
def test_of_strangers_little_is_predicted(case, strangers):
    """What their heads compute least of all; never less than with nothing moved."""
    axes = strangers(case).provenance.advice["axes"]
    heads = {id: quality for id, quality in axes.items() if id.endswith((".head", ".group"))}
    assert len(heads) == 3
    for id, quality in axes.items():
        assert quality["found"] >= quality["identity"], id
        assert quality["found"] < 0.8
        assert abs(quality["identity"]) < 0.1
    for quality in heads.values():
        assert quality["found"] < 0.5


def other_batches(monkeypatch, change: Callable[[list], list]) -> None:
    """From now on, probes are not what they would have been."""
    made_up = activations.make_probes

    def changed(*asked):
        made = made_up(*asked)
        assert len(made.batches) == 10
        return Probes(change(made.batches), made.about)

    monkeypatch.setattr(activations, "make_probes", changed)


def noise(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    return {name: torch.randn(one.shape, generator=generator) for name, one in batch.items()}


def test_what_is_held_out_is_not_learned_from(strangers, made, monkeypatch):
    """Two batches of ten: with others in their place, the same maps are worth something else."""
    pi = strangers("vit-classifier")
    other_batches(monkeypatch, lambda batches: [*batches[:8], *map(noise, batches[8:])])
    within = preset("functional").changed(heads="matched")
    again = align(made("vit-classifier", 1), made("vit-classifier", 2), method=within)
    assert again.digest == pi.digest
    assert again.maps == pi.maps
    was, is_now = (one.provenance.advice["axes"] for one in (pi, again))
    assert all(was[id]["found"] != is_now[id]["found"] for id in was)


def test_the_others_are_learned_from(strangers, made, monkeypatch):
    pi = strangers("vit-classifier")
    other_batches(monkeypatch, lambda batches: [*batches[:7], noise(batches[7]), *batches[8:]])
    within = preset("functional").changed(heads="matched")
    again = align(made("vit-classifier", 1), made("vit-classifier", 2), method=within)
    assert again.digest != pi.digest


def test_a_fifth_of_few_probes_is_held_out_too():
    for count in (8, 20, 64, 320):
        batches = activations.split_batches(
            [{"x": torch.arange(count)[start : start + 32]} for start in range(0, count, 32)]
        )
        assert torch.equal(torch.cat([batch["x"] for batch in batches]), torch.arange(count))
        held_out = batches[len(batches) - len(batches) // HELD_OUT :]
        assert 0.1 < sum(len(batch["x"]) for batch in held_out) / count < 0.3


def test_units_leave_their_heads_only_where_that_predicts_more(made, shuffled):
    """Between strangers, heads have no partners; where they do, they keep their units."""
    case = "vit-classifier"
    free = align(made(case, 1), made(case, 2), method="functional")
    assert free.provenance.policy.heads is HeadPolicy.FLAT
    kept = align(made(case, 1), made(case, 2), method=preset("functional").changed(heads="matched"))
    assert free.provenance.advice["found"] > kept.provenance.advice["found"] + 0.02
    assert align(*shuffled(case), method="functional").provenance.policy.heads is HeadPolicy.MATCHED


def test_both_models_are_never_in_memory_together(plants, monkeypatch):
    planted, built, alive = plants("vit"), [], []

    def build(model, *how):
        gc.collect()
        alive.extend(one for one in built if one() is not None)
        module = building.build(model, *how)
        built.append(weakref.ref(module))
        return module

    monkeypatch.setattr(streaming, "build", build)
    align(planted.a, planted.b, method="functional")
    assert len(built) == 2
    assert alive == []


def test_the_same_is_found_again(plants, found):
    planted = plants("llama")
    assert align(planted.a, planted.b, method="functional").digest == found("llama").digest


# ── auto ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", often(["vit-larger", "bert", "llama-larger"], ["llama-larger"]))
def test_auto_turns_where_b_is_turned(name, plants, found):
    planted = plants(name)
    pi = align(planted.a, planted.b, goes_on=True)
    advice = pi.provenance.advice
    assert advice["chosen"] == "functional"
    assert list(advice["predicted_by"]) == ["identity", "permutation", "functional"]
    assert advice["predicted_by"]["functional"] == pytest.approx(1, abs=1e-6)
    assert advice["by_weights"]["verdict"] == "not alignable by permutation"
    assert "functional was chosen" in advice["text"]
    assert pi.digest == found(name).digest
    assert pi.folds == found(name).folds


@pytest.mark.parametrize("case", often(["vit-classifier", "bert-classifier", "llama"], ["bert-classifier"]))
def test_auto_permutes_where_b_is_shuffled(case, shuffled):
    a, b = shuffled(case)
    pi = align(a, b, goes_on=True)
    assert pi.provenance.advice["verdict"] == "alignable"
    assert not pi.folds
    assert pi.maps == align(a, b, advice=False).maps


@pytest.mark.parametrize("case", ["vit-classifier", "llama"])
def test_auto_moves_nothing_where_b_is_nearly_a(case, made, tmp_path):
    b = finetuned(CASES[case], made(case), tmp_path / "b")
    pi = align(made(case), b)
    assert pi.maps == {}
    assert not pi.folds
    assert pi.provenance.advice["verdict"] == "same lineage"


EDGES = [
    ((0.5, 0.53, 0.55), "identity"),
    ((0.5, 0.53, 0.58), "permutation"),
    ((0.5, 0.53, 0.6), "functional"),
]
"""Where a little less would be chosen otherwise."""


@pytest.mark.parametrize(
    ("shares", "chosen"),
    [
        *EDGES,
        *often(
            [
                ((0.5, 0.5, 0.5), "identity"),
                ((0.5, 0.4, 0.55), "identity"),
                ((0.5, 0.6, 0.4), "permutation"),
                ((0.1, 0.0, 0.9), "functional"),
            ],
            [],
        ),
    ],
)
def test_the_simplest_that_predicts_about_as_well_is_chosen(shares, chosen, plants, monkeypatch):
    planted, asked = plants("vit"), []

    def quality(maps):
        asked.append(maps)
        return {"layer.0.x": PredictionQuality(shares[(2, 0, 1)[len(asked) - 1]], shares[0], 0.0)}

    correspond = functional.correspond

    def judged(*given, **named):
        found = correspond(*given, **named)
        return replace(found, quality=quality(found.maps))

    monkeypatch.setattr(functional, "correspond", judged)
    monkeypatch.setattr(functional, "prediction_qualities", lambda evidence, maps: quality(maps))
    pi = align(planted.a, planted.b, goes_on=True, probes=20, heads="matched")
    assert pi.provenance.advice["chosen"] == chosen
    assert pi.maps == asked[["functional", "identity", "permutation"].index(chosen)]
    assert bool(pi.folds) == (chosen == "functional")


@pytest.fixture
def bare(plants, tmp_path) -> list[Path]:
    """The weights of A and B, without a configuration beside them."""
    planted = plants("vit")
    files = [tmp_path / f"{name}.safetensors" for name in "ab"]
    for folder, file in zip((planted.a, planted.b), files, strict=True):
        shutil.copy(folder / "model.safetensors", file)
    return files


def opened(files: list[Path]) -> list[Model]:
    config = {"model_type": "vit", "architectures": ["UnheardModel"], **VIT}
    return [Model.open(file, config=config) for file in files]


def test_auto_goes_by_weights_where_models_cannot_be_run(bare):
    a, b = opened(bare)
    pi = align(a, b, goes_on=True)
    advice = pi.provenance.advice
    assert advice["chosen"] == "permutation"
    assert "config.json names a class UnheardModel" in advice["not_tried"]["functional"]
    assert advice["verdict"] == "not alignable by permutation"
    assert pi.maps == align(a, b, advice=False).maps


@pytest.fixture
def without_transformers(monkeypatch):
    def refuse(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(optional_libraries, "import_module", refuse)


def test_auto_goes_by_weights_where_the_library_is_missing(plants, without_transformers):
    planted = plants("vit")
    advice = align(planted.a, planted.b, goes_on=True).provenance.advice
    assert advice["chosen"] == "permutation"
    assert "transformers, which cannot be imported" in advice["not_tried"]["functional"]


# ── refusals and choices ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("choice", [{"probes": 0}, {"probes": -1}, {"samples": 1}])
def test_choices_by_which_nothing_would_be_computed_are_refused(choice):
    with pytest.raises(SettingError, match="too few to fit maps"):
        preset("functional").changed(**choice)


def test_a_way_with_neurons_that_is_no_choice_is_refused_with_those_that_are():
    with pytest.raises(SettingError, match="mlp = 'sideways' is not a choice") as caught:
        preset("functional").changed(mlp="sideways")
    assert all(choice in caught.value.hint for choice in MlpSolver)


CHOICES = (
    {"probes": 8},
    {"samples": 100},
    {"mlp": "rotated"},
    {"weights": 0.5},
    {"scaled": False},
)


@pytest.mark.parametrize("choice", [*CHOICES, {"calibrate": "inputs"}], ids=str)
@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"functional", "auto"}))
def test_choices_of_functional_alignment_are_refused_elsewhere(method, choice):
    with pytest.raises(SettingError, match=f"{next(iter(choice))}: only for functional alignment"):
        preset(method).changed(**choice)
    assert preset("functional").changed(**choice) != preset("functional")
    assert preset("auto").changed(**choice) != preset("auto")


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_metadata_records_what_was_chosen(choice):
    method = preset("functional").changed(**choice)
    policy = {key: str(getattr(method.policy, key)) for key in ("residual", "inner", "heads")}
    info = json.loads(json.dumps(method.options()))
    assert Method.from_json("functional", info, policy) == method.changed(heads=method.policy.heads)
    assert isinstance(method.functional, FunctionalOptions)


@pytest.mark.parametrize("mlp", ["rotated", "assigned"])
def test_neurons_are_turned_or_assigned_as_asked(mlp, plants, tmp_path):
    planted = plants("bert")
    pi = align(planted.a, planted.b, method=preset("functional").changed(mlp=mlp))
    kind = {"rotated": Map, "assigned": Map}[mlp]
    neurons = [map_ for id, map_ in pi.maps.items() if id.endswith(".ffn")]
    assert len(neurons) == 3
    assert all(isinstance(map_, kind) for map_ in neurons)
    moved = transport(planted.tuned, base=planted.a, onto=planted.b, via=pi).save(tmp_path / "moved")
    wanted = outputs(planted.tuned)
    assert largest_difference(wanted, outputs(moved)) < 1e-5 * largest_difference(wanted, outputs(planted.b))


def test_neurons_that_are_multiplied_with_each_other_are_assigned(found):
    """A gate is no linear map of what it lets through."""
    neurons = [map_ for id, map_ in found("llama").maps.items() if id.endswith(".ffn")]
    assert len(neurons) == 3
    assert all(map_.permutes for map_ in neurons)


def test_a_class_that_no_library_has_is_refused(bare):
    with pytest.raises(ArchitectureError, match=r"a\.safetensors: config\.json names a class UnheardModel"):
        align(*opened(bare), method="functional")


def test_a_missing_library_is_named(plants, without_transformers):
    planted = plants("vit")
    with pytest.raises(LibraryError, match="this needs transformers") as refusal:
        align(planted.a, planted.b, method="functional")
    assert "pip install" in refusal.value.hint


# ── on the command line ──────────────────────────────────────────────────────────────────────


def test_a_run_is_repeated_bit_for_bit(cli, plants, found, tmp_path):
    planted = plants("vit-larger")
    given = [planted.tuned, "--base", planted.a, "--onto", planted.b, "--method", "functional"]
    code, _, err = cli("transport", *given, "-o", tmp_path / "first")
    assert code == 0, err
    provenance = json.loads((tmp_path / "first" / "transfusion.json").read_text())
    assert provenance["alignment"]["blake3"] == found("vit-larger").digest
    code, _, err = cli(
        "transport", "--from", tmp_path / "first" / "transfusion.json", "-o", tmp_path / "again"
    )
    assert code == 0, err
    first, again = ((tmp_path / one / "model.safetensors").read_bytes() for one in ("first", "again"))
    assert first == again
    assert "activations" in (tmp_path / "first" / "README.md").read_text()


def test_an_adapter_is_repeated_too(cli, plants, tmp_path):
    planted = plants("vit-larger")
    adapter = adapted(planted.a, tmp_path / "adapter")
    given = [adapter, "--base", planted.a, "--onto", planted.b, "--method", "functional"]
    code, _, err = cli("transport", *given, "-o", tmp_path / "first")
    assert code == 0, err
    code, _, err = cli("transport", "--from", tmp_path / "first", "-o", tmp_path / "again")
    assert code == 0, err
    first, again = (load_file(tmp_path / one / "adapter_model.safetensors") for one in ("first", "again"))
    assert first.keys() == again.keys()
    for name, tensor in first.items():
        assert torch.allclose(tensor, again[name], rtol=1e-5, atol=1e-6), name


def test_what_was_found_is_kept_and_inspected(cli, plants, found, tmp_path):
    planted, path = plants("llama"), tmp_path / "pi.safetensors"
    code, _, err = cli("align", planted.a, planted.b, "--method", "functional", "-o", path)
    assert code == 0, err
    again = Alignment.load(path)
    assert again.digest == found("llama").digest
    assert again.folds == found("llama").folds
    code, out, err = cli("inspect", path)
    assert code == 0, err
    assert "method functional" in out
    assert "predicted: 100% of B's activations" in " ".join(out.split())
    code, out, _ = cli("inspect", path, "--json")
    assert code == 0
    info = json.loads(out)
    assert info["axes"]["layer.0.x"]["kind"] == "rotation"
    assert info["axes"]["layer.0.group"]["kind"] == "permutation"
    assert info["advice"]["found"] == pytest.approx(1, abs=1e-6)


def test_norms_of_a_damaged_file_are_missed(found, tmp_path):
    """A fold that is another one is another π."""
    from safetensors import safe_open

    path = found("llama").save(tmp_path / "pi.safetensors")
    with safe_open(path, framework="pt") as opened:
        provenance = json.loads(opened.metadata()["transfusion"])
    provenance["folds"].popitem()
    save_file(load_file(path), path, {"transfusion": json.dumps(provenance)})
    with pytest.raises(AlignmentError, match="the file is damaged"):
        Alignment.load(path)


def test_only_permutations_are_applied(plants, found):
    with pytest.raises(AlignmentError, match="this π mixes the units of"):
        apply(found("vit"), plants("vit").a)


def test_modules_that_compute_nothing_have_a_covariance_of_zero():
    """In float32, where the product of two very small norms is no number."""
    nothing = torch.zeros(3, 5)
    assert not covariance(nothing, nothing).any()
    sums = AxisSums()
    for _ in range(2):
        sums.add(AxisPiece(("x",), nothing, nothing, OUTPUT))
    assert sums.covariance is not None
    assert not sums.covariance.any()
    heads = _HeadCovariances.of(
        AxisPiece(("head", "x"), nothing[None], nothing[None], OUTPUT), Symmetry.FIXED
    )
    assert not heads.covariances.any()
