"""A transport by a given π reads and hashes every input once, and is refused at the end if π is another one's."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from small_models import CASES, finetuned
from tests.files.test_staging import content, dies, in_shards, kill_at, overwrite
from transfusion.errors import AlignmentError, CheckpointError, TransfusionError
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.staging import StagingFolder
from transfusion.files.tensor_files import TensorReader
from transfusion.matching.alignment_run import align
from transfusion.model.model import Model
from transfusion.model.weight_sample import weight_sample
from transfusion.runtime.progress import Advance, Progress
from transfusion.runtime.resources import Resources
from transfusion.transport.output_model import OutputModel
from transfusion.transport.transport_run import merge, transport


@pytest.fixture(scope="module")
def inputs(made, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("once")
    a, b = in_shards(made("llama", 1), root / "a"), in_shards(made("llama", 2), root / "b")
    tuned = in_shards(finetuned(CASES["llama"], a, root / "whole"), root / "tuned", "20KB")
    pi = align(a, b, method="random", output=root / "sampled.safetensors")
    unsampled = replace(pi.provenance, source_sample="", target_sample="")  # so that the whole decides
    replace(pi, provenance=unsampled).save(root / "pi.safetensors")
    return {"base": a, "onto": b, "finetuned": tuned, "via": root / "pi.safetensors"}


@pytest.fixture(scope="module")
def undisturbed(inputs, tmp_path_factory) -> Path:
    return written(inputs, tmp_path_factory.mktemp("undisturbed") / "moved")


def written(inputs: dict[str, Path], place: Path, **more: object) -> Path:
    transport(**inputs, output=place, **{"resources": Resources(jobs=1), **more})
    return place


def altered(folder: Path, place: Path, shard: int) -> Path:
    """The same model but for one number in one shard."""
    shutil.copytree(folder, place)
    file = sorted(place.glob("*.safetensors"))[shard]
    state = load_file(file)
    name = next(name for name, one in state.items() if one.ndim == 2)
    state[name][0, 0] += 0.5
    save_file(state, file, {"format": "pt"})
    return place


class Meddling(Progress):
    """Do something when the first tensor is computed."""

    def __init__(self, meddle: Callable[[], None]) -> None:
        self.meddle, self.done = meddle, False

    @contextmanager
    def bar(self, total: int | None = None, text: str = "") -> Iterator[Advance]:
        def advance(text: str, done: int | None = None, total: int | None = None) -> None:
            if not self.done:
                self.done = True
                self.meddle()

        yield advance


@pytest.mark.parametrize("jobs", [1, 3])
def test_every_byte_is_read_once(jobs, inputs, undisturbed, tmp_path, monkeypatch):
    read, real = Counter(), TensorReader.read_into

    def counted(self, buffer, start):
        read[self.info.file.parent.name] += len(buffer)
        real(self, buffer, start)

    monkeypatch.setattr(TensorReader, "read_into", counted)
    monkeypatch.setattr(Checkpoint, "blocks", None)
    written(inputs, tmp_path / "moved", trust_base=True, resources=Resources(jobs=jobs))
    for role in ("base", "onto", "finetuned"):
        assert read[inputs[role].name] == Checkpoint.open(inputs[role]).nbytes
    assert content(tmp_path / "moved") == content(undisturbed)


def test_a_merge_reads_once_unless_it_needs_thresholds_first(inputs, tmp_path, monkeypatch):
    now = {**inputs, "finetuned": [inputs["finetuned"], inputs["finetuned"]]}
    merge(**now, output=tmp_path / "ties", how="ties")
    hashed = []
    monkeypatch.setattr(Checkpoint, "blocks", lambda self, name, **how: hashed.append(name))
    merge(**now, output=tmp_path / "sum", how="sum")
    assert not hashed
    with pytest.raises(TypeError):
        merge(**now, output=tmp_path / "again", how="ties")
    assert hashed


def test_the_record_has_the_hashes_of_all_inputs(inputs, undisturbed):
    record = json.loads((undisturbed / "transfusion.json").read_text())
    assert record["finetuned"][0]["blake3"] == Model.open(inputs["finetuned"]).digest
    for role in ("base", "onto"):
        assert record[role]["blake3"] == Model.open(inputs[role]).digest


@pytest.mark.parametrize("role", ["base", "onto"])
@pytest.mark.parametrize("shard", [0, -1])
def test_nothing_appears_if_pi_is_for_other_weights(role, shard, inputs, tmp_path):
    now = {**inputs, role: altered(inputs[role], tmp_path / "other", shard)}
    (tmp_path / "here").mkdir()
    with pytest.raises(AlignmentError, match="has other weights"):
        written(now, tmp_path / "here" / "moved")
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize("role", ["base", "onto"])
@pytest.mark.parametrize("shard", [0, -1])
def test_a_pi_for_weights_with_another_sample_is_refused_at_once(role, shard, inputs, tmp_path, monkeypatch):
    pi = inputs["via"].with_name("sampled.safetensors")
    now = {**inputs, "via": pi, role: altered(inputs[role], tmp_path / "other", shard)}
    monkeypatch.setattr(OutputModel, "write", None)
    with pytest.raises(AlignmentError, match="has other weights"):
        written(now, tmp_path / "moved")


def test_a_sample_is_the_same_however_a_model_is_stored(made, inputs, tmp_path):
    import transformers

    assert weight_sample(Model.open(made("llama", 1))) == weight_sample(Model.open(inputs["base"]))
    assert weight_sample(Model.open(made("llama", 2))) != weight_sample(Model.open(inputs["base"]))
    in_pieces = Model.open(made("mixtral"))
    whole = Model.open(transformers.MixtralForCausalLM.from_pretrained(made("mixtral")))
    assert whole.digest == in_pieces.digest
    assert weight_sample(whole) == weight_sample(in_pieces)


@pytest.mark.parametrize("role", ["base", "onto", "finetuned"])
def test_an_input_that_changes_while_it_is_read_spoils_the_run(role, inputs, tmp_path):
    now = {**inputs, role: shutil.copytree(inputs[role], tmp_path / role)}
    (tmp_path / "here").mkdir()
    for number in (0, -1):
        file = sorted(now[role].glob("*.safetensors"))[number]
        with pytest.raises(CheckpointError, match="changed while it was being read"):
            written(now, tmp_path / "here" / "moved", progress=Meddling(lambda file=file: overwrite(file)))
        assert not list((tmp_path / "here").iterdir())


def interrupted(inputs: dict[str, Path], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        kill_at(patch, StagingFolder, "finish", 3, after=True)
        dies(lambda: written(inputs, place))


def test_finished_shards_of_the_same_inputs_are_kept(inputs, undisturbed, tmp_path, monkeypatch):
    interrupted(inputs, tmp_path / "moved", monkeypatch)
    finish, made = StagingFolder.finish, []
    monkeypatch.setattr(
        StagingFolder, "finish", lambda self, name, **how: (made.append(name), finish(self, name, **how))
    )
    written(inputs, tmp_path / "moved")
    assert content(tmp_path / "moved") == content(undisturbed)
    shards = sorted(path.name for path in undisturbed.glob("*.safetensors"))
    assert made == shards[3:]


@pytest.mark.parametrize("shard", [0, -1])
@pytest.mark.parametrize("role", ["base", "onto", "finetuned"])
def test_shards_of_other_inputs_are_not_kept(role, shard, inputs, tmp_path, monkeypatch):
    interrupted(inputs, tmp_path / "moved", monkeypatch)
    now = {**inputs, role: altered(inputs[role], tmp_path / "other", shard)}

    def outcome(place: Path) -> object:
        try:
            return content(written(now, place))
        except TransfusionError as error:
            return type(error), error.message

    assert outcome(tmp_path / "moved") == outcome(tmp_path / "anew")


@pytest.mark.parametrize("role", ["base", "onto"])
def test_shards_of_weights_that_pi_does_not_name_are_made_again(
    role, inputs, undisturbed, tmp_path, monkeypatch
):
    """The first run did not come so far as to notice that it had another base."""
    wrong = {**inputs, role: altered(inputs[role], tmp_path / "other", 0)}
    interrupted(wrong, tmp_path / "moved", monkeypatch)
    assert content(written(inputs, tmp_path / "moved")) == content(undisturbed)


def test_a_pi_for_other_weights_is_refused_first_when_a_run_goes_on(inputs, tmp_path, monkeypatch):
    interrupted(inputs, tmp_path / "moved", monkeypatch)
    monkeypatch.setattr(import_module("transfusion.transport.dense_transport").DenseTransport, "rows", None)
    now = {**inputs, "onto": altered(inputs["onto"], tmp_path / "other", 0)}
    with pytest.raises(AlignmentError, match="has other weights"):
        written(now, tmp_path / "moved")
