"""Evaluation: what is measured is what the libraries themselves compute, and what cannot be is refused."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import transfusion
from cases.first import CLIP_TEXT, CLIP_VISION, OPEN_CLIP, _keep_open_clip, _open_clip
from cases.vision import SIGLIP, SIGLIP_TEXT
from making import Case, case
from small_models import BERT, CASES, GPT2, VIT, often
from tests.evaluation.test_interpolation import one_barrier
from transfusion.data.dataset import Dataset
from transfusion.data.examples import Examples, ImageFile
from transfusion.errors import ArchitectureError, CheckpointError, DataError, MismatchError, SettingError
from transfusion.evaluation.classes import SUPPLIED, Classes
from transfusion.evaluation.evaluate import evaluate
from transfusion.evaluation.evaluator import batch_size_for
from transfusion.evaluation.inputs import ImageProcessor
from transfusion.evaluation.scores import Answers, Score, f1, gain, gain_interval, matthews, score_interval
from transfusion.evaluation.task import EvaluationData
from transfusion.model.model import Model
from transfusion.running.probes.probed_model import ProbedModel
from transfusion.runtime.progress import Progress
from wording import GPT2_WORDS, WORDS, put_tokenizer

OPEN_CLIP_FILE = "open_clip_config.json"
PETS = ("cat", "great dane", "owl")
TEMPLATES = ("a picture of a {}.", "the {} over there")
TEXTS = ["The sun was low.", "We walked home along the river.", "It rained.", "A long way to go", "No", "Yes"]
CLASSIFIER = case(
    "bert-texts",
    "bert",
    "BertForSequenceClassification",
    "BertConfig",
    {**BERT, "vocab_size": WORDS, "num_labels": 2, "max_position_embeddings": 40},
)


def made_clip(kind: str) -> Any:
    import transformers

    text = {"vocab_size": WORDS, "max_position_embeddings": 40}
    if kind == "siglip":
        config = transformers.SiglipConfig(text_config={**SIGLIP_TEXT, **text}, vision_config=SIGLIP)
        return transformers.SiglipModel(config)
    config = transformers.CLIPConfig(
        text_config={**CLIP_TEXT, **text, "eos_token_id": 3}, vision_config=CLIP_VISION, projection_dim=11
    )
    return transformers.CLIPModel(config)


WHOLE = {**OPEN_CLIP, "text_cfg": {**OPEN_CLIP["text_cfg"], "vocab_size": 49408, "context_length": 40}}
READERS = {
    "clip": Case("clip-words", lambda: made_clip("clip"), "clip"),
    "siglip": Case("siglip-words", lambda: made_clip("siglip"), "siglip"),
    "open_clip": Case(
        "open_clip-words",
        lambda: _open_clip(WHOLE),
        "open_clip",
        lambda model, folder: _keep_open_clip(WHOLE, model, folder),
    ),
}


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("evaluation")


@pytest.fixture(scope="session")
def two_towers(place):
    """Models that compare images with texts, with what belongs into their folders."""
    done: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in done:
            folder = READERS[kind].save(place / kind, 1)
            if kind != "open_clip":
                put_tokenizer(folder)
                info = {"size": {"shortest_edge": 12}, "crop_size": {"height": 12, "width": 12}}
                info |= {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4], "resample": 3}
                info |= {"do_center_crop": True, "image_processor_type": "CLIPImageProcessor"}
                (folder / "preprocessor_config.json").write_text(json.dumps(info))
            done[kind] = folder
        return done[kind]

    return make


@pytest.fixture(scope="session")
def pets(place) -> Path:
    """Nine noisy images of three classes, in folders that are spelt a little differently."""
    generator = np.random.default_rng(0)
    for number in range(9):
        name = ("Cat", "great_dane", "OWL")[number % 3]
        (place / "pets" / name).mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 255, (15 + number, 23, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / "pets" / name / f"{number}.png")
    return place / "pets"


@pytest.fixture(scope="session")
def named(place) -> Path:
    file = place / "classes.json"
    file.write_text(json.dumps({"classes": PETS, "templates": TEMPLATES}))
    return file


@pytest.fixture(scope="session")
def classifier(place) -> Path:
    return put_tokenizer(CLASSIFIER.save(place / "classifier", 1))


def table(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def measured(folder: Path, data: EvaluationData, **more: Any) -> Score:
    model = Model.open(folder)
    return data.evaluator(model, data.live(model), **more).measure()


def refusal(folder: Path, data: EvaluationData, kind: type[Exception] = DataError) -> str:
    with pytest.raises(kind) as caught:
        measured(folder, data)
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value.message


def score_of(logits: torch.Tensor, targets: list[int]) -> tuple[float, float]:
    right = torch.tensor(targets)
    loss = torch.nn.functional.cross_entropy(logits, right)
    return float(loss), float((logits.argmax(-1) == right).float().mean())


def opened(pets: Path) -> tuple[list[Image.Image], list[int]]:
    """All images in the order of the folders, and their classes."""
    files = sorted(pets.rglob("*.png"))
    return [Image.open(file).convert("RGB") for file in files], [
        ["Cat", "OWL", "great_dane"].index(file.parent.name) for file in files
    ]


# ── zero-shot ────────────────────────────────────────────────────────────────────────────────


def by_transformers(folder: Path, pets: Path, kind: str) -> torch.Tensor:
    """Zero-shot as the library's own documentation does it, sentence by sentence."""
    import transformers

    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images, _ = opened(pets)
    processor = transformers.CLIPImageProcessorPil.from_pretrained(folder)
    whole = {"padding": "max_length", "max_length": 40} if kind == "siglip" else {"padding": True}
    with torch.no_grad():
        seen = model.get_image_features(**processor(images, return_tensors="pt")).pooler_output
        classes = []
        for name in PETS:
            found = tokenizer([one.format(name) for one in TEMPLATES], return_tensors="pt", **whole)
            given = {"input_ids": found["input_ids"]}
            if kind != "siglip":
                given["attention_mask"] = found["attention_mask"]
            read = model.get_text_features(**given).pooler_output
            classes.append((read / read.norm(dim=-1, keepdim=True)).mean(0))
        info = torch.stack([one / one.norm() for one in classes])
        return model.logit_scale.exp() * (seen / seen.norm(dim=-1, keepdim=True)) @ info.T


