"""Rotary positions: pairs of units turn, the function stays, and functional alignment finds the angles again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from small_models import CASES, FIRST, finetuned, often
from transfusion.alignment.alignment import Alignment
from transfusion.architecture.table import Symmetry
from transfusion.matching.activations import AxisPiece
from transfusion.matching.align import align
from transfusion.matching.heads_and_experts import _head_scores, _HeadCovariances
from transfusion.matching.methods import preset
from transfusion.matching.procrustes import (
    random_pair_rotations,
    rotary_pairs,
    rotate_pairs,
    split_pairs,
)
from transfusion.model.model import Model
from transfusion.running.activations import OUTPUT
from transfusion.running.live_model import LiveModel, largest_difference
from transfusion.transport.apply import apply
from transfusion.transport.transport import transport
from transfusion.verification.certify import EXACT, certify, free_axes, random_move

TURNING = (
    "dinov3",
    "falcon",
    "gemma",
    "gemma2",
    "gpt_neox",
    "gptj",
    "llama",
    "mixtral",
    "modernbert",
    "nomic_bert",
    "phi",
    "phi3",
    "qwen2_moe",
    "starcoder2",
)
"""The families with rotary positions and no scale behind q and k."""
NORMED = ("gemma3", "olmo2", "qwen3", "qwen3_moe")


def rotated(folder: Path, seed: int) -> Path:
    """A folder of a model, in which every axis that turns in pairs is turned by random angles."""
    model = Model.open(folder)
    pi = random_move(model.architecture, seed)
    only = replace(pi, maps=random_pair_rotations(model.architecture, seed))
    (file,) = folder.glob("*.safetensors")
    state = load_file(file)
    for id in only.maps:
        for name in model.architecture.occurrences[id]:
            ((stored,),) = model.names[name].pieces
            state[stored] = only.move(state[stored], model.architecture.tensors[name])
    save_file(state, file, {"format": "pt"})
    return folder


def planted(a: Path, root: Path, seed: int = 2) -> tuple[Path, Alignment]:
    """A with everything permuted that may be, and everything turned that turns; and the move itself."""
    shuffle = align(a, a, method="random", residual="tied", seed=seed)
    b = rotated(apply(shuffle, a).save(root / "b"), seed)
    turns = random_pair_rotations(Model.open(b).architecture, seed)
    return b, replace(shuffle, maps={**shuffle.maps, **turns})


def functional(a: Path, b: Path) -> Alignment:
    return align(a, b, method=preset("functional").changed(probes=64), residual="tied")


# ── the tables ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.family in TURNING])
def test_a_model_whose_pairs_are_turned_computes_the_same(name, made):
    live = LiveModel.of(Model.open(made(name)))
    pi = random_move(live.architecture, 4)
    turns = replace(pi, maps=random_pair_rotations(live.architecture, 4))
    if name == "falcon-rw":  # which has slopes
        assert not turns.maps
        return
    before = live.outputs()
    with live.moved(turns):
        assert largest_difference(before, live.outputs()) < EXACT
    twice = {id: map_ for id, map_ in turns.maps.items() if map_.rotates}
    grown = {id: replace(one, produced=one.produced * 2) for id, one in twice.items()}
    with live.moved(replace(turns, maps=grown)):
        assert largest_difference(before, live.outputs()) > 1e-6, "nobody reads these units"


@pytest.mark.parametrize("family", ["llama", "gptj"])
def test_the_wrong_pairs_are_noticed(family, made):
    """Halves where neighbours are turned together, and the other way round."""
    live = LiveModel.of(Model.open(made(FIRST[family])))
    other = {Symmetry.ROTARY: Symmetry.INTERLEAVED, Symmetry.INTERLEAVED: Symmetry.ROTARY}
    spaces = {
        id: replace(space, group=other.get(space.group, space.group))
        for id, space in live.architecture.spaces.items()
    }
    wrong = replace(live, architecture=replace(live.architecture, spaces=spaces))
    assert not certify(wrong).passed
    (failed,) = (check.what for check in free_axes(wrong) if not check.passed)
    assert "rotated in pairs" in failed


@pytest.mark.parametrize("family", NORMED)
def test_a_scale_for_each_unit_of_q_and_k_leaves_nothing_to_turn(family, made):
    live = LiveModel.of(Model.open(made(FIRST[family])))
    spaces = {
        id: replace(space, group=Symmetry.ROTARY if space.axis == "qk" else space.group)
        for id, space in live.architecture.spaces.items()
    }
    (reason,) = {space.why for space in live.architecture.spaces.values() if space.axis == "qk"}
    assert "norm" in reason
    wrong = replace(live, architecture=replace(live.architecture, spaces=spaces))
    assert not certify(wrong).passed


def test_no_permutation_moves_what_turns(made):
    a = made("llama")
    turning = {space.id for space in Model.open(a).architecture.rotary_spaces()}
    assert turning
    for method in ("random", "guarded", "ot"):
        assert not turning & align(a, made("llama", 2), method=method, advice=False).maps.keys()


def test_part_of_a_head_that_is_not_turned_is_not_taken_for_a_pair(made):
    model = Model.open(made(FIRST["phi3"]))
    half = {**model.config, "rope_parameters": {"partial_rotary_factor": 0.5}}
    table = model.family.table(half, frozenset(model.names))
    assert {axis.name: axis.group for axis in table.stacks[0].axes}["qk"] is Symmetry.FIXED


# ── planes ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("group", [Symmetry.ROTARY, Symmetry.INTERLEAVED])
def test_planes_are_turned_by_the_angle_that_is_found_in_them(group):
    angles = torch.tensor([[0.3, -2.0, 3.0]], dtype=torch.float64)
    a = torch.randn(6, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    b = rotate_pairs(angles, group)[0] @ a
    assert torch.allclose(split_pairs(b @ a.T, group).angle(), angles[0], atol=1e-12)
    one, two = rotary_pairs(group, 6)
    assert torch.allclose(torch.hypot(b[one], b[two]), torch.hypot(a[one], a[two]))


def test_only_axes_that_turn_have_planes():
    with pytest.raises(ValueError, match="do not rotate in pairs"):
        rotary_pairs(Symmetry.PERMUTATION, 4)


def test_rotations_in_float64_keep_their_digits_there_and_back(made, tmp_path):
    architecture = Model.open(made("llama")).architecture
    pi = random_move(architecture, 3)
    values = torch.randn(architecture.sizes["layer.0.group"] * architecture.sizes["layer.0.qk"]).double()
    layout = architecture.tensors["layers.0.self_attn.k_proj.weight"]
    layout = layout.part(layout.outputs)
    pi.save(tmp_path / "pi.safetensors")
    for one in (pi, Alignment.load(tmp_path / "pi.safetensors")):
        back = one.inverse().move(one.move(values, layout), layout)
        assert torch.allclose(back, values, atol=1e-14)
    round_trip = pi.inverse().after(pi).maps["layer.0.qk"]
    assert np.abs(round_trip.matrix - np.eye(round_trip.size)).max() < 1e-14


# ── functional alignment ─────────────────────────────────────────────────────────────────────


def without_norms(tuned: Path, a: Path, pi: Alignment) -> Path:
    """A fine-tune whose norms are A's, so that nothing of it is moved from a norm to what reads it."""
    model, base = Model.open(tuned), load_file(next(a.glob("*.safetensors")))
    norms = {fold.norm for fold in pi.folds.values()}
    (file,) = tuned.glob("*.safetensors")
    state = load_file(file)
    for name in model.architecture.tensors:
        if name.rpartition(".")[0] in norms:
            ((stored,),) = model.names[name].pieces
            state[stored] = base[stored]
    save_file(state, file, {"format": "pt"})
    return tuned


