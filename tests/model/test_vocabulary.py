"""Tokens that a fine-tune added: refused, kept or dropped, as the user says."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from small_models import CASES, finetuned
from transfusion.errors import MismatchError
from transfusion.matching.align import align
from transfusion.transport.transport import merge, transport

CLASSES = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "bert-pretraining": "BertForPreTraining"}


def with_new_tokens(case, base, folder, count=3):
    """A fine-tune whose library enlarged the vocabulary, with a tokenizer of its own."""
    import transformers

    tuned = finetuned(CASES[case], base, folder / "plain")
    model = getattr(transformers, CLASSES[case]).from_pretrained(tuned)
    torch.manual_seed(0)
    model.resize_token_embeddings(model.config.vocab_size + count, mean_resizing=False)
    model.save_pretrained(folder / "grown")
    (folder / "grown" / "tokenizer.json").write_text('"of the fine-tune"')
    return folder / "grown"


@pytest.mark.parametrize("case", CLASSES)
def test_new_rows_follow_those_of_b(case, shuffled, tmp_path):
    """Where B is an exactly moved A, the output is the moved fine-tune, new tokens and all."""
    import transformers

    a, b = shuffled(case)
    tuned = with_new_tokens(case, a, tmp_path)
    pi = align(a, b, residual="tied")
    moved = transport(tuned, base=a, onto=b, via=pi, new_tokens="keep").save(tmp_path / "moved")
    load = getattr(transformers, CLASSES[case]).from_pretrained
    found, wanted = load(moved).double().eval(), load(tuned).double().eval()
    size = wanted.config.vocab_size
    assert found.config.vocab_size == size
    ids = torch.tensor([[0, 3, size - 1, size - 3, 5]])
    with torch.no_grad():
        one, other = found(ids), wanted(ids)
    pairs = zip(one.values(), other.values(), strict=True)
    logits = [(x, y) for x, y in pairs if isinstance(x, torch.Tensor) and x.shape[-1] == size]
    assert logits
    assert all((x - y).abs().max() < 1e-5 for x, y in logits)
    metadata = json.loads((moved / "transfusion.json").read_text())
    assert metadata["new_tokens"] == 3
    assert (moved / "tokenizer.json").read_text() == '"of the fine-tune"'


@pytest.mark.parametrize("case", CLASSES)
def test_dropped_they_leave_no_trace(case, shuffled, tmp_path):
    a, b = shuffled(case)
    tuned = with_new_tokens(case, a, tmp_path)
    pi = align(a, b, residual="tied")
    dropped = transport(tuned, base=a, onto=b, via=pi, new_tokens="drop").save(tmp_path / "moved")
    plain = transport(tmp_path / "plain", base=a, onto=b, via=pi).save(tmp_path / "without")
    found, wanted = (load_file(folder / "model.safetensors") for folder in (dropped, plain))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not (dropped / "tokenizer.json").exists()
    assert json.loads((dropped / "config.json").read_text()) == json.loads((b / "config.json").read_text())


def test_several_fine_tunes_keep_the_tokens_of_one(shuffled, tmp_path):
    a, b = shuffled("llama")
    grown, plain = with_new_tokens("llama", a, tmp_path), tmp_path / "plain"
    one = {"base": a, "onto": b, "method": "naive"}
    with pytest.raises(MismatchError, match="more than its base"):
        merge([grown, plain], **one)
    size = transformers_size(b)
    assert rows(merge([grown, plain], **one, new_tokens="drop")) == size
    assert rows(merge([plain, grown], **one, new_tokens="keep", head=1)) == size + 3
    with pytest.raises(MismatchError, match="has new tokens") as caught:
        rows(merge([plain, grown], **one, new_tokens="keep", head=0))
    assert "`head` chooses" in str(caught.value.hint)


def rows(output) -> int:
    return len(output.state_dict()["model.embed_tokens.weight"])


def transformers_size(folder) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def test_without_a_word_they_are_refused(cli, shuffled, tmp_path):
    a, b = shuffled("llama")
    tuned = with_new_tokens("llama", a, tmp_path)
    with pytest.raises(MismatchError, match=r"has 3 token\(s\) more than its base"):
        transport(tuned, base=a, onto=b)
    arguments = ["transport", tuned, "--base", a, "--onto", b, "-o", tmp_path / "moved", "--method", "naive"]
    code, _, err = cli(*arguments)
    assert code == 1
    assert "--new-tokens keep appends their rows to those of B" in err
    code, out, _ = cli(*arguments, "--new-tokens", "keep")
    assert code == 0
    assert "3 new token(s) of the fine-tune follow those of B" in out