def by_open_clip(folder: Path, pets: Path) -> torch.Tensor:
    import open_clip

    model, prepare = open_clip.create_model_from_pretrained(f"local-dir:{folder}")
    tokenize = open_clip.get_tokenizer(f"local-dir:{folder}")
    images, _ = opened(pets)
    model.eval()
    with torch.no_grad():
        seen = model.encode_image(torch.stack([prepare(one) for one in images]), normalize=True)
        classes = [
            model.encode_text(tokenize([one.format(name) for one in TEMPLATES]), normalize=True).mean(0)
            for name in PETS
        ]
        return model.logit_scale.exp() * seen @ torch.stack([one / one.norm() for one in classes]).T


@pytest.mark.parametrize("kind", ["clip", "siglip", "open_clip"])
def test_zero_shot_is_what_the_library_computes(kind, two_towers, pets, named):
    folder = two_towers(kind)
    logits = by_open_clip(folder, pets) if kind == "open_clip" else by_transformers(folder, pets, kind)
    targets = [{0: 0, 1: 2, 2: 1}[one] for one in opened(pets)[1]]  # folders by name, classes by file
    loss, accuracy = score_of(logits, targets)
    found = measured(folder, EvaluationData(pets, classes=named))
    assert found.loss == pytest.approx(loss, abs=1e-5)
    assert found.accuracy == found.value == pytest.approx(accuracy)
    for batch in (1, 4):
        again = measured(folder, EvaluationData(pets, classes=named), batch=batch)
        assert again.loss == pytest.approx(found.loss, abs=1e-5)
        assert again.accuracy == found.accuracy
    assert measured(folder, EvaluationData(pets, classes=named)) == found


def test_prompts_are_read_by_the_text_tower_of_the_moment(two_towers, pets, named):
    model = Model.open(two_towers("clip"))
    data = EvaluationData(pets, classes=named)
    live = data.live(model)
    evaluator = data.evaluator(model, live)
    before = evaluator.measure()
    name = "text_projection.weight"
    with live.holding({name: 2 * live.module.get_parameter(name).data.flip(0)}):
        assert evaluator.measure().loss != before.loss
    assert evaluator.measure() == before
    reads: list[int] = []
    original = live.module.get_text_features
    live.module.get_text_features = lambda **given: reads.append(1) or original(**given)
    assert evaluator.measure() == before
    assert len(reads) == 1  # once for all images


def test_losses_have_gradients(two_towers, pets, named):
    model = Model.open(two_towers("clip"))
    data = EvaluationData(pets, classes=named)
    live = data.live(model)
    evaluator = data.evaluator(model, live, batch=4)
    losses = list(evaluator.losses())
    assert len(losses) == 3
    mean = sum(loss.item() * size for loss, size in zip(losses, (4, 4, 1), strict=True)) / 9
    assert mean == pytest.approx(evaluator.measure().loss, abs=1e-5)
    sum(losses).backward()
    for name in ("visual_projection.weight", "text_projection.weight"):
        assert live.module.get_parameter(name).grad.abs().max() > 0
    for name, parameter in live.module.named_parameters():
        parameter.requires_grad_(name.startswith("vision"))
        parameter.grad = None
    next(evaluator.losses()).backward()
    assert live.module.get_parameter("text_projection.weight").grad is None


# ── heads on images ──────────────────────────────────────────────────────────────────────────


def test_images_for_a_model_with_a_head(place, pets):
    import transformers

    config = transformers.ViTConfig(**{**VIT, "num_labels": 3})
    config.id2label = {0: "owl", 1: "Great-Dane", 2: "cat"}
    config.label2id = {name: number for number, name in config.id2label.items()}
    model = transformers.ViTForImageClassification(config).eval()
    folder = place / "vit-pets"
    model.save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": 12, "width": 12}).save_pretrained(folder)
    images, order = opened(pets)
    prepared = transformers.ViTImageProcessorPil.from_pretrained(folder)(images, return_tensors="pt")
    with torch.no_grad():
        logits = model(**prepared).logits
    loss, accuracy = score_of(logits, [(2, 0, 1)[one] for one in order])
    found = measured(folder, EvaluationData(pets))
    assert (found.loss, found.accuracy) == (pytest.approx(loss, abs=1e-5), pytest.approx(accuracy))
    aliases = Classes("file", ("cat", "great dane", "owl"), (), ("Cat", "great_dane", "OWL"))
    assert measured(folder, EvaluationData(pets, classes=aliases)) == found


def test_without_a_preparation_a_note_says_so(place, made, pets):
    folder = CASES["vit-classifier"].save(place / "plain", 1)
    seven = Classes("file", ("cat", "great dane", "owl", "a", "b", "c", "d"), ())
    data = EvaluationData(pets, classes=seven)
    model = Model.open(folder)
    evaluator = data.evaluator(model, data.live(model))
    assert evaluator.notes == (
        f"{folder}: nothing in its folder says how images are prepared; they are cropped to the frame and"
        " scaled as synthetic images are",
    )
    assert 0 <= evaluator.measure().accuracy <= 1
    assert evaluator.metadata() == {
        "data": str(pets),
        "examples": 9,
        "question": "class of every example",
        "metric": "accuracy",
        "classes": 7,
    }


def test_timm_sees_what_timm_prepares(place, pets):
    import timm

    folder = CASES["timm-vit"].save(place / "timm", 1)
    config = json.loads((folder / "config.json").read_text())
    about = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4], "crop_pct": 0.9, "interpolation": "bilinear"}
    config["pretrained_cfg"] = {**config.get("pretrained_cfg", {}), **about}
    (folder / "config.json").write_text(json.dumps(config))
    pictures = [ImageFile.at(one) for one in sorted(pets.rglob("*.png"))]
    data = EvaluationData(Examples("pets", images=pictures, labels=[0] * 9))
    model = Model.open(folder)
    evaluator = data.evaluator(model, data.live(model))
    prepare = timm.data.create_transform(input_size=(3, 12, 12), is_training=False, **about)
    expected = torch.stack([prepare(one) for one in opened(pets)[0]])
    found = next(evaluator.batch_source.batches(9)).inputs["pixel_values"]
    assert torch.allclose(found, expected, atol=1e-6)
    assert not evaluator.notes


def test_a_preparation_that_does_not_resize(pets, tmp_path):
    folder = CASES["vit-classifier"].save(tmp_path / "vit", 1)
    (folder / "preprocessor_config.json").write_text(json.dumps({"do_resize": False}))
    pictures = [ImageFile.at(one) for one in sorted(pets.rglob("*.png"))]
    data = EvaluationData(Examples("pets", images=pictures, labels=[0] * 9))
    model = Model.open(folder)
    processor = ImageProcessor.of(ProbedModel(model, data.live(model).module))
    with pytest.raises(DataError, match=r"when prepared, and .* is \(3, 15, 23\)"):
        processor.inputs(pictures)
    same = Image.new("RGB", (12, 12), (255, 0, 51))
    seen = processor.inputs([shown(same)])["pixel_values"]
    assert torch.allclose(seen[0, :, 0, 0], torch.tensor([1.0, -1.0, -0.6]))


