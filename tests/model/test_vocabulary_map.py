"""Bases with different vocabularies: rows move by token, and what cannot be compared is not guessed."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from making import case
from small_models import CASES, finetuned
from tests.evaluation.test_interpolation import one_barrier
from transfusion.alignment.alignment import Alignment
from transfusion.errors import AdapterError, AlignmentError, DataError, MismatchError, SettingError
from transfusion.matching.align import align
from transfusion.matching.methods import preset
from transfusion.model.model import Model
from transfusion.model.pair import Pair
from transfusion.running.building import build
from transfusion.running.probes import make_probes
from transfusion.running.probes.probed_model import ProbedModel
from transfusion.transport.apply import apply
from transfusion.transport.refinement import inputs as refinement_inputs
from transfusion.transport.transport import merge, transport
from transfusion.verification.verify import predict, verify
from vocabularies import (
    copied,
    perturbed,
    rearranged,
    save_tokenizer,
    trained_tokenizer,
    with_rows,
    with_tokenizer,
)

ROWS = 31
WORDS = [f"word{n}" for n in range(ROWS - 1)]
"""A's tokens; its last row is padding."""
GONE = (3, 11, 17)
"""The rows of A's tokens that B lacks."""
KEPT = [row for row in range(len(WORDS)) if row not in GONE]
ORDER = [KEPT[place] for place in np.random.default_rng(0).permutation(len(KEPT))]
IN_B = [*ORDER[:5], None, *ORDER[5:20], None, None, *ORDER[20:], None, None, None]
"""For every row of B the row of A: in another order, with tokens added and two rows of padding at the end."""
NEW = iter("abcd")
WORDS_OF_B = ["new " + next(NEW) if row is None else WORDS[row] for row in IN_B[:-2]]
CLASSES = ("gpt2", "llama", "bert-pretraining", "roberta-masked", "t5-generation", "bart-generation")


@pytest.fixture(scope="session")
def pair(shuffled, tmp_path_factory):
    """A, and B: an exactly moved A with other rows of the vocabulary."""
    done = {}

    def make(case: str):
        if case not in done:
            root = tmp_path_factory.mktemp("vocabulary")
            a, b = shuffled(case)
            b_path = with_rows(b, root / "b", IN_B, WORDS_OF_B)
            done[case] = copied(a, root / "a", WORDS), b_path
        return done[case]

    return make


def outputs_on(folder, rows):
    """The logits of a model on some tokens, in float64."""
    module = build(Model.open(folder))
    ids = torch.tensor([rows])
    more = {"decoder_input_ids": ids.flip(1)} if module.config.is_encoder_decoder else {}
    with torch.no_grad():
        found = module(input_ids=ids, **more)
    return (found.prediction_logits if "prediction_logits" in found else found.logits)[0]


def places(rows):
    return [IN_B.index(row) for row in rows]


def effect_that_arrives(moved, tuned, a, b):
    """The largest error on common tokens, as a share of the fine-tune's effect."""
    rows = ORDER[2:11]
    wanted = outputs_on(tuned, rows)[:, KEPT]
    found = outputs_on(moved, places(rows))[:, places(KEPT)]
    before = outputs_on(a, rows)[:, KEPT]
    assert torch.allclose(before, outputs_on(b, places(rows))[:, places(KEPT)], atol=1e-4)
    return float((found - wanted).abs().max() / (wanted - before).abs().max())


@pytest.mark.parametrize("case", CLASSES)
def test_a_planted_vocabulary_is_recovered(case, pair, tmp_path):
    a, b = pair(case)
    tuned = finetuned(CASES[case], a, tmp_path / "tuned")
    pi = align(a, b, residual="tied")
    moved = transport(tuned, base=a, onto=b, via=pi).save(tmp_path / "moved")
    assert effect_that_arrives(moved, tuned, a, b) < 1e-4
    assert Model.open(moved).architecture.sizes["vocab"] == len(IN_B)
    new = places_of_new()
    one, other = (Model.open(folder) for folder in (moved, b))
    for name, layout in one.architecture.tensors.items():
        if layout.items[:1] and layout.dims_with("vocab") == (0,):
            assert torch.equal(one.read(name)[new], other.read(name)[new]), "a new token changed"
    about = json.loads((moved / "transfusion.json").read_text())["vocabulary"]
    assert (about["dropped"], about["dropped_first"]) == (3, [WORDS[row] for row in GONE])
    assert (about["common"], about["tokens"], about["new"]) == (27, [30, 31], 4)


