"""The driver: planted truths are found again, in every family and under every policy."""

from __future__ import annotations

import pytest
import torch

from small_models import PRINCIPAL, often
from transfusion.architecture.architecture import Policy, Residual
from transfusion.errors import MismatchError, SettingError
from transfusion.matching.align import align
from transfusion.matching.methods import preset
from transfusion.model.model import Model
from transfusion.transport.apply import apply


@pytest.mark.parametrize("case", PRINCIPAL)
@pytest.mark.parametrize(
    "residual", often([Residual.UNTIED, Residual.TIED], [Residual.UNTIED])
)  # tied: test_planted
def test_a_random_exact_move_is_recovered(case, residual, shuffled):
    a, b = shuffled(case)
    pi = align(a, b, residual=residual, advice=False)
    model, target = Model.open(a).under(Policy(residual)), Model.open(b)
    for name, layout in model.architecture.tensors.items():
        assert torch.equal(pi.move(model.read(name), layout), target.read(name)), name
    trace = pi.provenance.objective
    assert trace[-1] == pytest.approx(sum(_norms(model)), rel=1e-5)
    assert trace[-1] == trace[-2], "the last sweep changed nothing"


def _norms(model: Model) -> list[float]:
    return [
        float(model.read(name).double().square().sum())
        for name, layout in model.architecture.tensors.items()
        if len(layout.items) > 1
    ]


def test_the_papers_single_inner_permutation_recovers_a_move_of_that_kind(made, tmp_path):
    a = made("vit-classifier")
    shuffle = align(a, a, method="random", residual="tied", inner="tied", seed=4)
    b = apply(shuffle, a).save(tmp_path / "b")
    pi = align(a, b, residual="tied", inner="tied")
    assert pi.digest == shuffle.digest


def test_a_fixed_stream_stays(made, tmp_path):
    a = made("vit-classifier")
    shuffle = align(a, a, method="random", residual="fixed", seed=4)
    assert not any(id.endswith((".x", ".y")) for id in shuffle.maps)
    b = apply(shuffle, a).save(tmp_path / "b")
    assert align(a, b, residual="fixed").digest == shuffle.digest


@pytest.mark.slow
def test_the_paper_s_start_loses_its_way_in_a_deep_gpt2_and_a_settled_one_does_not(tmp_path):
    """GPT-2 starts with small output projections: what has not been matched yet drowns what has."""
    from functools import partial

    from small_models import GPT2, Case, transformers_model

    deep = {**GPT2, "n_layer": 12, "n_embd": 96, "n_head": 6, "n_inner": 200, "vocab_size": 300}
    make = partial(transformers_model, "GPT2LMHeadModel", "GPT2Config", **deep)
    torch.manual_seed(0)
    a = Case("gpt2", make, "gpt2").store(make(), tmp_path / "a")
    shuffle = align(a, a, method="random", residual="tied", seed=2)
    b = apply(shuffle, a).save(tmp_path / "b")
    reached = {
        start: align(
            a, b, method=preset("transfusion").changed(inner="free", starts=[start])
        ).provenance.objective[-1]
        for start in ("identity", "progressive")
    }
    truth = sum(_norms(Model.open(a)))
    assert reached["progressive"] == pytest.approx(truth, rel=1e-5)
    assert reached["identity"] < 0.95 * truth


def test_the_same_seed_gives_the_same_maps(made):
    a, b = made("bert", 1), made("bert", 2)
    assert align(a, b, advice=False).digest == align(a, b, advice=False).digest
    assert align(a, a, method="random", seed=1).digest == align(a, a, method="random", seed=1).digest
    assert align(a, a, method="random", seed=1).digest != align(a, a, method="random", seed=2).digest


def test_matching_raises_the_objective_between_unrelated_models(made):
    trace = align(made("gpt2", 1), made("gpt2", 2), advice=False).provenance.objective
    assert trace[-1] > trace[0]


def test_a_model_aligned_with_itself_stays_where_it_is(made):
    pi = align(made("llama"), made("llama"))
    assert all(map_.is_identity() for map_ in pi.maps.values())


def test_naive_moves_nothing(made):
    pi = align(made("vit", 1), made("vit", 2), method="naive")
    assert pi.maps == {}
    assert len(pi.provenance.objective) == 1


def test_steps_count_up_to_the_axes_of_every_sweep(made):
    steps = []
    align(made("vit", 1), made("vit", 2), on_step=steps.append, advice=False)
    first = [step for step in steps if step.sweep == 0]
    assert [step.done for step in first] == list(range(1, first[0].total + 1))
    assert len(steps) == first[0].total * (steps[-1].sweep + 1)


def test_options_can_add_the_output_projection_and_the_vectors(made):
    models = made("vit", 1), made("vit", 2)
    faithful = align(*models, method="transfusion", advice=False)
    for option in ("outputs", "vectors"):
        pi = align(*models, method=preset("transfusion").changed(**{option: True}), advice=False)
        assert pi.provenance.options[option] is True
        assert pi.digest != faithful.digest


def test_an_unknown_method_names_the_known_ones(made):
    with pytest.raises(SettingError, match="there is no method 'magic'") as caught:
        align(made("vit"), made("vit"), method="magic")
    assert "transfusion" in str(caught.value.hint)


def test_another_family_is_refused(made):
    with pytest.raises(MismatchError, match="is a vit and .* a bert") as refused:
        align(made("vit"), made("bert"))
    assert "functional" not in str(refused.value.hint), "which moves between no images and texts"


def test_differing_vocabularies_are_refused(made, tmp_path):
    from functools import partial

    from small_models import LLAMA, Case, transformers_model

    other = Case(
        "l",
        partial(transformers_model, "LlamaForCausalLM", "LlamaConfig", **{**LLAMA, "vocab_size": 29}),
        "llama",
    )
    with pytest.raises(
        MismatchError, match=r"embed_tokens.weight .* has shape \(31, 36\) in .* and \(29, 36\)"
    ) as caught:
        align(made("llama"), other.save(tmp_path / "b", 1))
    assert "the vocabularies differ" in str(caught.value.hint)


def test_differing_depths_are_refused(made, tmp_path):
    from functools import partial

    from small_models import VIT, Case, transformers_model

    deeper = Case(
        "v", partial(transformers_model, "ViTModel", "ViTConfig", **{**VIT, "num_hidden_layers": 4}), "vit"
    )
    with pytest.raises(MismatchError, match=r"do not have the same tensors; only one has encoder\.layer\.3"):
        align(made("vit"), deeper.save(tmp_path / "b", 1), method="guarded")


def test_differing_numbers_of_heads_are_refused(made, tmp_path):
    from functools import partial

    from small_models import VIT, Case, transformers_model

    other = Case(
        "v", partial(transformers_model, "ViTModel", "ViTConfig", **{**VIT, "num_attention_heads": 6}), "vit"
    )
    with pytest.raises(MismatchError, match=r"have axes of different sizes or structure: layer\.0\.head"):
        align(made("vit"), other.save(tmp_path / "b", 1), method="guarded")


def test_types_too_coarse_for_sums_are_refused(made):
    with pytest.raises(SettingError, match="float16: too coarse to compute in"):
        align(made("vit"), made("vit"), dtype=torch.float16)