SIZES = [(31, 18), (18, 31), (7, 40), (25, 25), (5, 5)]


def noise(size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(np.random.default_rng(1).integers(0, 255, (*size, 3), dtype=np.uint8))


def shown(image: Image.Image) -> ImageFile:
    from io import BytesIO

    held = BytesIO()
    image.save(held, "PNG")
    return ImageFile("image", held.getvalue())


def processor_of(folder: Path) -> ImageProcessor:
    model = Model.open(folder)
    return ImageProcessor.of(ProbedModel(model, EvaluationData("unused").live(model).module))


def prepared(folder: Path, image: Image.Image) -> torch.Tensor:
    return processor_of(folder).inputs([shown(image)])["pixel_values"][0]


def with_settings(folder: Path, section: str, settings: dict[str, Any]) -> Path:
    file = next(one for one in folder.glob("*config.json") if one.name in ("config.json", OPEN_CLIP_FILE))
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, section: {**(config.get(section) or {}), **settings}}))
    return folder


@pytest.mark.parametrize("way", ["shortest", "longest", "squash"])
def test_images_are_prepared_as_by_open_clip(way, tmp_path):
    from open_clip.transform import image_transform

    settings = {"resize_mode": way, "interpolation": "bilinear", "fill_color": 9, "mean": 0.4, "std": 0.2}
    folder = with_settings(CASES["open_clip"].save(tmp_path / "clip", 1), "preprocess_cfg", settings)
    frame = tuple(processor_of(folder).inputs([shown(noise((9, 9)))])["pixel_values"].shape[2:])
    theirs = image_transform(frame, is_train=False, **settings)
    for size in SIZES:
        assert torch.equal(theirs(noise(size)), prepared(folder, noise(size)))


@pytest.mark.parametrize("name", ["CLIP", "ViT", "Siglip", "DeiT", "Bit", "ConvNext"])
def test_images_are_prepared_as_by_transformers(name, tmp_path):
    import transformers

    small = {
        "CLIP": {"size": {"shortest_edge": 14}, "crop_size": {"height": 11, "width": 11}},
        "Bit": {"size": {"shortest_edge": 9}, "crop_size": {"height": 12, "width": 12}},
        "DeiT": {"size": {"height": 15, "width": 15}, "crop_size": {"height": 12, "width": 12}},
        "ConvNext": {"size": {"shortest_edge": 9}},
    }.get(name, {"size": {"height": 12, "width": 10}})
    theirs = getattr(transformers, f"{name}ImageProcessorPil")(**small)
    folder = CASES["vit-classifier"].save(tmp_path / "vit", 1)
    theirs.save_pretrained(folder)
    for size in SIZES:
        expected = theirs(noise(size), return_tensors="pt")["pixel_values"][0]
        assert torch.equal(expected, prepared(folder, noise(size)))


def test_grey_images_for_a_model_with_one_channel(tmp_path):
    import transformers

    folder = tmp_path / "grey"
    config = transformers.ViTConfig(**{**VIT, "num_channels": 1})
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    info = {"image_processor_type": "ViTImageProcessor", "do_resize": False, "rescale_factor": 1 / 16}
    info |= {"image_mean": [0.5], "image_std": [0.25]}
    (folder / "preprocessor_config.json").write_text(json.dumps(info))
    pixels = np.arange(144, dtype=np.uint8).reshape(12, 12)
    expected = (torch.from_numpy(pixels).float()[None] / 16 - 0.5) / 0.25
    assert torch.allclose(prepared(folder, Image.fromarray(pixels)), expected, atol=1e-5)


EVIL = {"AutoImageProcessor": "evil.Evil"}


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"size": {"height": 12}}, "size"),
        ({"size": {"height": 12, "width": 12}, "resample": 77}, "resampling filter"),
        ({"size": 12, "image_mean": [0.5, 0.5]}, "mean must have"),
        ({"size": 12, "auto_map": EVIL}, None),
        ({"size": 12, "image_processor_type": "Evil", "auto_map": EVIL}, None),
    ],
    ids=str,
)
def test_odd_preparations_are_refused_and_run_no_code(settings, refused, tmp_path):
    folder = CASES["vit-classifier"].save(tmp_path / "vit", 1)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    if refused is None:
        assert prepared(folder, noise((20, 20))).shape == (3, 12, 12)
    else:
        with pytest.raises(DataError, match=refused):
            prepared(folder, noise((20, 20)))
    assert not (tmp_path / "ran").exists()


def test_a_transform_that_timm_does_not_know_is_refused(tmp_path):
    folder = with_settings(
        CASES["timm-vit"].save(tmp_path / "timm", 1), "pretrained_cfg", {"interpolation": "magic"}
    )
    with pytest.raises(DataError, match=r"the preparation of images .* is not understood \('magic'\)"):
        processor_of(folder)


# ── texts ────────────────────────────────────────────────────────────────────────────────────


def test_texts_are_classed_as_by_the_library(classifier, tmp_path):
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(classifier)
    labels = [0, 1, 1, 0, 1, 0]
    rows = [{"sentence": text, "label": label} for text, label in zip(TEXTS, labels, strict=True)]
    with torch.no_grad():
        logits = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in TEXTS])
    loss, accuracy = score_of(logits, labels)
    data = EvaluationData(table(tmp_path / "texts.jsonl", rows))
    for batch in (None, 1, 4):
        found = measured(classifier, data, batch=batch)
        assert (found.loss, found.accuracy) == (pytest.approx(loss, abs=1e-5), pytest.approx(accuracy))
    assert measured(classifier, data) == measured(classifier, data)
    named = [{**row, "label": f"label_{row['label']}"} for row in rows]
    assert measured(classifier, EvaluationData(table(tmp_path / "named.jsonl", named))).loss == pytest.approx(
        loss, abs=1e-5
    )


