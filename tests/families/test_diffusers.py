"""Models of diffusers: pipelines, the names of files, methods that cannot be used, modules in memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from small_models import CASES, finetuned
from transfusion.errors import AlignmentError, ArchitectureError, CheckpointError
from transfusion.files.references import resolve
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel, largest_difference
from transfusion.transport.apply import apply
from transfusion.transport.transport import transport


@pytest.fixture
def pipeline(made, tmp_path) -> Path:
    """A folder as a pipeline is saved, without what surrounds the transformer."""
    root = tmp_path / "pipeline"
    shutil.copytree(made("flux"), root / "transformer")
    (root / "vae").mkdir()
    (root / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    return root


def test_of_a_pipeline_the_transformer_is_opened(pipeline, made):
    assert Model.open(pipeline).fingerprint == Model.open(made("flux")).fingerprint


def test_of_two_transformers_one_must_be_chosen(pipeline):
    shutil.copytree(pipeline / "transformer", pipeline / "transformer_2")
    with pytest.raises(CheckpointError, match="a pipeline, with transformer and transformer_2") as refusal:
        Model.open(pipeline)
    assert refusal.value.hint == f"give the folder of one model, such as {pipeline / 'transformer'}"
    assert Model.open(pipeline / "transformer_2").family.name == "flux"


def test_a_transformer_outside_its_pipeline_is_not_followed(pipeline, made):
    shutil.rmtree(pipeline / "transformer")
    (pipeline / "transformer").symlink_to(made("flux"))
    with pytest.raises(CheckpointError, match="leads outside"):
        Model.open(pipeline)


def test_a_part_of_a_pipeline_is_fetched_alone(pipeline, monkeypatch):
    calls = []

    def snapshot_download(repo_id, *, revision=None, allow_patterns=None):
        calls.append((repo_id, revision, allow_patterns))
        return str(pipeline)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve("org/name/transformer@v2") == pipeline / "transformer"
    ((repo, revision, patterns),) = calls
    assert (repo, revision) == ("org/name", "v2")
    others = [pattern for pattern in patterns if not pattern.startswith("transformer/")]
    assert others == ["README.md"]  # of the pipeline: it states the licence


def test_outputs_have_the_names_that_the_library_loads(made, tmp_path):
    """Also of a model in several files, with an index."""
    import diffusers

    case, b = CASES["flux"], tmp_path / "b"
    case.build(2).save_pretrained(b, max_shard_size="200KB")
    index = "diffusion_pytorch_model.safetensors.index.json"
    assert (b / index).exists()
    tuned = finetuned(case, made("flux"), tmp_path / "tuned")
    moved = transport(tuned, base=made("flux"), onto=b, method="naive")
    out = moved.save(tmp_path / "out")
    weights = {file.name for file in b.iterdir()}
    assert weights <= {file.name for file in out.iterdir()}
    assert json.loads((out / index).read_text())["weight_map"].keys() == moved.state_dict().keys()
    loaded = diffusers.FluxTransformer2DModel.from_pretrained(out).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in moved.state_dict().items())


def test_a_variant_is_written_under_the_plain_name(made, tmp_path):
    b = tmp_path / "b"
    CASES["flux"].build(2).to(torch.float16).save_pretrained(b, variant="fp16")
    tuned = finetuned(CASES["flux"], made("flux"), tmp_path / "tuned")
    out = transport(tuned, base=made("flux"), onto=b, method="naive").save(tmp_path / "out")
    assert [file.name for file in out.glob("*.safetensors")] == ["diffusion_pytorch_model.safetensors"]


def test_a_module_in_memory_is_moved_without_files(made):
    a, b = CASES["flux"].build(1), CASES["flux"].build(2)
    tuned = CASES["flux"].build(1)
    with torch.no_grad():
        tuned.proj_out.bias += 1
    moved = transport(tuned, base=a, onto=b, method="naive").module()
    assert type(moved) is type(b)
    assert torch.allclose(moved.proj_out.bias, b.proj_out.bias + 1)
    assert torch.equal(moved.x_embedder.weight, b.x_embedder.weight)
    files, memory = LiveModel.of(Model.open(made("flux"))), LiveModel.of(Model.open(a))
    assert largest_difference(files.outputs(), memory.outputs()) == 0


def test_positions_that_a_library_keeps_in_a_buffer_are_moved_in_memory(made):
    model = CASES["sd3"].build(1)
    live = LiveModel.of(Model.open(model))
    assert isinstance(live.module.pos_embed.pos_embed, torch.nn.Parameter)
    assert isinstance(model.pos_embed.pos_embed, torch.Tensor)
    assert "pos_embed" in model.pos_embed._buffers, "the user's module is left as it is"


def test_rotations_of_a_modulated_stream_are_refused(made):
    with pytest.raises(AlignmentError, match="that of a flux is multiplied unit by unit") as refusal:
        align(made("flux"), made("flux", seed=2), method="functional")
    assert "guarded" in refusal.value.hint


def test_auto_falls_back_to_a_permutation(made):
    pi = align(made("flux"), made("flux", seed=2), goes_on=True)
    assert pi.provenance.advice["chosen"] == "permutation"
    assert "it may be permuted only" in pi.provenance.advice["not_tried"]["functional"]
    assert "functional, which goes by" not in pi.provenance.advice["text"]


def test_an_unknown_class_of_the_library_is_refused(made, tmp_path):
    folder = shutil.copytree(made("flux"), tmp_path / "a")
    config = json.loads((folder / "config.json").read_text())
    for name in ("DiffusionPipeline", "AutoencoderKL", "__class__"):
        (folder / "config.json").write_text(json.dumps({**config, "_class_name": name}))
        with pytest.raises(ArchitectureError, match=f"'{name}' is not supported") as refusal:
            Model.open(folder)
        assert "there are tables for ChromaTransformer2DModel, Flux2Transformer2DModel" in refusal.value.hint


def test_the_class_of_an_earlier_release_is_built_as_today(made, tmp_path):
    folder = shutil.copytree(made("pixart"), tmp_path / "a")
    config = json.loads((folder / "config.json").read_text())
    older = {"_class_name": "Transformer2DModel", "num_vector_embeds": None, "double_self_attention": False}
    (folder / "config.json").write_text(json.dumps({**config, **older}))
    before, now = LiveModel.of(Model.open(folder)), LiveModel.of(Model.open(made("pixart")))
    assert type(before.module) is type(now.module)
    assert largest_difference(before.outputs(), now.outputs()) == 0


def test_a_setting_that_the_table_does_not_know_is_refused(made, tmp_path):
    folder = shutil.copytree(made("flux"), tmp_path / "a")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "parallel": True}))
    with pytest.raises(ArchitectureError, match="settings that the flux table does not know: parallel=True"):
        Model.open(folder)


def test_blocks_that_attend_twice_must_be_the_first(made, tmp_path):
    model = Model.open(made("sd3.5-medium"))
    config = {**model.config, "dual_attention_layers": [1]}
    with pytest.raises(ArchitectureError, match=r"dual_attention_layers = \[1\]"):
        model.family.table(config, frozenset(model.names))


def test_tensors_that_are_stored_and_never_read_stay(made, tmp_path):
    """Published models of Wan with an image hold a norm that the library ignores."""
    folder = shutil.copytree(made("wan-image"), tmp_path / "a")
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    unused = {f"blocks.{i}.attn2.norm_added_q.weight": torch.full((30,), 2.0) for i in range(2)}
    save_file({**tensors, **unused}, file)
    model = Model.open(folder)
    assert model.architecture.buffers == set(unused)
    pi = align(folder, folder, method="random", residual="tied", seed=3)
    moved = apply(pi, folder).state_dict()
    assert all(torch.equal(moved[name], value) for name, value in unused.items())
    assert not torch.equal(moved["proj_out.weight"], tensors["proj_out.weight"])
