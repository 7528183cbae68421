"""The way from π(A) to B: exact at both ends, and what shortcuts do to it in between."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
import torch

from small_models import CASES, often
from transfusion.alignment.maps import Map
from transfusion.data.dataset import Dataset
from transfusion.errors import AlignmentError, ArchitectureError, MismatchError, SettingError
from transfusion.evaluation.barrier import Barrier, Shortcuts, barrier
from transfusion.evaluation.scorers import PredictionKind
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.running.building import build
from transfusion.running.probes.inputs import random_inputs, run_model


def one_barrier(a, b, *, via, data, **more) -> Barrier:
    """The line of one π, or of A as it is."""
    ways = {} if via is None else {"via": via, "vanilla": False}
    (found,) = barrier(a, b, data=data, **ways, **more).curves.values()
    return found


def examples(folder, count: int = 12) -> Dataset:
    """Synthetic inputs for a model, and synthetic labels where it is a classifier."""
    model = Model.open(folder)
    module = build(model)
    inputs = random_inputs(model.family, module.config.to_dict(), batch=count, seed=3)
    classes = module.config.num_labels
    words = "CausalLM" in type(module).__name__ or "LMHead" in type(module).__name__
    return Dataset.of("made up", inputs, None if words else torch.arange(count) % classes)


def plain_loss(folder, data: Dataset) -> tuple[float, float]:
    """What the library's own model says, in one batch and in float64 throughout."""
    model = Model.open(folder)
    logits = run_model(build(model), model.family, data.inputs)["logits"]
    targets = data.labels
    if targets is None:
        logits, targets = logits[:, :-1].flatten(0, 1), data.inputs["input_ids"][:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(logits, targets)
    return float(loss), float((logits.argmax(-1) == targets).double().mean())


@pytest.mark.parametrize(
    ("case", "residual"),
    often(
        product(["vit-classifier", "bert-classifier", "llama", "gpt2"], ["untied", "tied"]),
        [("bert-classifier", "untied"), ("llama", "tied"), ("gpt2", "untied")],
    ),
)
def test_the_ends_are_a_and_b(case, residual, made, aligned):
    a, b = made(case, 1), made(case, 2)
    data = examples(a)
    pi = aligned(a, b, residual=residual)
    found = one_barrier(a, b, via=pi, data=data, points=3, dtype=torch.float64, batch=5)
    assert (found.rotated > 0) == (residual == "untied")
    for point, folder in ((found.points[0], a), (found.points[-1], b)):
        loss, accuracy = plain_loss(folder, data)
        assert point.loss == pytest.approx(loss, abs=1e-9)
        assert point.accuracy == pytest.approx(accuracy)
    rough = one_barrier(a, b, via=pi, data=data, points=3)
    for one, other in zip(found.points, rough.points, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=1e-4)


def test_shortcuts_interpolated_plain_and_rounded(made, aligned):
    a, b = made("vit-classifier", 1), made("vit-classifier", 2)
    data, pi = examples(a), aligned(a, b)

    def losses(**more):
        found = one_barrier(a, b, via=pi, data=data, points=5, dtype=torch.float64, **more)
        return [point.loss for point in found.points]

    paper, plain, rounded = (losses(shortcuts=choice) for choice in Shortcuts)
    assert losses() == paper
    exact = plain_loss(a, data)[0]
    assert paper[0] == rounded[0] == pytest.approx(exact, abs=1e-9)
    assert abs(plain[0] - exact) > 1e-3
    assert paper[4] == plain[4] == rounded[4]
    assert rounded[2:] == plain[2:]
    assert rounded[1] not in (paper[1], plain[1])
    assert paper[2] != plain[2]


def test_rounding_takes_the_nearest_permutation():
    """Against all permutations of four things: nearest before the middle, and at the middle no nearer."""
    from itertools import permutations

    every = [torch.eye(4)[list(order)] for order in permutations(range(4))]
    for turn in every:
        for alpha in (0.0, 0.2, 0.49, 0.5, 0.51, 0.8, 1.0):
            blend = (1 - alpha) * turn + alpha * torch.eye(4)
            share = Shortcuts.ROUNDED.share(alpha)
            rounded = share * turn + (1 - share) * torch.eye(4)
            nearest = min(float((blend - other).norm()) for other in every)
            assert float((blend - rounded).norm()) == pytest.approx(nearest)


def test_a_pi_made_for_plain_shortcuts_gets_them(made):
    a, b = made("vit-classifier", 1), made("vit-classifier", 2)
    data, pi = examples(a), align(a, b, advice=False)
    metadata = dataclasses.replace(pi.provenance, options={**pi.provenance.options, "plain_shortcuts": True})
    ablated = dataclasses.replace(pi, provenance=metadata)
    assert one_barrier(a, b, via=ablated, data=data, points=2).shortcuts is Shortcuts.PLAIN
    asked = one_barrier(a, b, via=ablated, data=data, points=2, shortcuts="interpolated")
    assert asked.shortcuts is Shortcuts.INTERPOLATED
    assert one_barrier(a, b, via=pi, data=data, points=2).shortcuts is Shortcuts.INTERPOLATED


def test_a_shuffled_model_has_no_barrier_once_aligned(shuffled):
    a, b = shuffled("vit-classifier")
    data, model = examples(a), Model.open(a)
    answers = run_model(build(model), model.family, data.inputs)["logits"].argmax(-1)
    data = dataclasses.replace(data, labels=answers)
    aligned = one_barrier(
        a, b, via=align(a, b, residual="tied", advice=False), data=data, dtype=torch.float64
    )
    vanilla = one_barrier(a, b, via=None, data=data, dtype=torch.float64)
    assert aligned.height == pytest.approx(0, abs=1e-9)
    assert vanilla.height > 0.01
    assert vanilla.method is None
    assert [point.alpha for point in aligned.points] == [i / 10 for i in range(11)]


def test_the_height_is_over_the_straight_line(made):
    a, b = made("vit-classifier", 1), made("vit-classifier", 2)
    whole = barrier(a, b, data=examples(a), points=4)
    found = whole.curves["vanilla"]
    first, last = found.points[0].loss, found.points[-1].loss
    above = [p.loss - ((1 - p.alpha) * first + p.alpha * last) for p in found.points]
    assert found.height == max(above)
    assert found.metadata()["summit"] == found.points[above.index(max(above))].alpha
    metadata = whole.metadata()
    assert metadata["examples"] == 12
    assert metadata["question"] == PredictionKind.CLASS


def test_a_module_is_left_as_it_was_even_after_an_error(made):
    from transfusion.running.live_model import LiveModel

    live = LiveModel.of(Model.open(made("vit-classifier")))
    before = {name: parameter.data.clone() for name, parameter in live.module.named_parameters()}

    def broken() -> None:
        with live.moved(align(made("vit-classifier"), made("vit-classifier"), method="random")):
            raise ZeroDivisionError

    live = LiveModel.of(Model.open(made("vit-classifier")))
    with pytest.raises(ZeroDivisionError):
        broken()
    assert all(torch.equal(p.data, before[name]) for name, p in live.module.named_parameters())
    assert not any(module._forward_hooks for module in live.module.modules())


# ── refusals ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("points", [1, 0])
def test_a_way_has_two_ends(points, made):
    a = made("vit-classifier")
    with pytest.raises(SettingError, match=r"points = .*"):
        one_barrier(a, a, via=None, data=examples(a), points=points)


def test_other_settings_that_make_no_sense(made):
    a = made("vit-classifier")
    data = examples(a)
    with pytest.raises(SettingError, match="shortcuts = 'bent' is not a choice"):
        one_barrier(a, a, via=None, data=data, shortcuts="bent")
    with pytest.raises(SettingError, match="too coarse"):
        one_barrier(a, a, via=None, data=data, dtype=torch.bfloat16)
    with pytest.raises(SettingError, match="batch = 0"):
        one_barrier(a, a, via=None, data=data, batch=0)


@pytest.mark.parametrize("case", ["vit", "bert-pretraining", "clip"])
def test_models_without_logits_are_refused(case, made):
    a = made(case)
    model = Model.open(a)
    data = Dataset.of(
        "made up", random_inputs(model.family, build(model).config.to_dict()), torch.zeros(3).long()
    )
    with pytest.raises(ArchitectureError, match="gives no logits"):
        one_barrier(a, a, via=None, data=data)


def test_open_clip_has_no_classes(made):
    a = made("open_clip")
    model = Model.open(a)
    data = Dataset.of("made up", random_inputs(model.family, model.config), torch.zeros(3).long())
    with pytest.raises(ArchitectureError, match="gives no logits"):
        one_barrier(a, a, via=None, data=data)


def test_other_heads_are_refused(made, tmp_path):
    a, b = made("vit-classifier", 1), made("vit", 2)
    with pytest.raises(MismatchError, match="is a ViTForImageClassification and .* a ViTModel"):
        one_barrier(a, b, via=None, data=examples(a))
    model = CASES["vit-classifier"].build(4)
    model.classifier = torch.nn.Linear(model.classifier.in_features, 13)
    model.config.num_labels = 13
    model.save_pretrained(tmp_path / "b")
    with pytest.raises(MismatchError, match=r"have task heads of other shapes: classifier\.weight"):
        one_barrier(a, tmp_path / "b", via=None, data=examples(a))


def test_a_pi_of_other_weights_is_refused(made):
    a, b, c = (made("vit-classifier", seed) for seed in (1, 2, 3))
    pi = align(a, c, advice=False)
    with pytest.raises(AlignmentError, match="was made for the weights of"):
        one_barrier(a, b, via=pi, data=examples(a))


def test_only_permutations_are_rounded(made):
    a, b = made("vit-classifier", 1), made("vit-classifier", 2)
    data, pi = examples(a), align(a, b, advice=False)
    id = Model.open(a).under(pi.provenance.policy).architecture.shortcuts[0].target
    soft = dataclasses.replace(pi, maps={**pi.maps, id: Map.rotation(pi.maps[id].matrix, [1], [1])})
    with pytest.raises(AlignmentError, match="between permutations only"):
        one_barrier(a, b, via=soft, data=data, shortcuts="rounded")
    found = one_barrier(a, b, via=soft, data=data, points=2, dtype=torch.float64)
    assert found.points[0].loss == pytest.approx(plain_loss(a, data)[0], abs=1e-9)