def test_glue_is_known_by_name(classifier, tmp_path):
    labels = [0, 1, 1, 0, 1, 0]
    first = table(
        tmp_path / "glue" / "cola" / "dev.jsonl",
        [{"sentence": text, "label": label} for text, label in zip(TEXTS, labels, strict=True)],
    )
    found = measured(classifier, EvaluationData(first.parent, split="dev"))
    assert found.metric == "matthews"
    assert found.value == found.metrics["matthews"]
    assert set(found.metrics) == {"accuracy", "matthews", "loss"}
    pairs = [
        {"question1": text, "question2": "Why?", "label": label}
        for text, label in zip(TEXTS, labels, strict=True)
    ]
    found = measured(classifier, EvaluationData(table(tmp_path / "qqp.jsonl", pairs)))
    assert found.metric == "accuracy"
    assert set(found.metrics) == {"accuracy", "f1", "loss"}
    assert (
        measured(classifier, EvaluationData(tmp_path / "qqp.jsonl", metric="f1")).value == found.metrics["f1"]
    )
    unlabelled = table(tmp_path / "rte.jsonl", [{"sentence1": "a", "sentence2": "b", "label": -1}])
    assert "example 1 has label -1, and there are 2 classes" in refusal(
        classifier, EvaluationData(unlabelled)
    )


def test_pairs_are_told_apart(place, tmp_path):
    """The second text has other token types, as the tokenizer says."""
    import transformers
    from tokenizers.processors import TemplateProcessing

    folder = put_tokenizer(CLASSIFIER.save(tmp_path / "pairs", 1))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = [{"sentence1": one, "sentence2": "It rained.", "label": 1} for one in TEXTS]
    whole = [tokenizer(row["sentence1"], row["sentence2"], return_tensors="pt") for row in rows]
    assert int(whole[0]["token_type_ids"].max()) == 1
    with torch.no_grad():
        loss, _ = score_of(torch.cat([model(**one).logits for one in whole]), [1] * len(rows))
    assert measured(folder, EvaluationData(table(tmp_path / "two.jsonl", rows))).loss == pytest.approx(
        loss, abs=1e-5
    )


@pytest.mark.parametrize("pad", [0, None])
def test_a_decoder_that_classes_texts(pad, tmp_path):
    """It answers at the last token of every text, which it finds by the padding, or one text at a time."""
    import transformers

    settings = {**GPT2, "vocab_size": WORDS, "num_labels": 2, "pad_token_id": pad, "n_positions": 40}
    decoder = case("gpt2-texts", "gpt2", "GPT2ForSequenceClassification", "GPT2Config", settings)
    folder = put_tokenizer(decoder.save(tmp_path / "decoder", 1))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = torch.cat([model(**_ids(tokenizer(text, return_tensors="pt"))).logits for text in TEXTS])
    loss, _ = score_of(logits, [1] * len(TEXTS))
    data = EvaluationData(table(tmp_path / "texts.jsonl", [{"text": text, "label": 1} for text in TEXTS]))
    opened_model = Model.open(folder)
    evaluator = data.evaluator(opened_model, data.live(opened_model), batch=4)
    assert evaluator.measure().loss == pytest.approx(loss, abs=1e-5)
    assert evaluator.batch == (4 if pad == 0 else 1)
    assert bool(evaluator.notes) == (pad is None)


def test_next_tokens_of_texts(place, tmp_path):
    import transformers

    folder = put_tokenizer(GPT2_WORDS.save(place / "speaker", 1))
    (tmp_path / "lines.txt").write_text("\n".join(["It rained.", "No", "We go"]))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for text in ("It rained.", "No", "We go"):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            loss = model(input_ids=ids, labels=ids).loss
        total, count = total + float(loss) * (ids.shape[1] - 1), count + ids.shape[1] - 1
    found = measured(folder, EvaluationData(tmp_path / "lines.txt"))
    assert found.metric == "loss"
    assert found.value == found.loss == pytest.approx(total / count, abs=1e-5)
    assert found.metrics["perplexity"] == pytest.approx(np.exp(total / count), rel=1e-4)
    assert (
        measured(folder, EvaluationData(tmp_path / "lines.txt", metric="perplexity")).value
        == found.metrics["perplexity"]
    )


def test_long_texts_are_refused_or_cut(place, tmp_path):
    import transformers

    folder = put_tokenizer(GPT2_WORDS.save(tmp_path / "speaker", 1))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    long = " ".join(["We walked home along the river."] * 3)
    (tmp_path / "lines.txt").write_text(f"It rained.\n{long}\n")
    length = len(tokenizer(long)["input_ids"])
    data = EvaluationData(tmp_path / "lines.txt")
    assert refusal(folder, data) == (
        f"{tmp_path / 'lines.txt'}: example 2 has {length} tokens, and GPT2LMHeadModel takes 13"
    )
    model, data = Model.open(folder), EvaluationData(tmp_path / "lines.txt", truncate=True)
    evaluator = data.evaluator(model, data.live(model))
    assert evaluator.notes == (f"{tmp_path / 'lines.txt'}: 1 of 2 texts were truncated",)
    assert evaluator.measure().loss > 0
    assert [len(one["input_ids"]) for one in evaluator.batch_source.examples][1] == 13


def test_empty_texts_are_refused(tmp_path):
    folder = put_tokenizer(GPT2_WORDS.save(tmp_path / "speaker", 1))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    file = table(tmp_path / "texts.jsonl", [{"text": "No"}, {"text": ""}])
    assert refusal(folder, EvaluationData(file)) == f"{file}: example 2 has no tokens"


# ── heads from elsewhere ─────────────────────────────────────────────────────────────────────


def test_a_borrowed_head_on_a_bare_encoder(classifier, place, tmp_path):
    import transformers

    settings = {**BERT, "vocab_size": WORDS, "max_position_embeddings": 40}
    bare = case("bert-bare", "bert", "BertModel", "BertConfig", settings).save(tmp_path / "bare", 5)
    labels = [0, 1, 1, 0, 1, 0]
    rows = [{"text": text, "label": label} for text, label in zip(TEXTS, labels, strict=True)]
    file = table(tmp_path / "texts.jsonl", rows)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    encoder = transformers.AutoModel.from_pretrained(bare)
    head = {name: one.clone() for name, one in model.bert.pooler.state_dict().items()}
    model.bert.load_state_dict(encoder.state_dict())
    model.bert.pooler.load_state_dict(head)  # the table calls the pooler a head
    tokenizer = transformers.AutoTokenizer.from_pretrained(classifier)
    with torch.no_grad():
        logits = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in TEXTS])
    loss, accuracy = score_of(logits, labels)
    found = measured(bare, EvaluationData(file, task_head=classifier))
    assert (found.loss, found.accuracy) == (pytest.approx(loss, abs=1e-5), pytest.approx(accuracy))
    assert refusal(bare, EvaluationData(file)).endswith("no tokenizer in the model's folder")
    put_tokenizer(bare)
    message = refusal(bare, EvaluationData(file), ArchitectureError)
    assert message == f"{bare}: BertModel has no task head for {file}"
    headless = case("bert-bare", "bert", "BertModel", "BertConfig", settings).save(tmp_path / "headless", 6)
    assert refusal(bare, EvaluationData(file, task_head=headless), ArchitectureError) == (
        f"{headless}: BertModel has no task head for {file}"
    )
    vit = case("vit", "vit", "ViTModel", "ViTConfig", VIT).save(tmp_path / "vit", 1)
    assert "whose task head was asked for, a vit" in refusal(
        bare, EvaluationData(file, task_head=vit), MismatchError
    )


