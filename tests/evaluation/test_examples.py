"""Raw examples: what is read from folders, tables and datasets, and what is refused with the reason."""

from __future__ import annotations

import csv
import json
import logging
import os
import re
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from transfusion.data.examples import Columns, Examples, ImageFile
from transfusion.data.read_examples import read_examples
from transfusion.data.tables import read_texts
from transfusion.errors import DataError

ROWS = [("a warm day", "positive"), ('a cold, "wet" day', "negative"), ("a day", "positive")]


def refusal(*arguments) -> str:
    with pytest.raises(DataError) as caught:
        read_examples(*arguments)
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value.message


def picture(shade: int = 0) -> Image.Image:
    return Image.new("RGB", (8, 6), (shade, 0, 0))


def as_bytes(shade: int) -> bytes:
    held = BytesIO()
    picture(shade).save(held, "PNG")
    return held.getvalue()


def shades(examples: Examples) -> list[int]:
    return [one.opened().getpixel((0, 0))[0] for one in examples.images]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two classes, three images."""
    for name, shade in (("dog/1.png", 10), ("cat/b.png", 20), ("cat/a.png", 30)):
        file = tmp_path / "pets" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        picture(shade).save(file)
    (tmp_path / "pets" / "notes.txt").write_text("no image")
    (tmp_path / "pets" / "cat" / "._a.png").write_bytes(b"what a Mac leaves behind")
    return tmp_path / "pets"


# ── images ───────────────────────────────────────────────────────────────────────────────────


def test_a_folder_of_classes(folder):
    found = read_examples(folder)
    assert found.labels == ["cat", "cat", "dog"]
    assert found.names == ("cat", "dog")
    assert shades(found) == [30, 20, 10]
    assert len(found) == 3


def test_a_limit_takes_all_classes(folder):
    assert read_examples(folder).limited(2).labels == ["cat", "dog"]
    assert len(read_examples(folder).limited(9)) == 3


def test_splits_of_a_folder(folder):
    (folder / "notes.txt").unlink()
    for split in ("train", "test"):
        (folder.parent / "whole" / split).mkdir(parents=True)
    (folder / "cat").rename(folder.parent / "whole" / "train" / "cat")
    (folder / "dog").rename(folder.parent / "whole" / "test" / "dog")
    whole = folder.parent / "whole"
    assert read_examples(whole, "test").names == ("dog",)
    assert refusal(whole) == f"{whole}: which split? there are test, train"
    assert refusal(whole, "dev") == f"{whole}: no split dev; there are test, train"


def test_folders_that_cannot_be_read(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty") == f"{tmp_path / 'empty'}: no images in folders of classes"
    (folder / "cat" / "a.png").rename(tmp_path / "empty" / "a.png")
    assert refusal(tmp_path / "empty").endswith(", only images without a folder")
    (folder / "dog" / "1.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="1.png: cannot be read as an image"):
        shades(read_examples(folder))


def test_images_in_tables(folder):
    file = folder / "all.csv"
    file.write_text("image,label\ncat/a.png,1\ndog/1.png,0\n")
    found = read_examples(file)
    assert (found.labels, found.names, shades(found)) == ([1, 0], None, [30, 10])
    (folder / "all.jsonl").write_text('{"file_name": "cat/b.png", "class": "cat"}')
    found = read_examples(folder / "all.jsonl")
    assert (found.labels, shades(found)) == (["cat"], [20])
    file.write_text("image,label\nnowhere.png,1\n")
    assert refusal(file) == f"{file}, example 1: no image {folder / 'nowhere.png'}"


def test_images_as_bytes_in_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / "all.parquet"
    cells = [{"bytes": as_bytes(40), "path": None}, {"bytes": as_bytes(50), "path": "x.png"}]
    pyarrow.parquet.write_table(pyarrow.table({"image": cells, "label": [2, 0]}), file)
    found = read_examples(file)
    assert (found.labels, shades(found)) == ([2, 0], [40, 50])
    file.write_bytes(b"no table")
    assert refusal(file).startswith(f"{file}: cannot be read as parquet (")


# ── texts ────────────────────────────────────────────────────────────────────────────────────


def write_csv(path: Path) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("sentence", "label"), *ROWS])


def write_tsv(path: Path) -> None:
    path.write_text("\n".join("\t".join(row) for row in [("sentence", "label"), *ROWS]))


def write_jsonl(path: Path) -> None:
    path.write_text("\n".join(json.dumps({"sentence": text, "label": name}) for text, name in ROWS))


def write_parquet(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    texts, names = zip(*ROWS, strict=True)
    pyarrow.parquet.write_table(pyarrow.table({"sentence": texts, "label": names}), path)


@pytest.mark.parametrize(
    ("suffix", "write"),
    [(".csv", write_csv), (".tsv", write_tsv), (".jsonl", write_jsonl), (".parquet", write_parquet)],
)
def test_texts_in_tables(suffix, write, tmp_path):
    file = tmp_path / f"reviews{suffix}"
    write(file)
    found = read_examples(file)
    assert list(found.texts) == [(text,) for text, _ in ROWS]
    assert found.labels == [name for _, name in ROWS]
    assert found.task is None
    assert read_examples(file, None, Columns(text=("label",), label="sentence")).texts[0] == ("positive",)
    message = refusal(file, None, Columns(text=("body",)))
    assert message == f"{file}: no column body; there are sentence, label"
    assert refusal(file, "test") == f"{file}: a file has no splits, and test was asked for"


def test_lines_of_a_text(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert read_examples(tmp_path / "a.txt").texts == [("one",), ("two",)]
    (tmp_path / "a.csv").write_text("one\ntwo\n")
    assert read_examples(tmp_path / "a.csv").texts == [("one",), ("two",)]
    assert read_examples(tmp_path / "a.csv", None, Columns(text=("one",))).texts == [("two",)]
    write_parquet(tmp_path / "a.parquet")
    assert refusal_of_lines(tmp_path / "a.parquet").endswith('no column "text" among sentence, label')


@pytest.mark.parametrize("mark", ["\u2028", "\x85", "\x0c", "\x1c"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_only_line_ends_end_lines(mark, end, tmp_path):
    text = f"a day{mark}at sea"
    rows = {
        "a.txt": [text, "two"],
        "a.csv": ["text,label", f"{text},0", "two,1"],
        "a.tsv": ["text\tlabel", f"{text}\t0", "two\t1"],
        "a.jsonl": [json.dumps({"text": one, "label": 0}, ensure_ascii=False) for one in (text, "two")],
    }
    for name, written in rows.items():
        file = tmp_path / name
        file.write_bytes((end.join(written) + end).encode())
        assert read_examples(file).texts == [(text,), ("two",)], name
        assert list(read_texts(file)) == [text, "two"], name


def test_lines_within_cells_and_marks_of_byte_order(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes(b'\xef\xbb\xbftext,label\r\n"one\ntwo\r\nthree",1\r\nfour,0\r\n')
    found = read_examples(file)
    assert (found.texts, found.labels) == ([("one\ntwo\r\nthree",), ("four",)], [1, 0])
    (tmp_path / "b.csv").write_text("a; b\nc\n")
    assert read_examples(tmp_path / "b.csv").texts == [("a; b",), ("c",)]
    file.write_text("text,label\na,1.0\nb,-1\n")
    assert read_examples(file).labels == [1, -1]
    (tmp_path / "c.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n')
    assert read_examples(tmp_path / "c.jsonl").texts == [("one",)]


def refusal_of_lines(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        list(read_texts(path))
    return caught.value.message


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "\n\n", "there are no examples in it"),
        ("a.csv", "x,y\n1,2\n", "no column of texts or images that has a usual name; there are x, y"),
        ("a.csv", "text,label\na,1,2\n", "row 2 has 3 cells, and there are 2 columns"),
        ("a.jsonl", '{"text": "a"}\n{"body": "b"}', "line 2 has body, and the first line has text"),
        ("a.jsonl", "[1]", "line 1 is no object"),
        ("a.jsonl", '{"text": 3}', "example 1 has int in the column text, not a text"),
        (
            "a.jsonl",
            '{"text": "a", "label": 0.5}',
            'example 1 has "0.5" in the column label, which is not a class',
        ),
        ("a.csv", "text,label\na,1\nb,\n", "example 2 has no label in the column label"),
        ("a.jsonl", '{"text": "a", "label": null}', "example 1 has no label in the column label"),
        ("a.jsonl", '{"text": "a", "label": NaN}', "example 1 has no label in the column label"),
        ("a.csv", "", "the file is empty"),
        ("a.jsonl", "\n", "the file is empty"),
        ("a.csv", "one\ntwo, three\n", "row 2 has 2 cells, and there is 1 column"),
        (
            "a.csv",
            "text;label\nwell, a day;1\na night;0\n",
            "commas were expected between columns, and there are semicolons",
        ),
        ("a.csv", "text\tlabel\na\t1\n", "commas were expected between columns, and there are tabs"),
        ("a.doc", "", "not a kind of file that holds examples"),
    ],
)
def test_tables_that_cannot_be_read(name, text, message, tmp_path):
    file = tmp_path / name
    file.write_text(text)
    assert refusal(file) == f"{file}: {message}"


def test_what_is_nowhere(tmp_path):
    assert refusal(tmp_path / "none.csv") == f"{tmp_path / 'none.csv'}: no such file or folder"
    message = refusal("nobody/nothing:plain@main")
    assert message.startswith(
        "nobody/nothing:plain@main: no such file or folder here, and the hub could not provide it ("
    )


@pytest.mark.parametrize("there", [False, True])
def test_the_hub_is_asked_once(there, monkeypatch, caplog):
    """Where it does not answer, only what was fetched before is looked for, without asking again."""
    import datasets
    import huggingface_hub

    asked, offline = [], []

    def silent(repo, **more):
        asked.append(repo)
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise OSError("nobody answers")

    def load(repo, config, revision):
        offline.append((datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE))
        if not there:
            raise ConnectionError("offline mode")
        return datasets.Dataset.from_dict({"text": ["one"], "label": [0]})

    before = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    monkeypatch.setattr(huggingface_hub, "dataset_info", silent)
    monkeypatch.setattr(datasets, "load_dataset", load)
    if there:
        assert read_examples("some/data").texts == [("one",)]
    else:
        assert refusal("some/data").endswith("the hub could not provide it (nobody answers)")
    assert (asked, offline) == (["some/data"], [(True, True)])
    assert before == (datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE)
    assert not caplog.records


def test_data_that_the_hub_does_not_have_is_not_loaded(monkeypatch):
    import datasets
    import huggingface_hub

    def missing(repo, **more):
        raise huggingface_hub.errors.HFValidationError("no such name")

    monkeypatch.setattr(huggingface_hub, "dataset_info", missing)
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **more: pytest.fail("was loaded"))
    assert refusal("some/dtaa").endswith("the hub could not provide it (no such name)")


# ── GLUE ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("place", "head", "task"),
    [
        ("glue/sst2/dev.tsv", "sentence", "sst2"),
        ("SST-2/dev.tsv", "sentence", "sst2"),
        ("qqp.tsv", "question1\tquestion2", "qqp"),
        ("glue/RTE/dev.tsv", "sentence1\tsentence2", "rte"),
        ("cola_dev.tsv", "sentence", "cola"),
        ("chocolate.tsv", "sentence", None),
        ("qqp2/dev.tsv", "sentence", None),
    ],
)
def test_tasks_that_are_known_by_name(place, head, task, tmp_path):
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    width = len(head.split("\t"))
    file.write_text(f"{head}\tlabel\n" + "\t".join(["some words"] * width) + "\t1\n")
    found = read_examples(file)
    assert found.task == task
    assert (found.names is None) == (task is None)
    assert found.texts == [("some words",) * width]
    assert read_examples(file.parent, "dev").texts == found.texts if file.stem == "dev" else True


# ── datasets ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def saved(tmp_path) -> Path:
    """A dictionary of splits, as the library saves it: images with classes that have names."""
    import datasets

    features = datasets.Features(
        {"picture": datasets.Image(), "label": datasets.ClassLabel(names=["tree", "house"])}
    )
    cells = [{"bytes": as_bytes(shade), "path": None} for shade in (60, 70)]
    made = datasets.Dataset.from_dict({"picture": cells, "label": [1, 0]}, features=features)
    datasets.DatasetDict({"train": made.select([0]), "test": made}).save_to_disk(tmp_path / "saved")
    made.save_to_disk(tmp_path / "single")
    return tmp_path


def test_folders_of_datasets(saved):
    found = read_examples(saved / "saved", "test")
    assert (found.labels, found.names, shades(found)) == ([1, 0], ("tree", "house"), [60, 70])
    assert read_examples(saved / "single").labels == [1, 0]
    assert refusal(saved / "saved", "dev") == f"{saved / 'saved'}: no split dev; there are train, test"
    assert refusal(saved / "single", "dev") == f"{saved / 'single'}: no split dev; it has no splits"
    (saved / "single" / "state.json").write_text("{}")
    assert refusal(saved / "single").startswith(f"{saved / 'single'}: cannot be read as a folder of datasets")


# ── nothing outside, no other programs ───────────────────────────────────────────────────────


@pytest.mark.parametrize("cell", ["../secret.png", "{}", "link.png"])
def test_a_table_shows_only_images_beside_it(cell, tmp_path):
    Image.new("RGB", (4, 4)).save(secret := tmp_path / "secret.png")
    (place := tmp_path / "place").mkdir()
    (place / "link.png").symlink_to(secret)
    (place / "data.csv").write_text(f"image,label\n{cell.format(secret)},0\n")
    with pytest.raises(DataError, match="leads outside .* and is not followed"):
        read_examples(place / "data.csv")


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_folder_of_classes_shows_only_regular_files_in_it(kind, tmp_path):
    Image.new("RGB", (4, 4)).save(secret := tmp_path / "secret.png")
    (place := tmp_path / "data" / "cat").mkdir(parents=True)
    if kind == "link":
        (place / "x.png").symlink_to(secret)
    else:
        os.mkfifo(place / "x.png")
    with pytest.raises(DataError, match=r"x\.png: (the link leads outside|not a regular file)"):
        read_examples(tmp_path / "data")


@pytest.mark.parametrize("name", ["train", "train.csv"])
def test_a_split_that_leads_outside_is_not_followed(name, tmp_path):
    (tmp_path / "train" / "cat").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "train" / "cat" / "x.png")
    (tmp_path / "train.csv").write_text("text,label\na,0\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).symlink_to(tmp_path / name)
    with pytest.raises(DataError, match=f"{name}: the link leads outside"):
        read_examples(tmp_path / "data")


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "WEBP", "BMP", "PNG", "JPEG", "MPO"])
def test_every_kind_of_image_can_be_shown(kind, tmp_path):
    place = tmp_path / f"x.{kind.lower()}"
    picture = Image.new("RGB", (4, 4), (200, 200, 200))
    picture.save(place, kind, **({"save_all": True, "append_images": [picture]} if kind == "MPO" else {}))
    for one in (ImageFile.at(place), ImageFile("x", place.read_bytes())):
        assert one.opened().getpixel((1, 1)) == (200, 200, 200)
    place.write_bytes(place.read_bytes()[:12])
    with pytest.raises(DataError, match="cannot be read as an image") as refused:
        ImageFile("x", place.read_bytes()).opened()
    assert not re.search("BytesIO|KeyError|'MPO'", str(refused.value))


def test_no_other_program_is_started_to_show_a_picture(tmp_path, monkeypatch):
    """Pillow would let Ghostscript render PostScript, whatever the file is called."""
    (tmp_path / "x.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    )

    def start(*args: object, **kwargs: object) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr("subprocess.Popen.__init__", start)
    with pytest.raises(DataError, match="cannot be read as an image"):
        ImageFile.at(tmp_path / "x.png").opened()
