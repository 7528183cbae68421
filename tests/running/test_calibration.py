"""Calibration: the user's own images, texts and tensors, and what is wrong with them."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from cases.encoders import BART
from making import case
from small_models import CASES
from transfusion.errors import DataError, LibraryError
from transfusion.running.probes import make_probes
from transfusion.running.probes.inputs import run_model
from transfusion.running.probes.probed_model import Probes
from transfusion.running.probes.texts import corpus
from wording import BERT_WORDS, CLS, PAD, SEP, joined, put_tokenizer, subject_of

LINES = [text.replace("\n", " ") for name in ("news.txt", "stories.txt") for text in corpus()[name]]


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Path:
    return put_tokenizer(BERT_WORDS.save(tmp_path_factory.mktemp("words") / "bert", 1))


@pytest.fixture
def pictures(tmp_path) -> Path:
    """Ten images, dark to bright, red only, of several shapes."""
    folder = tmp_path / "pictures"
    (folder / "more").mkdir(parents=True)
    for number in range(10):
        image = Image.new("RGB", (20 + number, 40), (20 * number, 0, 0))
        place = folder / "more" if number % 2 else folder
        image.save(place / f"{number}.png")
    (folder / "notes.md").write_text("not an image")
    return folder


def given(path: Path, folder: Path, count: int = 64, seed: int = 0) -> Probes:
    """The user's inputs, which the model has been run on."""
    subject = subject_of(folder)
    probes = make_probes(subject, count, seed, path)
    for batch in probes.batches:
        outputs = run_model(subject.module, subject.model.family, batch, double=False)
        assert all(torch.isfinite(one).all() for one in outputs.values())
    return probes


def refusal(path: Path, folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        given(path, folder)
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value.message


# ── images ───────────────────────────────────────────────────────────────────────────────────


def test_images_are_fitted_and_prepared(pictures, tmp_path):
    folder = CASES["vit"].save(tmp_path / "vit", 1)
    info = {"image_mean": [0.5, 0.25, 0.1], "image_std": [0.5, 0.25, 0.2]}
    (folder / "preprocessor_config.json").write_text(json.dumps(info))
    probes = given(pictures, folder)
    assert probes.about == f"10 images of {pictures}"
    images = joined(probes, "pixel_values")
    assert images.shape == (10, 3, 12, 12)
    red = sorted(images[:, 0].mean((1, 2)).tolist())
    assert red == pytest.approx([(20 * number / 255 - 0.5) / 0.5 for number in range(10)], abs=1e-5)
    assert torch.allclose(images[:, 1:].mean((0, 2, 3)), torch.tensor([-1.0, -0.5]))


def test_images_are_cropped_at_the_centre(made, tmp_path):
    for number in range(8):
        wide = np.zeros((12, 36, 3), np.uint8)
        wide[:, 12:24] = 255
        Image.fromarray(wide).save(tmp_path / f"{number}.png")
    images = joined(given(tmp_path, made("vit")), "pixel_values")
    assert images.mean() > 1.9  # white is (1 - 0.5) / 0.25


def test_the_seed_chooses_among_many_images(pictures, made):
    first, again, other = (
        joined(given(pictures, made("vit"), 5, seed), "pixel_values") for seed in (0, 0, 1)
    )
    assert len(first) == 5
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_images_for_a_model_of_patches_and_texts(pictures, made):
    probes = given(pictures, made("siglip2"))
    assert joined(probes, "pixel_values").ndim == 3
    assert len(joined(probes, "input_ids")) == 10
    assert probes.about.startswith(f"10 images of {pictures}; ")


def test_folders_that_cannot_be_shown(pictures, made, tmp_path):
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty", made("vit")) == f"{tmp_path / 'empty'}: no images in this folder"
    assert refusal(pictures, made("bert")) == f"{pictures}: a folder of images, and BertModel reads tokens"
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "0.png").symlink_to(pictures / "0.png")
    assert refusal(tmp_path / "links", made("vit")).startswith(
        f"{tmp_path / 'links' / '0.png'}: the link leads"
    )
    (pictures / "0.png").write_bytes(b"no picture")
    assert refusal(pictures, made("vit")).startswith(f"{pictures / '0.png'}: cannot be read as an image (")
    for file in [*pictures.glob("*.png")][1:]:
        file.unlink()
    assert refusal(pictures, made("vit")) == f"{pictures}: 6 image(s), and 8 are the least"