@pytest.mark.parametrize(("kind", "normalise"), [("clip", True), ("open_clip", False)])
def test_a_linear_head_on_texts_and_images(kind, normalise, two_towers, pets, tmp_path):
    import open_clip
    import transformers

    folder = two_towers(kind)
    generator = torch.Generator().manual_seed(0)
    head = {"weight": torch.randn(2, 11, generator=generator), "bias": torch.randn(2, generator=generator)}
    file = tmp_path / "head.safetensors"
    save_file(head, file, {"normalise": "true"} if normalise else None)
    if kind == "clip":
        model = transformers.AutoModel.from_pretrained(folder).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        with torch.no_grad():
            read = torch.cat(
                [
                    model.get_text_features(**_ids(tokenizer(one, return_tensors="pt"))).pooler_output
                    for one in TEXTS
                ]
            )
    else:
        model, _ = open_clip.create_model_from_pretrained(f"local-dir:{folder}")
        with torch.no_grad():
            read = model.eval().encode_text(open_clip.get_tokenizer(f"local-dir:{folder}")(TEXTS))
    read = torch.nn.functional.normalize(read, dim=-1) if normalise else read
    labels = [0, 1, 1, 0, 1, 0]
    loss, accuracy = score_of(read @ head["weight"].T + head["bias"], labels)
    rows = [{"sentence": text, "label": label} for text, label in zip(TEXTS, labels, strict=True)]
    texts = table(tmp_path / "sst2.jsonl", rows)
    found = measured(folder, EvaluationData(texts, task_head=file))
    assert (found.loss, found.accuracy) == (pytest.approx(loss, abs=1e-5), pytest.approx(accuracy))
    message = refusal(folder, EvaluationData(texts), ArchitectureError)
    assert message.endswith("has no task head to classify them")
    save_file({"weight": torch.zeros(3, 11)}, file)
    assert measured(folder, EvaluationData(pets, task_head=file)).accuracy == pytest.approx(1 / 3)
    save_file({"weight": torch.zeros(3, 12)}, file)
    assert "made for features of width 12" in refusal(
        folder, EvaluationData(pets, task_head=file), MismatchError
    )
    save_file({"weight": torch.zeros(3)}, file)
    assert (
        refusal(folder, EvaluationData(pets, task_head=file)) == f"{file}: no linear task head: weight (3,)"
    )
    save_file({"mystery": torch.zeros(3)}, file)
    assert (
        refusal(folder, EvaluationData(pets, task_head=file))
        == f"{file}: neither a linear task head nor a model: mystery"
    )


def test_a_head_that_is_replaced_is_noted(classifier, tmp_path):
    other, tuned = (put_tokenizer(CLASSIFIER.save(tmp_path / str(seed), seed)) for seed in (2, 3))
    file = table(tmp_path / "texts.jsonl", [{"text": "Yes", "label": 1}])
    note = f"{other} has a task head of its own; it was replaced by that of {tuned}"
    assert note in evaluate([other, tuned], data=EvaluationData(file, task_head=tuned)).notes
    assert len(evaluate([other, tuned], data=EvaluationData(file, task_head=tuned)).notes) == 1
    assert evaluate([tuned], data=EvaluationData(file, task_head=tuned), against=other).notes == ()
    notes = evaluate([other], data=EvaluationData(file, task_head=tuned), against=classifier).notes
    assert notes == (note,)
    assert evaluate([other], data=EvaluationData(file)).notes == ()


# ── adapters ─────────────────────────────────────────────────────────────────────────────────


def with_lora(base: Path, folder: Path, into: str, **settings: Any) -> Path:
    import peft

    from tests.transport.test_folded_adapters import adapted

    config = {"r": 3, "lora_alpha": 5, **{key: settings.pop(key) for key in list(settings) if key in LORA}}
    return adapted(base, folder, peft.LoraConfig(**config), into=into, **settings)


LORA = ("target_modules", "task_type", "modules_to_save", "use_dora")


def merged(adapter: Path, base: Path, folder: Path) -> Path:
    """The copy on disk that users would otherwise have to make."""
    moved = transfusion.transport(adapter, base=base, onto=base, method="naive", full=True)
    saved = moved.save(folder)
    assert isinstance(saved, Path)
    return saved


def test_a_lora_on_a_vit_is_measured_in_memory(place, pets, tmp_path):
    import transformers

    base = CASES["vit-classifier"].save(tmp_path / "base", 1)
    transformers.ViTImageProcessorPil(size={"height": 12, "width": 12}).save_pretrained(base)
    into = "ViTForImageClassification"
    lora = with_lora(base, tmp_path / "lora", into, target_modules=["q_proj", "fc1"])
    dora = with_lora(base, tmp_path / "dora", into, target_modules=["v_proj"], use_dora=True)
    copies = [merged(one, base, tmp_path / f"{one.name}-merged") for one in (lora, dora)]
    seven = Classes("file", ("cat", "great dane", "owl", "a", "b", "c", "d"), ())
    data = EvaluationData(pets, classes=seven)
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    found = evaluate([lora, dora], data=data, against=base)
    assert kept == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}  # nothing is written
    expected = evaluate(copies, data=data, against=base)
    assert [row.model for row in found.rows] == [str(base), str(lora), str(dora)]
    assert [row.task for row in found.rows] == [row.task for row in expected.rows]
    assert len({row.task.loss for row in found.rows}) == 3
    assert found.notes == ()  # the base's image processor is used
    assert evaluate(lora, data=data, base=base).rows[0].task == found.rows[1].task
    module = transformers.ViTForImageClassification.from_pretrained(base)
    in_memory = evaluate([lora], data=Dataset.of("x", *_noise_images()), base=module, against=module)
    assert [row.model for row in in_memory.rows] == ["ViTForImageClassification in memory", str(lora)]
    assert in_memory.rows[0].task != in_memory.rows[1].task


