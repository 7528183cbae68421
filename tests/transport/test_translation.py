"""Answers in the tokens of another tokenizer."""

from __future__ import annotations

import json
import math

import pytest
import torch

from making import case
from tests.transport.test_adapter import train_adapter
from transfusion import transport
from transfusion.errors import MismatchError
from transfusion.files.tokenizer_files import BYTES, PIECES, WORDPIECE, TokenTable, tokens_in
from transfusion.model.model import Model
from transfusion.running.probes.texts import corpus
from transfusion.transport.refinement import inputs as refinement_inputs
from transfusion.transport.refinement.asked import Answers, Asked, OwnTokens, Wanted, shortened
from transfusion.transport.refinement.learning import distance
from transfusion.transport.refinement.translation import Translation, translated
from vocabularies import save_tokenizer, trained_tokenizer

SIZE = {"a": 400, "b": 700}
TEXTS = [passage[:160] for passages in corpus().values() for passage in passages][:6]


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    """Two byte-level tokenizers of different sizes, as own tokens and as what encodes."""
    found = {}
    for name, size in SIZE.items():
        made = trained_tokenizer(size)
        folder = tmp_path_factory.mktemp(name)
        save_tokenizer(folder, json.loads(made.to_str()))
        table, _ = tokens_in(folder)
        found[name] = OwnTokens(table, 0, [0]), lambda text, made=made: made.encode(text).ids
    return found


def answers(texts: list[list[int]], vocabulary: int) -> Answers:
    width = min(map(len, texts))
    ids = torch.tensor([text[:width] for text in texts])
    logits = 3 * torch.randn(*ids.shape, vocabulary, generator=torch.Generator().manual_seed(1))
    following = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    chosen = torch.nn.functional.pad(following, (1, 0))
    return Answers(ids.int(), *shortened(logits), chosen)


def test_a_tokenizer_changes_nothing_for_itself(sides):
    own, encode = sides["a"]
    given = answers([[0, *encode(text)] for text in TEXTS], SIZE["a"])
    found = Translation(own, own, encode).answers(given)
    assert torch.equal(found.ids[:, : found.ids.shape[1] - 1], given.ids[:, : found.ids.shape[1] - 1])
    known = found.counts > 0
    assert known[:, : found.ids.shape[1] - 2].float().mean() > 0.95
    texts = torch.arange(len(TEXTS))
    ours, theirs = given.of(texts), found.of(texts)
    for text, place in known.nonzero().tolist():
        mine, other = ours.shares[text, place], theirs.shares[text, place]
        assert torch.equal(mine[mine > -torch.inf], other[other > -torch.inf])


def test_pieces_between_common_boundaries_keep_their_probability(sides):
    (a, of_a), (b, of_b) = sides["a"], sides["b"]
    given = answers([[0, *of_a(text)] for text in TEXTS], SIZE["a"])
    translation = Translation(a, b, of_b)
    found = translation.answers(given)
    bytes_of = {"a": a.table.texts(), "b": b.table.texts()}
    for number, row in enumerate(given.ids.tolist()):
        text = translation.text(row)
        for i, j in text.boundaries:
            before = (
                b"".join(bytes_of["a"][id] for id in row[1:i]),
                b"".join(bytes_of["b"][id] for id in text.ids[1:j]),
            )
            assert before[0] == before[1], "a boundary is at the same place in both"
        assert text.boundaries[-1][0] > len(row) - 4, "the text is there to its end"
        assert found.ids[number, : len(text.ids)].tolist() == text.ids
    spans = {
        (text, first): (stop, share)
        for (text, first, stop), share in zip(found.spans.tolist(), found.of_spans.tolist(), strict=True)
    }
    longest = 0
    for number, row in enumerate(given.ids.tolist()):
        text = translation.text(row)
        for (i, j), (stop_a, stop_b) in zip(text.boundaries, text.boundaries[1:], strict=False):
            if (number, j) in spans:
                stop, share = spans[number, j]
                assert stop == stop_b
                assert share == pytest.approx(float(given.chosen[number, i:stop_a].sum()), abs=1e-4)
                longest = max(longest, stop_a - i)
    assert longest > 1, "several tokens of A are one of B"
    singles = found.of(torch.arange(len(TEXTS)))
    assert singles.known.sum() > 50, "many tokens are one in both"
    first = singles.known.nonzero()[3].tolist()
    assert singles.likely[tuple(first)].max() < SIZE["b"]


