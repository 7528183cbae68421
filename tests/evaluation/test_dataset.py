"""Examples: what is read, what is measured, and what is refused with the reason."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.evaluation.test_interpolation import one_barrier
from transfusion.data.dataset import Dataset
from transfusion.errors import DataError
from transfusion.evaluation.scorers import PredictionKind
from transfusion.evaluation.task import EvaluationData
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel

IMAGES = torch.randn(6, 3, 12, 12, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(6)
TEXT = torch.randint(0, 30, (5, 8), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def write(tmp_path):
    """Write tensors as a file of examples."""

    def to(name: str = "data.safetensors", **tensors: torch.Tensor):
        path = tmp_path / name
        if name.endswith(".npz"):
            np.savez(path, **{key: tensor.numpy() for key, tensor in tensors.items()})
        else:
            save_file(tensors, path)
        return path

    return to


def measured(folder, data: Dataset, batch: int = 2):
    model = Model.open(folder)
    evaluator = EvaluationData(data).evaluator(model, LiveModel.of(model, torch.float32), batch=batch)
    return evaluator.scorer.question, evaluator.measure()


@pytest.mark.parametrize("name", ["data.safetensors", "data.npz"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_both_kinds_of_files_are_read(name, dtype, write):
    data = Dataset.load(write(name, pixel_values=IMAGES, labels=CLASSES.to(dtype)))
    assert len(data) == 6
    assert torch.equal(data.inputs["pixel_values"], IMAGES)
    assert torch.equal(data.labels, CLASSES)
    assert len(data.limited(3)) == 3
    assert data.limited(None) is data


def test_batches_do_not_change_what_is_measured(made):
    data = Dataset.of("made up", {"pixel_values": IMAGES}, CLASSES)
    question, alone = measured(made("vit-classifier"), data, batch=1)
    _, together = measured(made("vit-classifier"), data, batch=6)
    assert question is PredictionKind.CLASS
    assert alone.loss == pytest.approx(together.loss, abs=1e-5)
    assert alone.accuracy == together.accuracy


@pytest.mark.parametrize("case", ["llama", "gpt2", "mistral-tied"])
def test_a_text_without_labels_is_its_own(case, made):
    import transformers

    mask = torch.ones_like(TEXT)
    mask[:2, 5:] = 0
    data = Dataset.of("made up", {"input_ids": TEXT, "attention_mask": mask}, None)
    question, found = measured(made(case), data)
    model = transformers.AutoModelForCausalLM.from_pretrained(made(case))
    labels = TEXT.masked_fill(mask == 0, -100)
    with torch.no_grad():
        expected = model(input_ids=TEXT, attention_mask=mask, labels=labels).loss
    assert question is PredictionKind.NEXT
    assert found.loss == pytest.approx(float(expected), abs=1e-4)
    given = Dataset.of("made up", {"input_ids": TEXT, "attention_mask": mask}, labels)
    assert measured(made(case), given)[1] == found


@pytest.mark.parametrize("case", ["bert-untied", "bert-tokens"])
def test_models_that_see_both_sides_are_asked_about_every_position_itself(case, made):
    import transformers

    model = getattr(transformers, Model.open(made(case)).config["architectures"][0])
    model = model.from_pretrained(made(case)).eval()
    labels = TEXT % model.config.num_labels if case == "bert-tokens" else TEXT.clone()
    labels[:, ::2] = -100
    question, found = measured(made(case), Dataset.of("made up", {"input_ids": TEXT}, labels))
    with torch.no_grad():
        expected = model(input_ids=TEXT, labels=labels).loss
    assert question is PredictionKind.POSITION
    assert found.loss == pytest.approx(float(expected), abs=1e-4)


def test_an_encoder_decoder_predicts_what_its_decoder_reads(made):
    import transformers

    folder, both = made("t5-generation"), {"input_ids": TEXT, "decoder_input_ids": TEXT.flip(1)}
    assert measured(folder, Dataset.of("made up", both, None))[0] is PredictionKind.NEXT
    question, found = measured(folder, Dataset.of("made up", both, TEXT))
    with torch.no_grad():
        model = transformers.T5ForConditionalGeneration.from_pretrained(folder).eval()
        expected = model(**both, labels=TEXT).loss
    assert question is PredictionKind.POSITION
    assert found.loss == pytest.approx(float(expected), abs=1e-4)


# ── files that are refused ───────────────────────────────────────────────────────────────────

NAN = IMAGES.clone()
NAN[0, 0, 0, 0] = float("nan")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"labels": CLASSES}, "the file holds labels and no inputs"),
        ({}, "the file holds nothing"),
        ({"pixel_values": IMAGES, "labels": CLASSES[:5]}, "6 pixel_values, 5 labels"),
        ({"pixel_values": IMAGES[:0], "labels": CLASSES[:0]}, "there are no examples in it"),
        ({"pixel_values": NAN, "labels": CLASSES}, "pixel_values contains NaN or infinite values"),
        ({"pixel_values": IMAGES, "labels": CLASSES.float()}, "numbers of classes, and these are float32"),
        ({"pixel_values": IMAGES, "labels": CLASSES > 2}, "numbers of classes, and these are bool"),
        ({"pixel_values": torch.tensor(1.0), "labels": CLASSES}, "pixel_values is a single number"),
    ],
)
@pytest.mark.parametrize("name", ["data.safetensors", "data.npz"])
def test_what_no_model_could_be_measured_on(tensors, message, name, write):
    with pytest.raises(DataError, match=message) as caught:
        Dataset.load(write(name, **tensors))
    assert "data." in caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.safetensors", None, "no such file of examples"),
        ("data.csv", b"1,2", r"neither \.safetensors nor \.npz"),
        ("data.safetensors", b"rubbish", "cannot be read as examples"),
        ("data.npz", b"rubbish", "cannot be read as examples"),
        ("data.npz", b"PK\x03\x04rubbish", "cannot be read as examples"),
    ],
)
def test_files_that_hold_no_examples(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        Dataset.load(tmp_path / name)
    assert caught.value.hint


def test_pickled_arrays_are_not_unpickled(tmp_path):
    np.savez(tmp_path / "data.npz", pixel_values=np.array([{"a": 1}], dtype=object))
    with pytest.raises(DataError, match="cannot be read as examples"):
        Dataset.load(tmp_path / "data.npz")


def test_arrays_that_are_not_numbers_are_refused(tmp_path):
    np.savez(tmp_path / "data.npz", pixel_values=np.array(["a", "b"]))
    with pytest.raises(DataError, match="cannot be read as examples"):
        Dataset.load(tmp_path / "data.npz")


@pytest.mark.parametrize(
    ("case", "inputs", "labels", "message"),
    [
        ("vit-classifier", {"pixel_values": IMAGES}, None, "no labels in it"),
        ("vit-classifier", {"pixel_values": IMAGES}, CLASSES + 2, "label 7 is none of the 7 classes"),
        ("vit-classifier", {"pixel_values": IMAGES}, CLASSES - 1, "label -1 is none of the 7 classes"),
        ("vit-classifier", {"pixel_values": IMAGES}, CLASSES - 100, "label -100 is none of the 7 classes"),
        ("vit-classifier", {"pixel_values": IMAGES}, CLASSES[:, None], r"labels have shape \(6, 1\)"),
        ("vit-classifier", {"images": IMAGES}, CLASSES, "has images, which ViTForImageClassification"),
        ("vit-classifier", {"interpolate_pos_encoding": IMAGES}, CLASSES, "the file has no pixel_values"),
        ("vit-classifier", {"pixel_values": IMAGES[:, :, :8]}, CLASSES, r"have shape \(3, 8, 12\), and"),
        ("vit-classifier", {"pixel_values": IMAGES[:, 0]}, CLASSES, r"wants \(3, 12, 12\)"),
        ("vit-classifier", {"pixel_values": IMAGES.long()}, CLASSES, "the images hold whole numbers"),
        (
            "llama",
            {"input_ids": TEXT + 1000},
            None,
            r"input_ids has token 10\d\d, and LlamaForCausalLM knows",
        ),
        ("llama", {"input_ids": TEXT - 50}, None, "input_ids has token -"),
        ("llama", {"input_ids": TEXT.float()}, None, "input_ids are not whole numbers"),
        ("llama", {"input_ids": TEXT}, TEXT[:, :5], r"labels have shape \(5, 5\)"),
        ("llama", {"input_ids": TEXT}, TEXT * 0 - 100, "every label is -100 or masked"),
        ("llama", {"input_ids": TEXT[:, :1]}, None, "every label is -100 or masked"),
        ("bert-tokens", {"input_ids": TEXT}, None, "no labels in it"),
        ("bert-classifier", {"input_ids": TEXT[:, :, None]}, CLASSES[:5] % 2, "cannot be run on it"),
        ("vit-classifier", {"pixel_values": IMAGES * 1e38 * 1e3}, CLASSES, "NaN or infinite"),
    ],
)
def test_what_this_model_cannot_be_measured_on(case, inputs, labels, message, made):
    with pytest.raises(DataError, match=message) as caught:
        one_barrier(made(case), made(case), via=None, data=Dataset.of("data", inputs, labels), points=2)
    assert caught.value.hint
    assert "\n" not in caught.value.message