def _noise_images() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    images = torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": images}, torch.arange(8) % 7


def test_a_lora_with_a_task_head_on_a_bert_is_measured_in_memory(place, tmp_path):
    words = {**BERT, "vocab_size": WORDS, "max_position_embeddings": 40}
    encoder = case("bert-encoder", "bert", "BertModel", "BertConfig", words)
    base = put_tokenizer(encoder.save(tmp_path / "base", 1))
    settings = {"target_modules": ["query"], "task_type": "SEQ_CLS", "modules_to_save": ["classifier"]}
    lora = with_lora(base, tmp_path / "lora", "BertForSequenceClassification", num_labels=2, **settings)
    rows = [{"sentence": text, "label": number % 2} for number, text in enumerate(TEXTS)]
    data = EvaluationData(table(tmp_path / "texts.jsonl", rows))
    copy = merged(lora, base, tmp_path / "merged")
    assert evaluate(lora, data=data).rows[0].task == evaluate(copy, data=data).rows[0].task
    assert evaluate(lora, data=data, base=str(base)).rows[0].model == str(lora)


def test_the_base_of_an_adapter_has_to_be_known(place, classifier, tmp_path):
    base = CASES["vit-classifier"].save(tmp_path / "base", 1)
    lora = with_lora(base, tmp_path / "lora", "ViTForImageClassification", target_modules=["q_proj"])
    data = Dataset.of("noise", *_noise_images())
    file = lora / "adapter_config.json"
    config = json.loads(file.read_text())
    for named, said in ((None, "no base"), ("org/name", "org/name, which is no folder here")):
        file.write_text(json.dumps({**config, "base_model_name_or_path": named}))
        for given, against in ((lora, None), (base, lora)):
            with pytest.raises(
                CheckpointError, match=f"an adapter, and its configuration names {said}"
            ) as caught:
                evaluate(given, data=data, against=against)
            assert "`base`" in str(caught.value.hint)
        assert evaluate(lora, data=data, base=base).rows[0].task.loss > 0
    with pytest.raises(SettingError, match="`base`: none of the models is an adapter"):
        evaluate(base, data=data, base=base)
    moved = transfusion.transport(lora, base=base, onto=base, method="naive").save(tmp_path / "moved")
    other = CASES["vit-classifier"].save(tmp_path / "other", 2)
    with pytest.raises(MismatchError, match="which has other weights"):
        evaluate(moved, data=data, base=other)
    assert evaluate(moved, data=data, base=other, trust_base=True).rows[0].task.loss > 0
    assert evaluate(moved, data=data, base=base).rows == evaluate(moved, data=data).rows


def _ids(found: Any) -> dict[str, torch.Tensor]:
    return {name: found[name] for name in ("input_ids", "attention_mask")}


# ── classes ──────────────────────────────────────────────────────────────────────────────────


def test_the_classes_that_ship_with_the_package():
    counts = {"eurosat": 10, "dtd": 47, "gtsrb": 43, "svhn": 10, "imagenet-r": 200}
    assert set(counts) == set(SUPPLIED)
    for name, count in counts.items():
        found = Classes.of(name)
        assert len(found.names) == count
        assert len(found.prompts()) == count * len(found.templates) >= 3 * count
    for name in ("eurosat", "dtd", "imagenet-r"):
        assert list(Classes.of(name).folders) == sorted(Classes.of(name).folders)


def test_the_wordnet_ids_of_imagenet_r():
    from importlib.resources import files

    info = files("timm.data").joinpath("_info", "imagenet_r_synsets.txt").read_text().split()
    assert sorted(info) == list(Classes.of("imagenet-r").folders)
    assert Classes.of("imagenet-r").names[0] == "goldfish"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"classes": ["cat"], "templates": ["a {}"]}, "1 classes"),
        ({"classes": ["cat", "dog", "C_at"]}, "classes of the same name: cat, C_at"),
        (
            {"classes": ["a", "b"], "templates": ["a photo"]},
            "the template 'a photo' has no place for the class, or several",
        ),
        ({"classes": ["a", "b"], "folders": ["x"]}, "2 classes and 1 folders"),
        ({"classes": "cat"}, "classes must be a list of texts"),
        (3, "classes must be a list of texts"),
    ],
)
def test_classes_that_make_no_sense(content, message, tmp_path):
    file = tmp_path / "classes.json"
    file.write_text(json.dumps(content))
    with pytest.raises(DataError) as caught:
        Classes.of(file)
    assert caught.value.message == f"{file}: {message}"
    file.write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        Classes.of(file)
    with pytest.raises(DataError, match="no file of classes"):
        Classes.of("mnist")


def test_classes_that_do_not_match(two_towers, pets, named, tmp_path):
    folder = two_towers("clip")
    message = refusal(folder, EvaluationData(pets, classes="eurosat"))
    assert message.startswith(
        f"{pets}: class names that eurosat does not know: Cat, OWL, great_dane; it knows"
    )
    other = Classes("file", ("cat", "owl", "dog"), TEMPLATES)
    assert "does not know: great_dane; it knows cat, owl, dog" in refusal(
        folder, EvaluationData(pets, classes=other)
    )
    assert refusal(folder, EvaluationData(pets)) == f"{pets}: CLIPModel has no classes of its own"
    bare = Classes("file", PETS, ())
    assert refusal(folder, EvaluationData(pets, classes=bare)) == "file: no templates in it"
    pets = shutil.copytree(pets, tmp_path / "pets")  # a table shows images beside it only
    rows = [{"image": str(one), "label": number} for number, one in enumerate(sorted(pets.rglob("*.png")))]
    many = table(tmp_path / "many.jsonl", rows)
    assert refusal(folder, EvaluationData(many, classes=named)) == (
        f"{many}: example 4 has label 3, which is none of the 3 classes, counted from 0, of {named}"
    )
    assert refusal(
        folder, EvaluationData(table(tmp_path / "none.jsonl", [{"image": rows[0]["image"]}]), classes=named)
    ) == (f"{tmp_path / 'none.jsonl'}: no labels in it")


def test_only_the_label_that_is_no_class_is_named(classifier, tmp_path):
    file = tmp_path / "texts.csv"
    file.write_text("text,label\nIt rained.,1\nNo,0\nYes,0.5\n")
    assert refusal(classifier, EvaluationData(file)) == (
        f'{file}: example 3 has label "0.5", which is none of the 2 classes, counted from 0, of {classifier}'
    )