def test_a_token_that_one_side_lacks_counts_as_the_longest_common_one_that_it_begins_with():
    a = OwnTokens(TokenTable(("<s>", "t", "h", "e", "th", "hex"), BYTES, frozenset({0})), 0, [0])
    b = OwnTokens(TokenTable(("<e>", "the", "th", "t", "h", "e", "z"), BYTES, frozenset({0})), 0, [0])
    translation = Translation(a, b, {"th": [2], "the": [1], "hex": [4, 5, 6]}.__getitem__)
    assert translation.groups_of_a.tolist() == [0, 1, 2, 3, 4, 2], "`hex` goes with `h`"
    assert translation.groups_of_b.tolist() == [0, 4, 4, 1, 2, 3, 6], "`the` goes with `th`; A has no `z`"
    likely, chances = torch.tensor([[[4, 5, 2, 1]] * 3]), torch.tensor([[[0.4, 0.3, 0.2, 0.05]] * 3])
    given = Answers(torch.tensor([[0, 4, 3]]), torch.full((1, 3), 4), likely.flatten(), chances.log().flatten(),
                    torch.tensor([[0, 0.4, 0.9]]).log())  # fmt: skip
    found = translation.answers(given)
    assert found.ids.tolist() == [[0, 1]], "A writes th and e, B writes the"
    (wanted,) = (found.of(torch.tensor([0])),)
    assert wanted.likely[0, 0].tolist() == [2, 4, 1]
    assert wanted.shares[0, 0].exp().tolist() == pytest.approx([0.5, 0.4, 0.05])
    assert found.of_spans.exp().tolist() == pytest.approx([0.4 * 0.9])


def test_groups_are_compared_by_the_chance_of_all_their_tokens():
    logits, groups = torch.randn(1, 2, 6, requires_grad=True), torch.tensor([0, 1, 1, 2, 2, 3])
    likely, shares = torch.tensor([[[1, 0], [2, 0]]]), torch.tensor([[[0.6, 0.3], [0.5, 0.4]]]).log()
    rest, known = torch.full((1, 2), 0.1).log(), torch.tensor([[True, True]])
    chances = logits[0].softmax(-1)
    of_groups = torch.stack([chances[:, groups == group].sum(-1) for group in range(4)], -1)
    expected = sum(
        share * (share / chance).log()
        for place, some in enumerate(likely[0].tolist())
        for share, chance in [
            *zip(shares[0, place].exp(), of_groups[place, some], strict=True),
            (torch.tensor(0.1), 1 - of_groups[place, some].sum()),
        ]
    )
    (slope,) = torch.autograd.grad(expected, logits)
    wanted = Wanted(likely, shares, rest, known, groups=groups)
    found = distance(logits * 1.0, torch.zeros(1, 2, dtype=torch.int64), wanted, 1.0)
    assert found.total == pytest.approx(expected.item(), abs=1e-5)
    assert found.equal == int((of_groups.argmax(-1) == likely[0, :, 0]).sum())
    assert torch.allclose(logits.grad, slope, atol=1e-5)


