"""Folders of sentence-transformers: the encoder moves, and the modules behind it come along."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import peft
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from making import case, finetuned
from transfusion.errors import CheckpointError, MismatchError, OutputError
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.transport.apply import apply
from transfusion.transport.outcome import outcome_of
from transfusion.transport.transport import transport

SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 31,
    "max_position_embeddings": 16,
}
ENCODER = case("bert", "bert", "BertModel", "BertConfig", SIZES)
CLASSIFIER = case("bert", "bert", "BertForSequenceClassification", "BertConfig", SIZES, num_labels=1)
MEAN = ("Pooling", {"embedding_dimension": 24, "pooling_mode": "mean"})
BOTH = (
    "Pooling",
    {"word_embedding_dimension": 24, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
)
MAX = ("Pooling", {"word_embedding_dimension": 24, "pooling_mode_max_tokens": True})


def dense(inputs: int, outputs: int, **settings: object) -> tuple[str, dict]:
    return "Dense", {"in_features": inputs, "out_features": outputs, "bias": True, **settings}


def as_sentence_model(folder: Path, *modules: tuple[str, dict], seed: int = 0, within: str = "") -> Path:
    """The folder of an encoder with modules behind it, as sentence-transformers writes it."""
    if within:
        inner = folder.rename(folder.with_name("inner"))
        folder.mkdir()
        inner.rename(folder / within)
    generator = torch.Generator().manual_seed(seed)
    listed = [{"idx": 0, "name": "0", "path": within, "type": "sentence_transformers.models.Transformer"}]
    for number, (kind, config) in enumerate(modules, 1):
        path = folder / f"{number}_{kind}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        listed.append({"idx": number, "name": str(number), "path": path.name, "type": f"its.library.{kind}"})
        if kind == "Dense":
            size = config["out_features"], config["in_features"]
            tensors = {"linear.weight": torch.randn(size, generator=generator)}
            tensors["linear.bias"] = torch.randn(size[0], generator=generator)
            if within:  # as older releases store them
                torch.save(tensors, path / "pytorch_model.bin")
            else:
                save_file(tensors, path / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "query: "}}))
    (folder / within / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 12}))
    return folder


def embeddings(folder: Path) -> torch.Tensor:
    """What sentence-transformers computes for some texts."""
    listed = json.loads((folder / "modules.json").read_text())
    module = transformers.BertModel.from_pretrained(folder / listed[0]["path"]).eval()
    ids = torch.arange(28).reshape(4, 7)
    with torch.no_grad():
        tokens = found = module(input_ids=ids).last_hidden_state
        for one in listed[1:]:
            path = folder / one["path"]
            config = json.loads((path / "config.json").read_text())
            if one["type"].endswith("Pooling"):
                ways = {"mean": tokens.mean(1), "cls_token": tokens[:, 0], "mean_tokens": tokens.mean(1)}
                ways["max_tokens"] = tokens.amax(1)
                named = {key.removeprefix("pooling_mode_") for key, value in config.items() if value is True}
                named |= {config.get("pooling_mode")}
                found = torch.cat([way for name, way in ways.items() if name in named][::-1], -1)
            else:
                old = path / "pytorch_model.bin"
                state = torch.load(old) if old.exists() else load_file(path / "model.safetensors")
                found = torch.tanh(found @ state["linear.weight"].T + state["linear.bias"])
    return found


@pytest.fixture
def a(tmp_path):
    return ENCODER.save(tmp_path / "a", 0)


@pytest.fixture
def b(a, tmp_path):
    """A's function, its units in another order."""
    return apply(align(a, a, method="random", residual="tied", seed=3), a).save(tmp_path / "b")


move = partial(transport, method="guarded", residual="tied")


@pytest.mark.parametrize("within", ["", "0_Transformer"])
@pytest.mark.parametrize(
    "modules", [(MEAN, dense(24, 7)), (BOTH, dense(48, 9), dense(9, 5))], ids=["one", "two"]
)
def test_a_dense_layer_reads_the_units_where_they_are_in_b(modules, within, a, b, tmp_path):
    tuned = as_sentence_model(finetuned(ENCODER, a, tmp_path / "tuned"), *modules, within=within)
    moved = move(tuned, base=a, onto=b, output=tmp_path / "out")
    assert moved.metadata()["modules"] == [f"{n}_{kind}" for n, (kind, _) in enumerate(modules, 1)]
    out = tmp_path / "out"
    assert torch.allclose(embeddings(out), embeddings(tuned), atol=1e-5)
    assert json.loads((out / "modules.json").read_text())[0]["path"] == "", "the encoder is at the root"
    assert json.loads((out / "sentence_bert_config.json").read_text()) == {"max_seq_length": 12}
    assert json.loads((out / "config_sentence_transformers.json").read_text())["prompts"]
    assert (out / "2_Dense" / "model.safetensors").exists()