def test_folders_that_are_numbers(two_towers, place, pets, tmp_path):
    """As in GTSRB and SVHN: a folder's name is its class's number."""
    for number, file in enumerate(sorted(pets.rglob("*.png"))):
        (tmp_path / "signs" / f"{number:05d}").mkdir(parents=True)
        (tmp_path / "signs" / f"{number:05d}" / "x.png").write_bytes(file.read_bytes())
    for name in ("gtsrb", "svhn"):
        data = EvaluationData(tmp_path / "signs", classes=name)
        model = Model.open(two_towers("open_clip"))
        evaluator = data.evaluator(model, data.live(model))
        assert next(evaluator.batch_source.batches(9)).targets.tolist() == list(range(9))


def test_models_that_cannot_answer(made, pets, named, classifier, tmp_path):
    vit = CASES["vit"].save(tmp_path / "vit", 1)
    message = refusal(vit, EvaluationData(pets, classes=named), ArchitectureError)
    assert message == f"{vit}: ViTModel has no task head for {pets}"
    assert refusal(classifier, EvaluationData(pets)) == (
        f"{pets}: images, and BertForSequenceClassification reads tokens"
    )
    seven = CASES["vit-classifier"].save(tmp_path / "seven", 1)
    assert refusal(seven, EvaluationData(pets)) == (
        f"{pets}: 3 class names (Cat, OWL, great_dane), and {seven} has 7 classes without names"
    )
    assert refusal(seven, EvaluationData(pets, classes=named)) == (f"{named}: 3 classes, and {seven} has 7")


# ── scores, sizes, evaluations ───────────────────────────────────────────────────────────────


def test_metrics_by_their_definitions():
    generator = torch.Generator().manual_seed(0)
    said, true = torch.randint(0, 2, (2, 50), generator=generator)
    assert matthews(said, true) == pytest.approx(np.corrcoef(said, true)[0, 1])
    hits = float(((said == 1) & (true == 1)).sum())
    precision, recall = hits / float((said == 1).sum()), hits / float((true == 1).sum())
    assert f1(said, true) == pytest.approx(2 * precision * recall / (precision + recall))
    assert f1(torch.zeros(3), torch.zeros(3)) == matthews(torch.zeros(3), torch.ones(3)) == 0
    # of more than two classes: the covariance of indicators, summed over classes
    said, true = torch.randint(0, 4, (2, 50), generator=generator)
    first, second = (np.eye(4)[one.numpy()] for one in (said, true))
    first, second = first - first.mean(0), second - second.mean(0)
    expected = (first * second).sum() / np.sqrt((first**2).sum() * (second**2).sum())
    assert matthews(said, true) == pytest.approx(expected)


def test_gains():
    one, other = Score("accuracy", 0.75, 1.0, 0.75), Score("accuracy", 0.5, 0.5, 0.5)
    assert gain(one, other) == 25
    assert gain(Score("loss", 1.0, 1.0, 0.1), Score("loss", 1.5, 1.5, 0.1)) == -0.5
    with pytest.raises(SettingError, match="accuracy cannot be compared with loss"):
        gain(one, Score("loss", 1.0, 1.0, 0.1))