def test_the_spaces_of_sentencepiece_are_no_letters():
    """``▁the cat`` begins with no space: the tokenizer writes one before every text."""
    a = OwnTokens(TokenTable(("<s>", "▁the", "▁cat", "s"), PIECES, frozenset({0})), 0, [0])
    b = OwnTokens(TokenTable(("<e>", "the", "Ġc", "ats"), BYTES, frozenset({0})), 0, [0])
    words = {"the cats": [1, 2, 3]}
    text = Translation(a, b, words.__getitem__).text([0, 1, 2, 3])
    assert text.ids == [0, 1, 2, 3]
    assert text.boundaries == [(1, 1), (2, 2), (4, 4)]


def test_longer_texts_than_b_reads_are_cut(sides):
    (a, of_a), (b, of_b) = sides["a"], sides["b"]
    text = Translation(a, b, of_b, 9).text([0, *of_a(TEXTS[0])])
    assert len(text.ids) == 9
    assert all(j <= 9 for _, j in text.boundaries)


def test_a_tokenizer_that_writes_other_texts_is_refused(sides):
    """Such as one that knows no capitals: nothing would be learned, and that would be seen hours later."""
    (a, encode), (b, _) = sides["a"], sides["b"]
    given = answers([[0, *encode(text)] for text in TEXTS], SIZE["a"])
    asked = Asked({"plain": given}, {"synthetic": given}, {"label": "one", "inputs": []})
    with pytest.raises(MismatchError, match="writes none of the texts of one"):
        translated(asked, Translation(a, b, lambda text: []), SIZE["b"])


def test_tokenizers_of_other_kinds_are_refused(sides):
    own, encode = sides["a"]
    other = OwnTokens(TokenTable(("the", "##re"), WORDPIECE))
    with pytest.raises(MismatchError, match="cannot be compared"):
        Translation(own, other, encode)


def test_the_distance_of_a_piece_is_that_of_two_chances():
    logits, ids = torch.randn(1, 5, 12, requires_grad=True), torch.randint(12, (1, 5))
    none = torch.zeros(1, 5, 1)
    wanted = Wanted(none.long(), none - torch.inf, none[..., 0], torch.zeros(1, 5, dtype=torch.bool))
    wanted = wanted._replace(spans=torch.tensor([[0, 2, 4]]), of_spans=torch.tensor([math.log(0.3)]))
    whole = logits[0, 1:3].log_softmax(-1).gather(-1, ids[0, 2:4, None]).sum().exp()
    expected = 0.3 * (0.3 / whole).log() + 0.7 * (0.7 / (1 - whole)).log()
    (slope,) = torch.autograd.grad(2 * expected, logits)
    found = distance(logits * 1.0, ids, wanted, 2.0)
    assert found.total == pytest.approx(expected.item(), abs=1e-5)
    assert (found.answers, found.tokens) == (1, 0)
    assert torch.allclose(logits.grad, slope, atol=1e-5)


def test_a_lora_is_refined_across_tokenizers(tmp_path, monkeypatch):
    monkeypatch.setattr(refinement_inputs, "HELD_OUT", 16)
    monkeypatch.setattr(refinement_inputs, "LEAST_HELD_OUT", 8)
    monkeypatch.setattr(refinement_inputs, "WRITTEN", 32)
    sizes = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": 64}
    folders = {}
    for seed, (name, size) in enumerate(SIZE.items()):
        small = case(
            name,
            "gpt2",
            "GPT2LMHeadModel",
            "GPT2Config",
            {**sizes, "vocab_size": size},
            bos_token_id=0,
            eos_token_id=0,
        )
        folders[name] = save_tokenizer(
            small.save(tmp_path / name, seed), json.loads(trained_tokenizer(size).to_str())
        )
    train_adapter(folders["a"], tmp_path / "lora", ["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    how = {"base": folders["a"], "onto": folders["b"], "method": "naive", "refine": True, "refine_steps": 24}
    moved = transport(tmp_path / "lora", **how, refine_keep=0.0, output=tmp_path / "out")
    before, after = moved.metadata()["refinement"]["divergence"]
    assert after < before
    assert Model.open(folders["b"]).architecture.sizes["vocab"] == SIZE["b"]
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
