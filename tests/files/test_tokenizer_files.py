"""Tokenizers are read as data: every kind of file, the kinds of spelling, and damaged files."""

from __future__ import annotations

import json

import pytest

from transfusion.files.tokenizer_files import BYTES, PIECES, PLAIN, WORDPIECE, TokenTable, tokens_in
from transfusion.model.vocabulary_map import VocabularyMap, describe_vocabulary
from vocabularies import with_tokenizer


def byte_level(tokens, folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.BPE({token: row for row, token in enumerate(tokens)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


def unigram(tokens, folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.Unigram([(token, -1.0) for token in tokens], unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


def table(folder):
    found, reason = tokens_in(folder)
    assert found is not None, reason
    return found


def test_every_kind_of_file_is_read(tmp_path):
    plain = tmp_path / "plain"
    plain.mkdir()
    assert table(with_tokenizer(plain, ["a", "b"])) == TokenTable(("a", "b"), PLAIN)
    found = table(byte_level(["a", "Ġb"], tmp_path / "bytes"))
    assert (found.tokens, found.kind, found.literal) == (("a", "Ġb", "<|end|>"), BYTES, {2})
    found = table(unigram(["<unk>", "▁the", "re"], tmp_path / "pieces"))
    assert (found.tokens, found.kind) == (("<unk>", "▁the", "re"), PIECES)
    words = tmp_path / "words"
    words.mkdir()
    (words / "vocab.txt").write_text("[PAD]\n[CLS]\nthe\n##re\n\u2028\n")
    assert table(words) == TokenTable(("[PAD]", "[CLS]", "the", "##re", "\u2028"), WORDPIECE)
    old = tmp_path / "old"
    old.mkdir()
    (old / "vocab.json").write_text(json.dumps({"a": 1, "Ġb": 0}))
    (old / "merges.txt").write_text("#version: 0.2\n")
    (old / "added_tokens.json").write_text(json.dumps({"<new>": 3}))
    assert table(old) == TokenTable(("Ġb", "a", None, "<new>"), BYTES, frozenset([3]))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not readable as JSON"),
        ("[]", "a JSON object was expected"),
        ('{"model": 3}', "no vocabulary in it"),
        ('{"model": {"vocab": {}}}', "there is no token in it"),
        ('{"model": {"vocab": {"a": "b"}}}', "'b' is no row"),
        ('{"model": {"vocab": {"a": -1}}}', "-1 is no row"),
        ('{"model": {"vocab": {"a": 99999999999}}}', "is no row"),
        ('{"model": {"vocab": [[3, 0.5]]}}', "a token is no text"),
        ('{"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "b"}]}', "an added token has no id"),
        ('{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": true, "content": "b"}]}', "True is no row"),
        ('{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": [1], "content": "b"}]}', "[1] is no row"),
        ('{"model": {"vocab": {"a": 0}}, "added_tokens": 3}', "added_tokens is no list"),
    ],
)
def test_damaged_files_are_named(text, reason, tmp_path):
    (tmp_path / "tokenizer.json").write_text(text)
    found, why = tokens_in(tmp_path)
    assert found is None
    assert reason in why
    assert str(tmp_path / "tokenizer.json") in why


@pytest.mark.parametrize(
    ("name", "added"),
    [
        ("added_tokens.json", {"x": [1]}),
        ("added_tokens.json", {"x": {}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 12: {"content": "x"}}}),
    ],
)
def test_rows_of_added_tokens_are_numbers(name, added, tmp_path):
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    (tmp_path / name).write_text(json.dumps(added))
    found, why = tokens_in(tmp_path)
    assert found is None
    assert why.startswith(f"{tmp_path / name}: ")
    assert "is no row of a vocabulary" in why


def test_files_that_lead_outside_are_not_read(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "other.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (inside / "tokenizer.json").symlink_to(tmp_path / "other.json")
    assert "leads outside" in tokens_in(inside)[1]


def test_a_sentencepiece_model_alone_names_the_remedy(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x02")
    assert "has no tokenizer.json beside it" in tokens_in(tmp_path)[1]


def test_a_changed_file_is_read_again(tmp_path):
    assert table(with_tokenizer(tmp_path, ["a", "b"])).tokens == ("a", "b")
    assert table(with_tokenizer(tmp_path, ["a", "b", "c"])).tokens == ("a", "b", "c")


def test_bytes_and_pieces_are_compared_by_what_they_stand_for(tmp_path):
    """``Ġthe`` is ``▁the``; bytes and letters have other spellings; ``<0x41>`` is not the letter A."""
    a = table(byte_level(["A", "Ġthe", "Ã©", "Ã", "Ġ"], tmp_path / "a"))
    b = table(unigram(["<unk>", "▁the", "é", "<0xC3>", "<0x41>", "A", "▁", "<|end|>"], tmp_path / "b"))
    found = VocabularyMap.between(a, b)
    assert found.rows.tolist() == [-1, 1, 2, 3, -1, 0, 4, 5]
    assert VocabularyMap.between(b, a).rows.tolist() == [5, 1, 2, 3, 6, 7]
    assert found.dropped == ()


def test_rows_without_a_token_take_nothing():
    a = TokenTable(("x", "y", "z"), PLAIN).resized(5)
    b = TokenTable(("z", "x", "new", "y"), PLAIN).resized(6)
    found = VocabularyMap.between(a, b)
    assert found.rows.tolist() == [2, 0, -1, 1, -1, -1]
    assert (found.common, found.tokens, found.new, found.share) == (3, (3, 4), 1, 0.75)
    assert not found.is_identity
    padded = VocabularyMap.between(a, TokenTable(("x", "y", "z"), PLAIN).resized(5))
    assert padded.is_identity
    assert padded.share == 1
    assert describe_vocabulary(padded.about()) == "the same tokens in the same rows"


def test_dropped_tokens_are_counted_and_the_first_named():
    a, b = (TokenTable((*(f"{one}{n}" for n in range(12)), "z"), PLAIN) for one in "ab")
    found = VocabularyMap.between(a, b)
    text = describe_vocabulary(found.about())
    assert "1 tokens in common: 7.69 % of A's 13, 7.69 % of B's 13" in text
    assert "dropped, because B lacks them: 'a0', 'a1', 'a2'" in text
    assert "and 4 more" in text
