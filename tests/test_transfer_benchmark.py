"""The benchmark of transfer: what can be checked without its data and models."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("PIL")
pytest.importorskip("transformers")

from transfer.data import END, PAD, START, UNKNOWN, Texts, word_vectors
from transfer.tasks import CIFAR, MNIST, PAIRS, TEXT, Shift


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
        Shift(turned=90),
        Shift(coarse=4),
        Shift(hidden=5),
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


def test_keys_change_with_what_makes_a_model_and_with_nothing_else() -> None:
    key = MNIST._base_key("a", 0)
    assert key != MNIST._base_key("b", 0)
    assert key != MNIST._base_key("a", 1)
    longer = dataclasses.replace(MNIST.training, steps=MNIST.training.steps + 1)
    for changed in ({"training": longer}, {"per_package": 5}, {"tests": 5}, {"config": CIFAR.config}):
        assert key != dataclasses.replace(MNIST, **changed)._base_key("a", 0)
    assert key == dataclasses.replace(MNIST, about="", tasks=())._base_key("a", 0)


def test_every_pair_has_three_tasks_with_names_of_their_own() -> None:
    for pair in PAIRS.values():
        assert len({task.name for task in pair.tasks}) == len(pair.tasks) == 3


def test_word_vectors_have_unit_length_and_depend_on_the_seed() -> None:
    words = torch.randint(5, 40, (600,), generator=torch.Generator().manual_seed(0))
    texts = Texts(words, torch.tensor([0, 300]), torch.tensor([300, 300]), torch.tensor([0, 1]))
    one, again, other = (word_vectors(texts, 40, 8, window=2, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.allclose(one, other)
    torch.testing.assert_close(one[5:].norm(dim=1), torch.ones(35))
