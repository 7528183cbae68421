"""The benchmark of transfer: what can be checked without its data and models."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("PIL")
pytest.importorskip("transformers")

import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordPiece

from experiments.pairs import data, vits
from experiments.pairs.berts import TEXT, Encoder, missed
from experiments.pairs.data import END, NAMES, PAD, START, UNKNOWN, Examples, Texts
from experiments.pairs.pair import GROUPS
from experiments.pairs.tasks import APART, PAIRS
from experiments.pairs.training import Recipe
from experiments.pairs.vits import CIFAR, MNIST, HeadTask, ImagePair, Pencil, Shift
from transfer import __main__ as table
from transfer import drawing


def reviews() -> Texts:
    lengths = torch.tensor([3, 6])
    return Texts(torch.arange(10, 19), torch.tensor([0, 3]), lengths, torch.tensor([0, 1]))


def test_passages_stay_inside_their_review() -> None:
    ends = reviews().passages(torch.tensor([0, 2]), 6)
    assert ends.tolist() == [[START, 10, 11, 12, END, PAD], [START, 15, 16, 17, 18, END]]


def test_dropped_words_leave_no_holes() -> None:
    task = next(task for task in TEXT.tasks if task.dropped)
    passages, labels = TEXT.questions(reviews(), task, torch.Generator().manual_seed(1))
    assert labels.tolist() == [0, 1]
    for passage in passages.tolist():
        end = passage.index(END)
        assert passage[0] == START
        assert all(word > UNKNOWN for word in passage[1:end])
        assert set(passage[end + 1 :]) == {PAD}


@pytest.mark.parametrize(
    "shift",
    [
        Shift(),
        Shift(grey=True, noise=0.1),
        Shift(inverted=True),
        Shift(rotated=90),
        Shift(coarse=4),
        Shift(hidden=5),
        Pencil(),
    ],
)
def test_shifts_are_repeatable_and_keep_the_shape(shift: Shift) -> None:
    images = torch.randint(256, (3, 3, 8, 8), dtype=torch.uint8)
    once, again = (shift(images, torch.Generator().manual_seed(0)) for _ in range(2))
    assert once.shape == images.shape
    assert torch.equal(once, again)


def test_a_hidden_square_is_a_square() -> None:
    seen = Shift(hidden=5)(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.Generator().manual_seed(0))
    assert (seen == 0).sum((1, 2, 3)).tolist() == [25] * 4


def test_a_pencil_draws_edges_and_leaves_the_rest_white() -> None:
    images = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    images[..., 4:] = 255
    drawn = Pencil()(images, torch.Generator())
    assert drawn.unique().tolist() == [-2, 2]
    assert torch.equal(drawn[0, :, 0, 3:5], torch.full((3, 2), -2.0))
    assert (drawn == -2).sum() == 3 * 8 * 2


HEADED = HeadTask(
    "headed", "", Shift(), (0, 3), (0, 10), Recipe(2, 1e-2, 4), data.CLOTHES, ((0,), (7, 2), (9,))
)


@pytest.fixture
def photographs(monkeypatch: pytest.MonkeyPatch) -> Iterator[ImagePair]:
    """Forty small photographs, and as many pieces of clothing: of each all pixels are its number."""

    def together(packages: tuple[str, ...], count: int) -> Examples:
        shape = (1, 28, 28) if packages == (data.CLOTHES,) else (3, 32, 32)
        numbers = torch.arange(count)
        return Examples(numbers.byte()[:, None, None, None].expand(-1, *shape), numbers % 10)

    monkeypatch.setattr(data, "together", together)
    vits.divided.cache_clear()
    config = CIFAR.config | {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8}
    yield dataclasses.replace(CIFAR, per_package=50, tests=10, config=config, tasks=(HEADED,))
    vits.divided.cache_clear()


def test_a_task_has_kinds_of_its_own_in_the_form_of_the_pair(photographs: ImagePair) -> None:
    known = photographs.part("a", HEADED)
    assert known.labels.tolist() == [0, 1, 1, 2] * 2
    assert known.images[:, 0, 16, 16].tolist() == [10, 12, 17, 19, 20, 22, 27, 29]
    assert known.images.shape == (8, 3, 32, 32)
    assert not known.images[..., :2].any()
    assert len(photographs.part("a", CIFAR.tasks[0])) == 20
    assert photographs.task_inputs(HEADED, 5)["pixel_values"].shape == (5, 3, 32, 32)


def test_a_fine_tune_brings_a_head_for_kinds_of_its_own(photographs: ImagePair, tmp_path: Path) -> None:
    torch.manual_seed(0)
    b = transformers.ViTForImageClassification(transformers.ViTConfig(**photographs.config)).eval()
    b.save_pretrained(tmp_path / "base")
    tuned, again = (photographs.new_tuned(tmp_path / "base", "a", HEADED, 0) for _ in range(2))
    assert tuned.config.num_labels == 3
    assert torch.equal(tuned.classifier.weight, again.classifier.weight)
    untouched = photographs.untouched(b, tuned)
    assert torch.equal(untouched.classifier.weight, tuned.classifier.weight)
    assert all(map(torch.equal, untouched.vit.state_dict().values(), b.vit.state_dict().values()))
    assert 0 <= photographs.accuracy(untouched, HEADED) <= 100
    assert photographs.support(untouched, b, HEADED) == photographs.support(b, b, HEADED)
    assert photographs.support(tuned, b, HEADED) == 0  # there is one of each class
    assert photographs.untouched(b, b) is b


def test_neighbours_are_others_in_the_same_direction() -> None:
    class Seeing(torch.nn.Module):
        """Its features are the colours of the first pixel."""

        def vit(self, images: torch.Tensor) -> transformers.modeling_outputs.BaseModelOutput:
            return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=images[:, None, :, 0, 0])

    colours = torch.tensor([[255, 0, 0], [200, 0, 0], [0, 255, 0], [0, 0, 255], [0, 0, 200]])
    images = colours.byte()[:, :, None, None].expand(-1, -1, 8, 8)
    assert CIFAR.neighbours(Seeing(), Examples(images, torch.tensor([0, 0, 1, 2, 2]))) == pytest.approx(80)


def test_keys_change_with_what_makes_a_model_and_with_nothing_else() -> None:
    key = MNIST._base_key("a", 0)
    assert key != MNIST._base_key("b", 0)
    assert key != MNIST._base_key("a", 1)
    longer = dataclasses.replace(MNIST.training, steps=MNIST.training.steps + 1)
    for changed in ({"training": longer}, {"per_package": 5}, {"tests": 5}, {"config": CIFAR.config}):
        assert key != dataclasses.replace(MNIST, **changed)._base_key("a", 0)
    assert key == dataclasses.replace(MNIST, about="", tasks=())._base_key("a", 0)


def test_every_pair_has_tasks_with_names_of_their_own() -> None:
    for name, pair in PAIRS.items():
        assert len({task.name for task in pair.tasks}) == len(pair.tasks) >= 1
        assert len(pair.tasks) == 3 or name not in APART or pair is CIFAR
        assert {task.group for task in pair.tasks} <= GROUPS.keys()
        assert not any("group" in dataclasses.asdict(task) for task in pair.tasks)  # it is in no key


def test_tasks_can_be_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [case.task.name for case in table.cases(["mnist", "cifar"], 2, ["coarse", "pencil"])] == [
        "coarse",
        "pencil",
    ] * 2
    monkeypatch.setattr(sys, "argv", ["transfer", "--pairs", "mnist", "--tasks", "pencil"])
    with pytest.raises(SystemExit):
        table.main()


def test_what_is_saved_with_a_model_is_its_tokenizer_and_what_is_beside_it_its_teaching_head(
    tmp_path: Path,
) -> None:
    config = transformers.BertConfig(**TEXT.config | {"vocab_size": 8, "num_hidden_layers": 1})
    words = {name: id for id, name in enumerate([*NAMES, "good", "film", "##s"])}
    pieces = Tokenizer(WordPiece(words, unk_token="[UNK]"))
    split = transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="[UNK]")
    head, beside = torch.nn.Linear(2, 3), tmp_path / "head.safetensors"
    Encoder(transformers.BertModel(config), split, head, beside).save_pretrained(str(tmp_path / "base"))
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "base")
    assert again("films")["input_ids"] == [6, 7]
    assert transformers.AutoModel.from_pretrained(tmp_path / "base").config.vocab_size == 8
    assert load_file(beside).keys() == {"weight", "bias"}


def test_what_is_said_misses_least_where_it_is_true() -> None:
    true = torch.nn.functional.normalize(torch.randn(6, 9, generator=torch.Generator().manual_seed(0)))
    assert missed(true, true) < missed(true.roll(1, 0), true)
    assert missed(true, true) < missed(-true, true)


def scores(task: float, support: float, share: float) -> dict[str, float]:
    return {"task": task, "support": support, "share": share}


class Line(torch.nn.Module):
    """A model of one number: its accuracy on the task, and three points of support for twenty of those."""

    def __init__(self, right: float) -> None:
        super().__init__()
        self.right = torch.nn.Parameter(torch.tensor(right))


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> table.Case:
    """B is right for 50 %, the ceiling for 90 %, and ``naive`` for 70 %, at a loss of 3 points of support."""
    for name, right in (("B", 50.0), ("ceiling", 90.0), ("naive", 70.0)):
        monkeypatch.setitem(table.METHODS, name, lambda case, right=right: Line(right))
    monkeypatch.setattr(
        table,
        "scored",
        lambda case, model: {"task": model.right.item(), "support": 90 - 0.15 * (model.right.item() - 50)},
    )
    return table.Case(TEXT, TEXT.tasks[0], 0)


def test_the_best_harmless_strength_is_found_between_b_and_the_result(case: table.Case) -> None:
    found = table.measured(case, ["naive"], (0.5, 1.0))["naive"]
    assert found.pop("seconds") >= 0
    assert found == scores(70.0, 87.0, 50.0) | {"alpha": 0.5, "matched": 25.0}
    assert table.measured(case, ["naive"], (1.0,))["naive"]["alpha"] == 0.0


def test_a_shared_pi_counts_in_the_seconds_of_every_method(
    case: table.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    aligned = table.Alignments({(Path("a"), Path("b"), "guarded", None): ("π", 100.0)})
    monkeypatch.setattr(table, "_aligned", aligned)

    def moved(case: table.Case) -> Line:
        aligned(Path("a"), Path("b"), "guarded", None)
        return Line(60.0)

    monkeypatch.setitem(table.METHODS, "guarded", moved)
    monkeypatch.setattr(table, "tune_again", lambda case: None)
    found = table.measured(case, ["naive", "guarded"], timed=True)
    assert found["naive"]["seconds"] < 100 <= found["guarded"]["seconds"] < 200
    assert found["ceiling"]["seconds"] < 100
    results: drawing.Results = {"text": {"sentiment": [found]}}
    drawn = drawing.draw_seconds(results, ["B", "guarded", "ceiling"])
    assert [column.header for column in drawn.columns] == ["task", "guarded", "ceiling"]


def test_groups_have_rows_of_their_own_where_there_are_two() -> None:
    rows: list[drawing.Measured] = [{"naive": {"share": 0.0}}]
    results = {"mnist": {"noisy-digits": rows}, "cifar": {"coarse": rows, "pencil": rows, "clothes": rows}}
    assert {name: len(some) for name, some in drawing.grouped(results).items()} == {
        "mnist": 1,
        "cifar": 3,
        "cifar, corruptions": 1,
        "cifar, other tasks": 2,
        "all": 4,
        "all, corruptions": 2,
        "all, other tasks": 2,
    }
    assert drawing.draw_means(results, ["B", "naive"]).row_count == 7


def test_means_are_taken_over_tasks_before_seeds_scatter() -> None:
    rows = [[{"naive": {"share": 0.0}}, {"naive": {"share": 2.0}}], [{"naive": {"share": 4.0}}] * 2]
    assert drawing.by_seed(rows, "naive", "share") == [2.0, 3.0]