def test_a_fine_tune_without_tokens_moves_between_vocabularies(pair, tmp_path):
    a, b = pair("whisper-generation")
    base = transformers.WhisperForAudioClassification.from_pretrained(a, num_labels=7)
    with torch.no_grad():
        for name, weight in base.named_parameters():
            if "encoder.layers" in name and weight.ndim == 2:
                weight.add_(0.1 * weight.std() * torch.randn_like(weight))
    base.eval().save_pretrained(tmp_path / "tuned")
    moved = transport(tmp_path / "tuned", base=a, onto=b, residual="tied").module()
    heard = torch.randn(2, 9, 34, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert torch.allclose(moved(heard).logits, base(heard).logits, atol=1e-4)


def places_of_new():
    return [place for place, row in enumerate(IN_B) if row is None]


def test_the_same_size_with_other_tokens_moves_rows(shuffled, tmp_path):
    """Today's silent mistake: as many tokens, in another order."""
    a, b = shuffled("gpt2")
    order = np.random.default_rng(1).permutation(ROWS).tolist()
    words = [*WORDS, "last"]
    base = copied(a, tmp_path / "a", words)
    onto = with_rows(b, tmp_path / "b", order, [words[row] for row in order])
    tuned = finetuned(CASES["gpt2"], base, tmp_path / "tuned")
    moved = transport(tuned, base=base, onto=onto, residual="tied").save(tmp_path / "moved")
    wanted = outputs_on(tuned, [1, 5, 9])[:, order]
    found = outputs_on(moved, [order.index(row) for row in (1, 5, 9)])
    assert torch.allclose(found, wanted, atol=1e-4)
    (base / "tokenizer.json").unlink()
    blind = transport(tuned, base=base, onto=onto, residual="tied").save(tmp_path / "blind")
    assert not torch.allclose(outputs_on(blind, [order.index(row) for row in (1, 5, 9)]), wanted, atol=1e-1)


@pytest.mark.parametrize("adapter", [False, True])
def test_a_fine_tune_that_rearranged_its_vocabulary_is_refused(adapter, shuffled, tmp_path):
    a, b = shuffled("gpt2")
    words = [*WORDS, "last"]
    base, onto = copied(a, tmp_path / "a", words), copied(b, tmp_path / "b", words)
    order = [ROWS - 1, *range(ROWS - 1)]
    if adapter:
        tuned = adapter_on(base, tmp_path / "tuned", configs()["plain"])
        tuned = with_tokenizer(tuned, [words[row] for row in order])
    else:
        changed = finetuned(CASES["gpt2"], base, tmp_path / "changed")
        tuned = with_rows(changed, tmp_path / "tuned", order, [words[row] for row in order])
    with pytest.raises(
        MismatchError, match=f"has {ROWS} token.* of its base .* in other rows: 'last' .row 0"
    ):
        transport(tuned, base=base, onto=onto, residual="tied", trust_base=True)
    renamed = with_tokenizer(tuned, [*WORDS, "<reserved, and now used>"])
    transport(renamed, base=base, onto=onto, residual="tied", trust_base=True)


def test_equal_tokenizers_change_nothing(shuffled, tmp_path):
    a, b = shuffled("llama")
    one, two = (copied(folder, tmp_path / name, WORDS) for folder, name in ((a, "a"), (b, "b")))
    assert Pair.open(one, two).a.vocabulary is None
    plain, told = align(a, b), align(one, two)
    assert plain.digest == told.digest
    assert plain.provenance.vocabulary == {}
    assert told.provenance.vocabulary["share"] == 1
    assert not told.provenance.vocabulary["moved"]
    tuned = finetuned(CASES["llama"], a, tmp_path / "tuned")
    files = [
        load_file(transport(tuned, base=base, onto=onto, via=pi).save(to) / "model.safetensors")
        for base, onto, pi, to in (
            (a, b, plain, tmp_path / "plain"),
            (one, two, told, tmp_path / "told"),
            (one, two, plain, tmp_path / "mixed"),
        )
    ]
    assert all(torch.equal(files[0][name], other[name]) for other in files[1:] for name in files[0])


def test_other_processes_read_the_same_rows(pair):
    a, b = pair("gpt2")
    view = Pair.open(a, b).a
    again = pickle.loads(pickle.dumps(view))
    assert view.fingerprint == again.fingerprint == Model.open(a).fingerprint
    whole = view.read("wte.weight")
    assert torch.equal(again.read("wte.weight"), whole)
    assert torch.equal(again.read("wte.weight", slice(3, 9)), whole[3:9])
    some = torch.tensor([30, 2, 7])
    assert torch.equal(again.read("wte.weight", some), whole[some])
    assert not whole[places_of_new()].any()


# ── refusals and notes ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("damage", [None, "", '{"model": {}}', '{"model": {"vocab": {"a": 0, "b": 0}}}'])
def test_other_sizes_need_readable_tokenizers(damage, pair, tmp_path):
    a, b = pair("gpt2")
    base = copied(a, tmp_path / "a")
    (base / "tokenizer.json").unlink()
    if damage is not None:
        (base / "tokenizer.json").write_text(damage)
    with pytest.raises(MismatchError, match="wte.weight .* has shape") as caught:
        align(base, b)
    assert "put the tokenizer.json of each base into its folder" in caught.value.hint
    assert str(base) in caught.value.hint


def test_tokenizers_that_cannot_be_compared_are_noted(cli, shuffled, tmp_path):
    a, b = shuffled("gpt2")
    base = copied(a, tmp_path / "a", WORDS)
    code, _, messages = cli("align", base, b, "-o", tmp_path / "pi.safetensors")
    assert code == 0
    assert "the vocabularies were not compared" in " ".join(messages.split())
    assert "no tokenizer in this folder" in " ".join(messages.split())
    tuned = finetuned(CASES["gpt2"], a, tmp_path / "tuned")
    _, _, messages = cli("transport", tuned, "--base", base, "--onto", b, "-o", tmp_path / "moved")
    assert messages.count("were not compared") == 1


def test_little_in_common_is_refused_unless_told(cli, shuffled, tmp_path):
    a, b = shuffled("gpt2")
    base = copied(a, tmp_path / "a", WORDS)
    onto = copied(b, tmp_path / "b", [*WORDS[:10], *(f"other{n}" for n in range(20))])
    with pytest.raises(MismatchError, match=r"33% of their tokens in common \(10 of 30 and 30\)") as caught:
        align(base, onto)
    assert "`vocabulary_share`" in caught.value.hint
    pi = tmp_path / "pi.safetensors"
    code, _, messages = cli("align", base, onto, "-o", pi)
    assert (code, "--vocabulary-share" in messages) == (1, True)
    assert cli("align", base, onto, "-o", pi, "--vocabulary-share", "0.3")[0] == 0
    assert Alignment.load(pi).provenance.vocabulary["common"] == 10
    with pytest.raises(SettingError, match="between 0 and 1"):
        align(base, onto, vocabulary_share=1.5)


def test_kinds_that_cannot_be_compared_are_refused(shuffled, tmp_path):
    from tokenizers import Tokenizer, models

    a, b = shuffled("gpt2")
    base, onto = copied(a, tmp_path / "a", WORDS), copied(b, tmp_path / "b")
    Tokenizer(models.WordPiece({word: row for row, word in enumerate(["[UNK]", *WORDS])})).save(
        str(onto / "tokenizer.json")
    )
    with pytest.raises(MismatchError, match="plain and WordPiece tokenizers cannot be compared"):
        align(base, onto, vocabulary_share=0)


def test_positions_behind_another_padding_token_are_refused(pair, tmp_path):
    a, b = pair("roberta-masked")
    onto = copied(b, tmp_path / "b")
    config = json.loads((onto / "config.json").read_text())
    (onto / "config.json").write_text(json.dumps({**config, "pad_token_id": 3}))
    with pytest.raises(MismatchError, match="count positions from behind their padding tokens"):
        align(a, onto)


def test_a_pi_for_other_vocabularies_is_refused(pair, tmp_path):
    a, b = pair("gpt2")
    tuned = finetuned(CASES["gpt2"], a, tmp_path / "tuned")
    pi = align(a, b, residual="tied")
    other = copied(a, tmp_path / "other")
    with_tokenizer(other, WORDS[::-1])
    with pytest.raises(AlignmentError, match="the tokenizers were others then"):
        transport(tuned, base=other, onto=b, via=pi)
    blind = copied(a, tmp_path / "blind", WORDS[::-1])
    same = with_rows(b, tmp_path / "same", range(ROWS))
    uncompared = align(blind, same, residual="tied")
    with_tokenizer(same, WORDS)
    with pytest.raises(AlignmentError, match="the tokenizers were not compared then"):
        transport(tuned, base=blind, onto=same, via=uncompared)


# ── other verbs ──────────────────────────────────────────────────────────────────────────────


def test_pi_still_holds_for_a_alone(pair, tmp_path):
    """π(A) keeps A's own tokens, and computes what A computes."""
    a, b = pair("llama")
    pi = align(a, b, residual="tied")
    pi.save(tmp_path / "pi.safetensors")
    loaded = Alignment.load(tmp_path / "pi.safetensors")
    assert loaded.provenance.vocabulary == pi.provenance.vocabulary
    assert verify(a, via=loaded).equal
    moved = apply(loaded, a).save(tmp_path / "applied")
    assert torch.allclose(outputs_on(moved, [1, 2, 9]), outputs_on(a, [1, 2, 9]), atol=1e-5)
    assert predict(a, b, via=loaded).mean.found > 0.99


def test_it_goes_back_by_the_inverse(pair, tmp_path):
    """A fine-tune of B moves onto A by π⁻¹: both vocabularies are known from either side."""
    a, b = pair("gpt2")
    back = align(a, b, residual="tied").inverse()
    assert back.provenance.vocabulary["tokens"] == [31, 30]
    tuned = perturbed(b, tmp_path / "tuned")
    moved = transport(tuned, base=b, onto=a, via=back).save(tmp_path / "moved")
    rows = ORDER[2:11]
    wanted = outputs_on(tuned, places(rows))[:, places(KEPT)]
    found, before = (outputs_on(folder, rows)[:, KEPT] for folder in (moved, a))
    assert (found - wanted).abs().max() < 1e-4 * (wanted - before).abs().max()


def test_a_rerun_repeats_it(cli, pair, tmp_path):
    a, b = pair("gpt2")
    tuned = finetuned(CASES["gpt2"], a, tmp_path / "tuned")
    code, said, _ = cli("transport", tuned, "--base", a, "--onto", b, "-o", tmp_path / "moved")
    assert code == 0
    assert "27 tokens in common" in said
    assert "'word3', 'word11', 'word17'" in said
    assert "word11" in (tmp_path / "moved" / "README.md").read_text()
    assert cli("report", tmp_path / "moved", "-o", tmp_path / "page.html")[0] == 0
    assert "word11" in (tmp_path / "page.html").read_text()
    again = ("transport", "--from", tmp_path / "moved" / "transfusion.json", "-o", tmp_path / "again")
    assert cli(*again)[0] == 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("moved", "again"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_inspect_shows_what_two_vocabularies_share(cli, pair):
    a, b = pair("gpt2")
    code, said, _ = cli("inspect", a, "--with", b)
    assert code == 0
    assert "27 tokens in common" in said
    code, said, _ = cli("inspect", a, "--with", b, "--json")
    assert json.loads(said)["vocabulary"]["dropped"] == 3


# ── tokens that the fine-tune added ──────────────────────────────────────────────────────────

ADDED = ["<one>", "<two>", "<three>"]


def grown(base, folder):
    """A fine-tune with three more tokens than its base, and the same without them."""
    from tokenizers import Tokenizer

    plain = perturbed(base, folder / "plain")
    tuned = with_rows(plain, folder / "grown", [*range(ROWS), None, None, None])
    made = Tokenizer.from_file(str(with_tokenizer(tuned, [*WORDS, "last"]) / "tokenizer.json"))
    made.add_special_tokens(ADDED)
    made.save(str(tuned / "tokenizer.json"))
    return tuned


def test_added_tokens_are_refused_unless_told(pair, tmp_path):
    a, b = pair("gpt2")
    tuned = grown(a, tmp_path)
    pi = align(a, b, residual="tied")
    with pytest.raises(MismatchError, match=r"has 3 token\(s\) more than its base"):
        transport(tuned, base=a, onto=b, via=pi)
    dropped = transport(tuned, base=a, onto=b, via=pi, new_tokens="drop").save(tmp_path / "dropped")
    assert Model.open(dropped).architecture.sizes["vocab"] == len(IN_B)
    assert effect_that_arrives(dropped, tmp_path / "plain", a, b) < 1e-4
    with pytest.raises(MismatchError, match="a B with another vocabulary has no place for them"):
        transport(tuned, base=a, onto=b, via=pi, new_tokens="keep")


def test_tokens_in_rows_of_padding_are_not_lost_silently(pair, tmp_path):
    """A fine-tune may give a token to a row that its base had as padding; the table is no larger then."""
    a, b = pair("gpt2")
    tuned = with_tokenizer(perturbed(a, tmp_path / "tuned"), [*WORDS, "<late>"])
    pi = align(a, b, residual="tied")
    with pytest.raises(MismatchError, match=r"has 1 token\(s\) that its base .* lacks: '<late>'"):
        transport(tuned, base=a, onto=b, via=pi)


# ── adapters ─────────────────────────────────────────────────────────────────────────────────


def adapter_on(base, folder, config):
    """An adapter with random values on a base, as PEFT writes it."""
    import peft
    import transformers

    model = peft.get_peft_model(transformers.GPT2LMHeadModel.from_pretrained(base), config)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in (one for one in model.parameters() if one.requires_grad):
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def adapted(base, adapter, rows):
    import peft
    import transformers

    model = peft.PeftModel.from_pretrained(transformers.GPT2LMHeadModel.from_pretrained(base), adapter)
    with torch.no_grad():
        return model.double().eval()(input_ids=torch.tensor([rows])).logits[0]


def configs():
    import peft

    lora = {"r": 3, "fan_in_fan_out": True}
    return {
        "plain": peft.LoraConfig(**lora, target_modules=["c_attn"]),
        "embeddings": peft.LoraConfig(r=3, target_modules=["wte"]),
        "saved": peft.LoraConfig(**lora, target_modules=["c_attn"], modules_to_save=["wte"]),
        "tokens": peft.LoraConfig(
            **lora, target_modules=["c_attn"], trainable_token_indices={"wte": [2, 3, 5, 11, 20]}
        ),
        "tokens alone": peft.TrainableTokensConfig(token_indices=[2, 3, 5, 20], target_modules=["wte"]),
    }


@pytest.mark.parametrize("kind", ["plain", "embeddings", "saved", "tokens", "tokens alone"])
def test_adapters_move_by_token(kind, pair, tmp_path):
    a, b = pair("gpt2")
    adapter = adapter_on(a, tmp_path / "adapter", configs()[kind])
    pi = align(a, b, residual="tied")
    moved = transport(adapter, base=a, onto=b, via=pi).save(tmp_path / "moved")
    rows = [2, 5, 20, *ORDER[:6]]
    wanted = adapted(a, adapter, rows)[:, KEPT]
    found = adapted(b, moved, places(rows))[:, places(KEPT)]
    effect = (wanted - outputs_on(a, rows)[:, KEPT]).abs().max()
    assert effect > 1e-2
    assert (found - wanted).abs().max() < 1e-4 * effect
    merged = transport(adapter, base=a, onto=b, via=pi, full=True).save(tmp_path / "merged")
    if kind not in ("embeddings", "saved"):  # merged, they change the tied output matrix, too
        assert (outputs_on(merged, places(rows))[:, places(KEPT)] - wanted).abs().max() < 1e-4 * effect
    assert Model.open(merged).architecture.sizes["vocab"] == len(IN_B)


def test_trained_tokens_that_b_lacks(pair, tmp_path):
    import peft

    a, b = pair("gpt2")
    lost = peft.TrainableTokensConfig(token_indices=list(GONE), target_modules=["wte"])
    adapter = adapter_on(a, tmp_path / "adapter", lost)
    with pytest.raises(AdapterError, match="has 3 trained token.* B's vocabulary has none of them"):
        transport(adapter, base=a, onto=b, residual="tied", output=tmp_path / "moved")


def test_a_dora_of_embeddings_is_refused(pair, tmp_path):
    import peft

    a, b = pair("gpt2")
    adapter = adapter_on(a, tmp_path / "dora", peft.LoraConfig(r=3, target_modules=["wte"], use_dora=True))
    with pytest.raises(AdapterError, match="depends on all tokens together"):
        transport(adapter, base=a, onto=b, output=tmp_path / "moved")


def test_merging_moves_every_fine_tune_by_token(pair, tmp_path):
    a, b = pair("gpt2")
    tuned = [perturbed(a, tmp_path / name, size) for name, size in (("one", 0.1), ("two", 0.05))]
    merged = merge(tuned, base=a, onto=b, how="mean", residual="tied").save(tmp_path / "merged")
    alone = transport(tuned[0], base=a, onto=b, alpha=0.75, residual="tied").save(tmp_path / "alone")
    one, two = (load_file(folder / "model.safetensors") for folder in (merged, alone))
    assert all(torch.allclose(one[name], two[name], atol=1e-6) for name in two)


# ── methods that run models ──────────────────────────────────────────────────────────────────


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """A, B and a fine-tune of A: language models with byte-level tokenizers that differ by 4 % of tokens."""
    root, size = tmp_path_factory.mktemp("written"), 400
    whole = json.loads(trained_tokenizer(size).to_str())
    other, rows = rearranged(whole, range(300, 312))
    sizes = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_inner": 96, "vocab_size": size, "n_positions": 64}
    small = case("bytes", "gpt2", "GPT2LMHeadModel", "GPT2Config", sizes, bos_token_id=0, eos_token_id=0)
    a = small.save(root / "plain", 1)
    b = apply(align(a, a, method="random", residual="tied", seed=3), a).save(root / "moved")
    a = save_tokenizer(copied(a, root / "a"), whole)
    b = save_tokenizer(with_rows(b, root / "b", rows), other)
    config = json.loads((b / "config.json").read_text())
    ends = {"bos_token_id": rows.index(0), "eos_token_id": rows.index(0)}
    (b / "config.json").write_text(json.dumps({**config, **ends}))
    return a, b, perturbed(a, root / "tuned", 0.02)


@pytest.mark.parametrize("choice", [{"method": "functional"}, {"alpha": "auto"}])
def test_models_are_compared_on_common_tokens(choice, written):
    a, b, tuned = written
    moved = transport(tuned, base=a, onto=b, **choice).metadata()
    shift = moved["output_shift"]
    assert shift["direction"] > 0.999
    assert abs(shift["size"] - 1) < 0.01
    assert "passages of the bundled corpus" in shift["probes"]
    if "method" in choice:
        assert moved["alignment"]["advice"]["found"] > 0.99


def test_probes_have_common_tokens_only(written):
    a, b, _ = written
    view = Pair.open(a, b).a
    drawn = make_probes(ProbedModel(view, build(view, torch.float32)), 64, 0)
    unknown = torch.tensor(sorted(view.vocabulary.unshared))
    assert len(unknown) > 10
    for batch in drawn.batches:
        assert not torch.isin(batch["input_ids"], unknown).any()


def test_token_ids_are_no_calibration_data(written, tmp_path):
    a, b, _ = written
    save_file({"input_ids": torch.zeros(16, 20, dtype=torch.int64)}, tmp_path / "ids.safetensors")
    with pytest.raises(DataError, match="token ids, which mean different tokens"):
        align(a, b, method=preset("functional").changed(calibrate=str(tmp_path / "ids.safetensors")))


def test_a_refinement_learns_common_tokens(written, monkeypatch):
    for name, count in {"HELD_OUT": 16, "LEAST_HELD_OUT": 8, "WRITTEN": 32}.items():
        monkeypatch.setattr(refinement_inputs, name, count)
    a, b, tuned = written
    exact = transport(tuned, base=a, onto=b, refine=True, refine_steps=2).metadata()
    assert exact["refinement"]["before"]["synthetic"] == 1
    assert exact["refinement"]["divergence"][0] < 1e-4


def test_there_is_no_barrier_between_two_vocabularies(written, tmp_path):
    a, b, _ = written
    save_file({"input_ids": torch.zeros(16, 20, dtype=torch.int64)}, tmp_path / "ids.safetensors")
    with pytest.raises(MismatchError, match="different vocabularies"):
        one_barrier(a, b, via=None, data=tmp_path / "ids.safetensors")