def test_without_pillow_the_extra_is_named(pictures, made, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    subject = subject_of(made("vit"))
    with pytest.raises(LibraryError, match=re.escape("transfusion-rebasin[images]")):
        make_probes(subject, 8, 0, pictures)


# ── texts ────────────────────────────────────────────────────────────────────────────────────


def as_lines(path: Path) -> None:
    path.write_text("\n\n".join(LINES))


def as_objects(path: Path) -> None:
    path.write_text("\n".join(json.dumps({"text": line, "source": "x", "label": 3}) for line in LINES))


def as_only_field(path: Path) -> None:
    path.write_text("\n".join(json.dumps({"body": line, "label": 3}) for line in LINES))


def as_table(path: Path) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["label", "text"], *([3, line] for line in LINES)])


def as_column(path: Path) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([[line] for line in LINES])


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.txt", as_lines),
        ("a.jsonl", as_objects),
        ("b.jsonl", as_only_field),
        ("a.csv", as_table),
        ("b.csv", as_column),
    ],
)
def test_all_files_of_texts_say_the_same(name, write, words, tmp_path):
    as_lines(tmp_path / "plain.txt")
    write(tmp_path / name)
    wanted, found = (given(tmp_path / one, words) for one in ("plain.txt", name))
    ids = joined(found, "input_ids")
    assert torch.equal(ids, joined(wanted, "input_ids"))
    assert found.about == f"64 windows of {tmp_path / name}"
    assert (ids[:, 0] == CLS).all()
    assert (ids[:, -1] == SEP).all()
    assert not (ids == PAD).any()


def test_a_few_windows_of_many_can_be_asked_for(words, tmp_path):
    as_lines(tmp_path / "a.txt")
    assert len(joined(given(tmp_path / "a.txt", words, count=3), "input_ids")) == 3


def test_short_texts_are_joined(words, tmp_path):
    (tmp_path / "a.txt").write_text("yes\nno\n" * 200)
    ids = joined(given(tmp_path / "a.txt", words), "input_ids")
    assert ids.shape[1] == subject_of(words).length
    assert not (ids == PAD).any()


def test_texts_for_an_encoder_and_a_decoder(tmp_path):
    of = case("bart-words", "bart", "BartModel", "BartConfig", {**BART, "vocab_size": 300})
    folder = put_tokenizer(of.save(tmp_path / "a", 1))
    as_lines(tmp_path / "a.txt")
    probes = given(tmp_path / "a.txt", folder)
    start = subject_of(folder).settings["decoder_start_token_id"]
    assert (joined(probes, "decoder_input_ids")[:, 0] == start).all()