@pytest.mark.parametrize("family", often(TURNING, ["dinov3", "gptj", "llama", "phi"]))  # of each way to turn
def test_functional_alignment_finds_what_was_turned(family, made, tmp_path):
    """The moved fine-tune computes what the fine-tune does, and every tensor of its task vector is that of the
    planted move.
    """
    case = CASES[FIRST[family]]
    a = made(case)
    b, truth = planted(a, tmp_path)
    tuned = finetuned(case, a, tmp_path / "tuned")
    pi = functional(a, b)
    moved = transport(tuned, base=a, onto=b, via=pi).save(tmp_path / "moved")
    base = Model.open(a).under(truth.provenance.policy)
    live = replace(LiveModel.of(Model.open(tuned)), architecture=base.architecture)
    expected = live.expected(truth, live.outputs())
    scale = max(float(value.abs().max()) for value in expected.values())
    assert largest_difference(expected, LiveModel.of(Model.open(moved)).outputs()) < 1e-4 * scale

    without_norms(tuned, a, pi)
    arrived = Model.open(transport(tuned, base=a, onto=b, via=pi).save(tmp_path / "arrived"))
    fine, target = (Model.open(one) for one in (tuned, b))
    wrong = {}
    for name, layout in base.architecture.tensors.items():
        tau = truth.move(fine.read(name).double() - base.read(name).double(), layout)
        found = arrived.read(name).double() - target.read(name).double()
        wrong[name] = float((found - tau).norm() / tau.norm().clamp(min=1e-30))
    assert {name: off for name, off in wrong.items() if off >= 1e-4} == {}