def test_another_run_replaces_the_output(a, b, tmp_path):
    tuned = as_sentence_model(finetuned(ENCODER, a, tmp_path / "tuned"), MEAN, dense(24, 7))
    for kind in ("SentenceTransformer", "CrossEncoder", "os.system"):
        (tuned / "config_sentence_transformers.json").write_text(json.dumps({"model_type": kind}))
        moved = move(tuned, base=a, onto=b, output=tmp_path / "out", force=True)
        known = kind if kind == "CrossEncoder" else "SentenceTransformer"
        load = f'import sentence_transformers; model = sentence_transformers.{known}("out")'
        assert outcome_of(moved.metadata(), "out").load == load
    assert torch.allclose(embeddings(tmp_path / "out"), embeddings(tuned), atol=1e-5)
    with pytest.raises(OutputError, match=r"2_Dense, which have files of their own\n.*give a folder"):
        move(tuned, base=a, onto=b, output=tmp_path / "out.safetensors")


def test_a_dense_layer_that_all_have_is_moved_as_a_change(a, tmp_path):
    as_sentence_model(a, MEAN, dense(24, 7))
    b = apply(align(a, a, method="random", residual="tied", seed=3), a).save(tmp_path / "b")
    assert torch.allclose(embeddings(a), embeddings(b), atol=1e-5)
    tuned = as_sentence_model(finetuned(ENCODER, a, tmp_path / "tuned"), MEAN, dense(24, 7), seed=5)
    name = "2_Dense/linear.weight"
    none, half, whole = (move(tuned, base=a, onto=b, alpha=x).state_dict()[name] for x in (0.0, 0.5, 1.0))
    assert torch.equal(none, Model.open(b).read(name))
    assert torch.allclose(half, (none + whole) / 2, atol=1e-6)
    move(tuned, base=a, onto=b, output=tmp_path / "out")
    assert torch.allclose(embeddings(tmp_path / "out"), embeddings(tuned), atol=1e-5)


def test_an_adapter_leaves_the_modules_of_its_bases_alone(a, tmp_path):
    as_sentence_model(a, MEAN, dense(24, 7))
    b = apply(align(a, a, method="random", residual="tied", seed=3), a).save(tmp_path / "b")
    module = transformers.BertModel.from_pretrained(a)
    config = peft.LoraConfig(r=3, target_modules=["query"], init_lora_weights=False)
    lora = peft.get_peft_model(module, config)
    lora.save_pretrained(tmp_path / "lora")
    move(tmp_path / "lora", base=a, onto=b, output=tmp_path / "moved")
    assert not (tmp_path / "moved" / "modules.json").exists(), "an adapter stays one"
    merged = move(tmp_path / "lora", base=a, onto=b, full=True, output=tmp_path / "full")
    assert merged.metadata()["modules"] == ["1_Pooling", "2_Dense"]
    tuned = shutil.copytree(a, tmp_path / "tuned")
    lora.merge_and_unload().save_pretrained(tuned)
    assert torch.allclose(embeddings(tmp_path / "full"), embeddings(tuned), atol=1e-5)
    assert not torch.allclose(embeddings(tmp_path / "full"), embeddings(a), atol=1e-3)


def test_units_may_be_rotated_before_a_dense_layer_that_reads_means(a, b, tmp_path):
    tuned = as_sentence_model(finetuned(ENCODER, a, tmp_path / "tuned"), MEAN, dense(24, 7))
    pi = align(a, b, method="functional", advice=False)
    transport(tuned, base=a, onto=b, via=pi, output=tmp_path / "out")
    assert torch.allclose(embeddings(tmp_path / "out"), embeddings(tuned), atol=1e-2)
    (tuned / "1_Pooling" / "config.json").write_text(json.dumps(MAX[1]))
    with pytest.raises(MismatchError, match="the largest value of each unit, and this π mixes units"):
        transport(tuned, base=a, onto=b, via=pi)


def test_modules_come_from_the_model_whose_class_the_output_has(a, b, tmp_path):
    as_sentence_model(b, MEAN, dense(24, 7))
    plain = finetuned(ENCODER, a, tmp_path / "plain")
    weights = load_file(plain / "model.safetensors")
    bare = {name: value for name, value in weights.items() if not name.startswith("pooler.")}
    save_file(bare, plain / "model.safetensors", {"format": "pt"})
    move(plain, base=a, onto=b, output=tmp_path / "as-b")
    assert (tmp_path / "as-b" / "modules.json").exists()
    own, theirs = (load_file(one / "2_Dense" / "model.safetensors") for one in (b, tmp_path / "as-b"))
    assert torch.equal(own["linear.weight"], theirs["linear.weight"])
    reranker = finetuned(CLASSIFIER, a, tmp_path / "reranker")
    move(reranker, base=a, onto=b, output=tmp_path / "as-reranker")
    assert not (tmp_path / "as-reranker" / "modules.json").exists()
    assert not (tmp_path / "as-reranker" / "2_Dense").exists()
    ids = {"input_ids": torch.arange(28).reshape(4, 7)}
    scores = [
        transformers.BertForSequenceClassification.from_pretrained(one).eval()(**ids).logits
        for one in (reranker, tmp_path / "as-reranker")
    ]
    assert scores[0].shape == (4, 1)
    assert torch.allclose(*scores, atol=1e-5)
    other = as_sentence_model(finetuned(ENCODER, a, tmp_path / "other", 8), MEAN)
    move(other, base=a, onto=b, output=tmp_path / "as-other")
    assert not (tmp_path / "as-other" / "2_Dense").exists(), "the fine-tune has none"
    gram = [(found := embeddings(one)) @ found.T for one in (other, tmp_path / "as-other")]
    assert torch.allclose(*gram, atol=1e-4)