def test_texts_that_cannot_be_shown(words, made, tmp_path):
    file = tmp_path / "a.txt"
    as_lines(file)
    assert refusal(file, made("vit")) == f"{file}: a file of texts, and ViTModel reads image"
    label = made("bert")
    assert (
        refusal(file, label)
        == f"{file}: texts cannot be given to {label}: no tokenizer in the model's folder"
    )
    file.write_text("\n \n")
    assert refusal(file, words) == f"{file}: there is no text in it"
    file.write_text("a few words")
    assert refusal(file, words).startswith(f"{file}: ")
    file.write_bytes(b"\xff\xfe\xff")
    assert refusal(file, words).startswith(f"{file}: cannot be read as text (")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{oh', "line 2 is not JSON ("),
        ("a.jsonl", '{"a": "x", "b": "y"}', 'no column "text" among a, b'),
        ("a.jsonl", '{"a": 3}', 'no column "text" among a'),
        ("a.csv", "a,b\n1,2\n", 'no column "text" among a, b'),
        ("a.doc", "x", "not a kind of file that can be calibration data"),
        ("none.txt", None, "no such file or folder"),
    ],
)
def test_files_that_hold_no_texts(name, content, message, words, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    assert refusal(tmp_path / name, words).startswith(f"{tmp_path / name}: {message}")


# ── tensors ──────────────────────────────────────────────────────────────────────────────────


def test_tensors_by_the_names_of_the_inputs(made, tmp_path):
    images = torch.randn(12, 3, 12, 12, dtype=torch.float64)
    save_file({"pixel_values": images, "labels": torch.full((3,), torch.nan)}, tmp_path / "a.safetensors")
    probes = given(tmp_path / "a.safetensors", made("vit-classifier"))
    assert torch.equal(joined(probes, "pixel_values"), images.float())
    assert probes.about == f"12 examples of {tmp_path / 'a.safetensors'}"


def test_the_only_tensor_needs_no_name(made, tmp_path):
    images = np.random.default_rng(0).normal(size=(9, 3, 12, 12)).astype(np.float32)
    np.savez(tmp_path / "a.npz", images)
    assert np.array_equal(joined(given(tmp_path / "a.npz", made("vit")), "pixel_values").numpy(), images)


def test_what_the_file_lacks_is_made_up(made, tmp_path):
    save_file({"pixel_values": torch.randn(8, 3, 12, 12)}, tmp_path / "a.safetensors")
    probes = given(tmp_path / "a.safetensors", made("clip"))
    assert len(joined(probes, "input_ids")) == 8
    info = "8 sequences of random frequent tokens (no tokenizer in the model's folder)"
    assert probes.about == f"8 examples of {tmp_path / 'a.safetensors'}; {info}"


def test_tokens_for_an_encoder_are_given_to_its_decoder_too(made, tmp_path):
    ids = torch.arange(3, 30).repeat(4)[:90].reshape(9, 10)
    save_file({"input_ids": ids}, tmp_path / "a.safetensors")
    probes = given(tmp_path / "a.safetensors", made("t5"))
    assert torch.equal(joined(probes, "input_ids"), ids)
    assert torch.equal(joined(probes, "decoder_input_ids")[:, 1:], ids.roll(1, 0)[:, :-1])
    assert probes.about == f"9 examples of {tmp_path / 'a.safetensors'}"


def test_sounds_are_given_to_whisper_and_its_words_are_made_up(made, tmp_path):
    subject = subject_of(made("whisper"))
    heard = torch.randn(8, *subject.template()["input_features"].shape[1:])
    save_file({"input_features": heard}, tmp_path / "a.safetensors")
    probes = given(tmp_path / "a.safetensors", made("whisper"))
    assert torch.equal(joined(probes, "input_features"), heard)
    assert len(joined(probes, "decoder_input_ids")) == 8


@pytest.mark.parametrize(
    ("tensors", "case", "message"),
    [
        ({"pixel_values": torch.zeros(9, 3, 8, 8)}, "vit", "(3, 8, 8), and ViTModel wants (3, 12, 12)"),
        ({"pixel_values": torch.zeros(3, 3, 12, 12)}, "vit", "3 example(s), and 8 are the least"),
        ({"pixel_values": torch.full((9, 3, 12, 12), torch.nan)}, "vit", "pixel_values contains NaN"),
        ({"labels": torch.zeros(9)}, "vit", "the file holds nothing"),
        ({"input_ids": torch.full((9, 5), 31)}, "bert", "has token 31, and BertModel knows 31 tokens"),
        (
            {"input_ids": torch.zeros(9, 5, 2, dtype=torch.int64)},
            "bert",
            "input_ids has shape (9, 5, 2), and",
        ),
        ({"speech": torch.zeros(9, 5), "b": torch.zeros(9)}, "bert", "speech, which BertModel does not take"),
        ({"input_features": torch.zeros(9, 5, 7)}, "whisper", "input_features has shape (9, 5, 7), and"),
    ],
)
def test_tensors_that_cannot_be_shown(tensors, case, message, made, tmp_path):
    file = tmp_path / "a.safetensors"
    save_file(tensors, file)
    info = refusal(file, made(case))
    assert info.startswith(f"{file}: ")
    assert message in info


def test_a_broken_file_of_tensors(made, tmp_path):
    (tmp_path / "a.npz").write_bytes(b"nothing")
    assert "cannot be read as examples (" in refusal(tmp_path / "a.npz", made("vit"))