def answered(right: np.ndarray, losses: np.ndarray | None = None, each: int = 1) -> Score:
    """A score of predictions that are right or wrong, so many for each example."""
    said, true = torch.from_numpy(right).long(), torch.ones(len(right)).long()
    found = torch.ones(len(right)).double() if losses is None else torch.from_numpy(losses)
    answers = Answers.of(said, true, found, torch.arange(len(right)) // each)
    metric = "accuracy" if losses is None else "loss"
    value = float(right.mean()) if losses is None else float(found.mean())
    return Score(metric, value, float(found.mean()), float(right.mean()), {}, answers)


def test_intervals_of_accuracies_and_their_gains():
    right = np.arange(100) < 50
    low, high = score_interval(answered(right))
    assert (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)  # Wilson's, from a table
    better = right | (np.arange(100) >= 90)
    low, high = gain_interval(answered(better), answered(right))
    middle, count = 10, 102
    half = 1.959964 * (11 - middle**2 / count) ** 0.5
    assert (low, high) == pytest.approx((100 * (middle - half) / count, 100 * (middle + half) / count))
    assert 0 < low < 10 < high, "twice the same examples: surer than either score"
    low, high = gain_interval(answered(right), answered(right))
    assert -3 < low < 0 < high < 3, "that they agree on a hundred examples does not prove that they are alike"
    assert gain_interval(answered(right), answered(right[:50])) is None
    assert score_interval(replace(answered(right), answers=None)) is None


def test_intervals_hold_the_truth_as_often_as_they_say():
    draw, held = np.random.default_rng(1), {"gain": 0, "loss": 0, "tokens": 0}
    for _ in range(200):
        skill = draw.random(60)
        one, other = draw.random(60) < 0.2 + 0.6 * skill, draw.random(60) < 0.1 + 0.6 * skill
        low, high = gain_interval(answered(one), answered(other))
        held["gain"] += low <= 10 <= high
        hard = draw.exponential(size=60)
        losses = [answered(one, hard + shift + 0.2 * draw.normal(size=60)) for shift in (0.5, 0.3)]
        low, high = gain_interval(*losses)
        held["loss"] += low <= 0.2 <= high
        texts = np.repeat(draw.normal(size=40), 25) + 0.1 * draw.normal(size=1000)
        low, high = score_interval(answered(texts > 0, texts, each=25))
        held["tokens"] += low <= 0 <= high
    assert all(180 <= count <= 198 for count in held.values()), held


def test_intervals_of_f1_and_of_single_examples():
    score = replace(answered(np.arange(40) % 3 > 0), metric="f1")
    low, high = score_interval(score)
    assert low < f1(*score.answers.classes) < high
    assert score_interval(replace(answered(np.arange(40) % 3 > 0, each=2), metric="f1")) is None
    assert score_interval(answered(np.ones(1) > 0, np.ones(1))) is None


def test_a_batch_that_does_not_fit_is_halved(made, monkeypatch):
    model = Model.open(made("vit-classifier"))
    images = torch.randn(6, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    data = EvaluationData(Dataset.of("images", {"pixel_values": images}, torch.arange(6) % 7))
    live = data.live(model)
    evaluator = data.evaluator(model, live, batch=4)
    expected, forward, sizes = evaluator.measure(), live.module.forward, []

    def narrow(pixel_values: torch.Tensor, most: int = 1, **more: Any) -> Any:
        sizes.append(len(pixel_values))
        if len(pixel_values) > most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return forward(pixel_values=pixel_values, **more)

    monkeypatch.setattr(live.module, "forward", narrow)
    assert evaluator.measure().loss == pytest.approx(expected.loss, abs=1e-6)
    assert sizes == [4, 2, *[1] * 6]
    monkeypatch.setattr(live.module, "forward", lambda **given: narrow(**given, most=0))
    with pytest.raises(DataError, match="not even one example at a time fits"):
        evaluator.measure()


def test_the_size_that_fits_depends_on_the_machine(made, monkeypatch):
    model = Model.open(made("vit-classifier"))
    data = EvaluationData(
        Dataset.of("images", {"pixel_values": torch.zeros(99, 3, 12, 12)}, torch.zeros(99).long())
    )
    live = data.live(model)
    evaluator = data.evaluator(model, live)
    first = next(evaluator.batch_source.batches(1))
    assert batch_size_for(evaluator.scorer, first, 99) == batch_size_for(evaluator.scorer, first, 99) == 64
    assert batch_size_for(evaluator.scorer, first, 3) == 4
    monkeypatch.setattr("transfusion.evaluation.evaluator.device_memory", lambda device: 400_000)
    assert 1 <= batch_size_for(evaluator.scorer, first, 99) < 16


def test_an_evaluation_of_task_and_support(two_towers, pets, named):
    folder = two_towers("clip")
    other = READERS["clip"].build(2)
    seen: list[tuple[int | None, int | None]] = []

    class Following(Progress):
        @contextmanager
        def bar(self, total=None, text=""):
            yield lambda text, done=None, total=None: seen.append((done, total))

    other.save_pretrained(folder.parent / "clip-other")
    put_tokenizer(folder.parent / "clip-other")
    support = EvaluationData(pets, classes=named, templates=("{}",), limit=6)
    found = evaluate(
        [folder.parent / "clip-other"],
        data=EvaluationData(pets, classes=named),
        support=support,
        against=folder,
        progress=Following(),
    )
    metadata = found.metadata()
    assert metadata["against"] == str(folder)
    assert [row["model"] for row in metadata["models"]] == [str(folder), f"{folder}-other"]
    assert metadata["support"]["examples"] == 6
    assert metadata["task"]["question"] == "zero-shot class of every image, 2 prompts a class"
    assert metadata["models"][0]["gain"] == {"task": 0, "support": 0}
    second = metadata["models"][1]
    assert second["gain"]["task"] == pytest.approx(
        100 * (second["task"]["value"] - metadata["models"][0]["task"]["value"])
    )
    assert second["support"]["loss"] == measured(folder.parent / "clip-other", support).loss
    assert seen[-1] == (6, 6)
    assert any("nothing in its folder says" in note for note in found.notes)
    alone = transfusion.evaluate(folder, data=EvaluationData(pets, classes=named)).metadata()
    assert (alone["against"], alone["support"], alone["models"][0]["gain"]) == (None, None, None)


def test_models_in_memory_are_told_apart(made, tmp_path):
    import transformers

    images = torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    data = Dataset.of("made", {"pixel_values": images}, torch.arange(8) % 7)
    places = [made("vit-classifier", seed) for seed in (1, 2)]
    a, b = (transformers.ViTForImageClassification.from_pretrained(place) for place in places)
    label = "ViTForImageClassification in memory"
    found = evaluate([b, a], data=data, against=a)
    assert [row.model for row in found.rows] == [label, f"{label}, 2"]
    wanted = [row.task.loss for row in evaluate(places, data=data).rows]
    assert [row.task.loss for row in found.rows] == pytest.approx(wanted, abs=1e-6)
    assert found.metadata()["against"] == label
    (tmp_path / "again").symlink_to(places[0])
    rows = evaluate([places[0], places[1]], data=data, against=tmp_path / "again").rows
    assert [row.model for row in rows] == [str(tmp_path / "again"), str(places[1])]
    states = [one.state_dict() for one in (a, b)]
    both = [Model.open(one, config=places[0] / "config.json") for one in states]
    rows = evaluate(both, data=data, against=both[0]).rows
    assert [row.model for row in rows] == ["a state dict in memory", "a state dict in memory, 2"]


def test_in_double_precision(two_towers, pets, named):
    data = EvaluationData(pets, classes=named)
    rough, fine = (
        evaluate(two_towers("clip"), data=data, dtype=dtype).rows[0].task
        for dtype in (torch.float32, torch.float64)
    )
    assert 0 < abs(rough.loss - fine.loss) < 1e-5
    assert rough.accuracy == fine.accuracy


def test_a_support_without_classes(two_towers, pets, named):
    with pytest.raises(DataError, match="CLIPModel has no classes of its own") as caught:
        evaluate(two_towers("clip"), data=EvaluationData(pets, classes=named), support=pets)
    assert "`support_classes`" in str(caught.value.hint)


@pytest.mark.parametrize("residual", often(["tied", "untied"], ["untied"]))
def test_the_barrier_takes_every_kind_of_examples(residual, two_towers, pets, named, place):
    """Also where shortcuts turn what the text tower carries, which its tensors do not tell."""
    a = two_towers("clip")
    b = READERS["clip"].save(place / f"clip-{residual}", 3)
    pi = transfusion.align(a, b, residual=residual, advice=False)
    data = EvaluationData(pets, classes=named)
    way = one_barrier(a, b, via=pi, data=data, points=3, shortcuts="interpolated")
    assert way.faithful
    plain = one_barrier(a, b, via=pi, data=data, points=3, shortcuts="plain")
    assert plain.faithful == (residual == "tied")
    assert way.points[-1].loss == pytest.approx(plain.points[-1].loss, abs=1e-6)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"limit": 0}, "limit = 0: no examples"),
        ({"metric": "bleu"}, "metric = 'bleu' is not a choice"),
    ],
)
def test_settings_that_make_no_sense(more, message, two_towers, pets, named):
    assert refusal(two_towers("clip"), EvaluationData(pets, classes=named, **more), SettingError) == message


def test_metrics_that_do_not_apply(two_towers, pets, named):
    for metric in ("perplexity", "f1"):
        message = refusal(two_towers("clip"), EvaluationData(pets, classes=named, metric=metric))
        assert message.startswith(f"{pets}: no {metric} of the zero-shot class")
    assert measured(two_towers("clip"), EvaluationData(pets, classes=named, metric="loss")).metric == "loss"
    with pytest.raises(SettingError, match="no models"):
        evaluate([], data=pets)
    with pytest.raises(SettingError, match="too coarse"):
        evaluate(two_towers("clip"), data=pets, dtype=torch.bfloat16)