def test_what_is_not_understood_is_named(a, b, tmp_path):
    tuned = as_sentence_model(
        finetuned(ENCODER, a, tmp_path / "tuned"), MEAN, dense(24, 24, use_residual=True)
    )
    with pytest.raises(MismatchError, match=r"2_Dense \(Dense\) has weights behind the encoder"):
        move(tuned, base=a, onto=b)
    assert Model.open(tuned).family.name == "bert", "as a base it is an encoder"


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        ([{"path": "../../other", "type": "Transformer"}], "the link leads outside"),
        (
            [{"path": "", "type": "Transformer"}, {"path": "1_Pooling/..", "type": "Dense"}],
            "is no folder beside it",
        ),
        ([{"path": "", "type": "Transformer"}, {"path": 3, "type": "Dense"}], "modules.json: 1.path"),
    ],
)
def test_modules_elsewhere_are_refused(listed, why, a, tmp_path):
    as_sentence_model(a, MEAN)
    (a / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match=why):
        Model.open(a)


def test_odd_ways_to_pool_are_refused(a):
    as_sentence_model(a, ("Pooling", {"pooling_mode": ["mean"] * 17}), dense(24, 7))
    with pytest.raises(CheckpointError, match="1_Pooling: pooling_mode: list should have at most 16 items"):
        Model.open(a)


def test_a_file_of_another_program_is_not_read(a):
    (a / "modules.json").write_text("{}")
    assert Model.open(a).checkpoint.sentence is None


def test_the_classifier_of_setfit_is_never_loaded(a, b, tmp_path):
    tuned = as_sentence_model(finetuned(ENCODER, a, tmp_path / "tuned"), MEAN)
    trap = b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR."
    (tuned / "model_head.pkl").write_bytes(trap)
    (b / "model_head.pkl").write_bytes(trap)
    moved = move(tuned, base=a, onto=b, output=tmp_path / "out")
    assert moved.notes == [
        "model_head.pkl is a program, which is not read: the output has no classifier; fit one on its embeddings"
    ]
    assert not (tmp_path / "out" / "model_head.pkl").exists()
    assert not (tmp_path / "ran").exists()


WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "good",
    "bad",
    "film",
    "story",
    "dull",
    "bright",
    "the",
    "a",
    "was",
    "is",
    "very",
    "not",
    "actor",
    "scene",
]
TEXTS = ["the film was very good", "it is a dull story", "a bright scene", "the actor was not bad"]


def with_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of words into a model's folder."""
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    marks = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_the_packages_load_what_was_moved(a, b, tmp_path):
    """Of sentence-transformers and SetFit, where they are installed; run with 6.2 and 1.2."""
    packages = pytest.importorskip("sentence_transformers")
    setfit = pytest.importorskip("setfit")
    for folder in (a, b):
        with_tokenizer(folder)
    load = partial(packages.SentenceTransformer, device="cpu")
    tuned = with_tokenizer(as_sentence_model(finetuned(ENCODER, a, tmp_path / "tuned"), MEAN, dense(24, 7)))
    listed = json.loads((tuned / "modules.json").read_text())
    for one in listed:
        kind = one["type"].rpartition(".")[2]
        one["type"] = f"sentence_transformers.models.{kind}"
    (tuned / "modules.json").write_text(json.dumps(listed))
    load(str(tuned)).save_pretrained(str(tmp_path / "sentences"))
    head = setfit.SetFitModel.from_pretrained(str(tmp_path / "sentences"))
    head.fit(TEXTS, [1, 0, 1, 0], num_epochs=1)
    head.save_pretrained(str(tmp_path / "setfit"))
    rank = packages.CrossEncoder(
        str(with_tokenizer(finetuned(CLASSIFIER, a, tmp_path / "rank"))), device="cpu"
    )
    rank.save_pretrained(str(tmp_path / "reranker"))
    for name in ("sentences", "setfit", "reranker"):
        move(tmp_path / name, base=a, onto=b, output=tmp_path / f"{name}-on-b")
    wanted = load(str(tmp_path / "sentences")).encode(TEXTS)
    found = [load(str(tmp_path / "sentences-on-b")).encode(TEXTS)]
    found.append(setfit.SetFitModel.from_pretrained(str(tmp_path / "setfit-on-b")).model_body.encode(TEXTS))
    assert wanted.shape == (4, 7)
    assert wanted.std() > 0.1
    assert all(abs(wanted - one).max() < 1e-5 for one in found)
    pairs = [(one, other) for one in TEXTS for other in TEXTS]
    scores = packages.CrossEncoder(str(tmp_path / "reranker-on-b"), device="cpu").predict(pairs)
    assert rank.predict(pairs).std() > 1e-2
    assert abs(rank.predict(pairs) - scores).max() < 1e-5