@pytest.mark.parametrize("case", often(["falcon-7b", "gptj", "llama", "qwen2"], ["gptj", "qwen2"]))
def test_angles_and_heads_are_found_under_noise(case, made, tmp_path):
    b, truth = planted(made(case), tmp_path)
    (file,) = b.glob("*.safetensors")
    generator = torch.Generator().manual_seed(7)
    state = load_file(file)
    for name, value in state.items():
        noise = torch.randn(value.shape, generator=generator)
        state[name] = value + 0.1 * value.std(unbiased=False) * noise
    save_file(state, file, {"format": "pt"})
    pi = functional(made(case), b)
    for id, map_ in truth.maps.items():
        if id.endswith((".group", ".head", ".rep")):
            assert pi.maps[id] == map_, id
        elif map_.rotates:
            found = pi.maps[id]
            assert found.rotates
            cosines = np.einsum("rij,rij->r", found.matrix, map_.matrix) / map_.size
            assert cosines.min() > 0.9, id


def test_pairs_never_mix_and_are_never_mirrored(made):
    """Whatever two models compute: between models that have nothing to do with each other, too."""
    pi = functional(made("gptj"), made("gptj", 2))
    for space in Model.open(made("gptj")).architecture.rotary_spaces():
        map_ = pi.maps[space.id]
        assert map_.rotates
        for one, two in zip(*rotary_pairs(space.group, space.size), strict=True):
            plane = np.ix_(range(map_.blocks), [one, two], [one, two])
            assert np.linalg.det(map_.matrix[plane].astype(float)) == pytest.approx(1, abs=1e-5)


def test_heads_are_told_apart_by_one_angle_for_queries_and_keys():
    """Two heads in one plane: where q and k agree about the angle the pair is right, and wrong elsewhere."""
    q = torch.randn(2, 2, 400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    q[1] = q[0]
    quarter = rotate_pairs(torch.tensor([torch.pi / 2], dtype=torch.float64), Symmetry.ROTARY)
    k = torch.stack([q[0], quarter @ q[0]])
    views = [
        _HeadCovariances.of(AxisPiece(("head", "qk"), one, one.flip(0), OUTPUT), Symmetry.ROTARY)
        for one in (q, k)
    ]
    alone = sum(_head_scores([view]) for view in views)
    assert torch.allclose(alone, alone[0, 0].expand(2, 2)), "each for itself, q and k tell nothing"
    together = _head_scores(views)
    assert together[0, 1] > together[0, 0] + 0.1
    assert together[1, 0] > together[1, 1] + 0.1


def test_an_adapter_is_turned_along(made, tmp_path):
    import peft

    a = made("llama")
    b, truth = planted(a, tmp_path)
    live = LiveModel.of(Model.open(a))
    torch.manual_seed(4)
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(live.module.float(), config).save_pretrained(tmp_path / "adapter")
    moved = transport(tmp_path / "adapter", base=a, onto=b, via=functional(a, b))
    moved.save(tmp_path / "moved")

    def outputs(adapter: Path, base: Path) -> dict[str, torch.Tensor]:
        fresh = LiveModel.of(Model.open(base))
        module = peft.PeftModel.from_pretrained(fresh.module.float(), adapter).double().eval()
        return replace(fresh, module=module.get_base_model()).outputs()

    under = replace(live, architecture=Model.open(a).under(truth.provenance.policy).architecture)
    wanted = under.expected(truth, outputs(tmp_path / "adapter", a))
    scale = max(float(value.abs().max()) for value in wanted.values())
    assert largest_difference(wanted, outputs(tmp_path / "moved", b)) < 1e-5 * scale
    assert largest_difference(wanted, outputs(tmp_path / "adapter", b)) > 1e-2 * scale


def test_inspect_says_what_turns_in_pairs(made, cli):
    info = cli("inspect", made("llama"))[1]
    turning = info.partition("axes whose units rotate in pairs")[2].partition("axes that stay")[0]
    assert "layer.*.qk" in turning
    assert "within layer.*.group" in turning
    assert "vocab" not in turning
    assert "rotate in pairs" not in cli("inspect", made("qwen3"))[1]
