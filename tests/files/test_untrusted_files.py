"""The door: odd values in files from outside are refused by name, before anything is made of them."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from transfusion.alignment.alignment import Alignment
from transfusion.errors import (
    AdapterError,
    AlignmentError,
    ArchitectureError,
    CheckpointError,
    DataError,
    SettingError,
    TransfusionError,
)
from transfusion.files.checkpoint import CONFIGS
from transfusion.model.model import Model
from transfusion.model.recognition import KINDS, require_sensible
from transfusion.model.tensor_pieces import gather_pieces
from transfusion.running.probes.inputs import random_inputs
from transfusion.runtime.untrusted_files import parse_json
from transfusion.transport.adapters.adapter import Adapter
from transfusion.transport.adapters.settings import ModulePatterns, ModuleSettings
from transfusion.transport.alpha import Alpha

# ── config.json ──────────────────────────────────────────────────────────────────────────────

NOT_SIZES = (0, -1, "8", 3.5, 10**9, True, [8], {"a": 1}, float("nan"), 10**400)


def configured(folder: Path, place: Path, **settings: object) -> Path:
    """The same weights with other settings; ``section__key`` is a setting of a section."""
    place.mkdir()
    config = next(path for name in CONFIGS if (path := folder / name).exists())
    info = json.loads(config.read_text())
    for key, value in settings.items():
        *sections, last = key.split("__")
        part = info
        for section in sections:
            part = part[section]
        part[last] = value
    (place / config.name).write_text(json.dumps(info))
    for file in folder.iterdir():
        if file != config:
            (place / file.name).write_bytes(file.read_bytes())
    return place


def refused(config: dict[str, object], key: str) -> None:
    with pytest.raises(ArchitectureError) as caught:
        require_sensible(config, "m: config.json")
    assert caught.value.message.startswith(f"m: config.json: {key}: ")
    assert caught.value.hint


@pytest.mark.parametrize("value", NOT_SIZES, ids=lambda value: str(value)[:12])
@pytest.mark.parametrize(
    "key", ["head_dim", "hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"]
)
def test_what_is_no_size_is_refused_by_name(key, value):
    refused({key: value}, key)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", ["llama"]),
        ("model_type", None),
        ("architecture", 5),
        ("architectures", "LlamaForCausalLM"),
        ("architectures", [5]),
        ("architectures", {"a": 1}),
        ("text_config", []),
        ("vision_config", "x"),
        ("model_cfg", 5),
        ("model_args", [1]),
        ("depths", ["2", "2"]),
        ("depths", []),
        ("depths", 5),
        ("depths", [2] * 1000),
        ("conv_dim", [8, 0]),
        ("num_heads", [1, -1]),
        ("rope_parameters", [1]),
        ("rope_parameters", "default"),
        ("tie_word_embeddings", "no"),
        ("tie_word_embeddings", 1),
        ("is_encoder_decoder", "yes"),
        ("partial_rotary_factor", 2.0),
        ("rotary_pct", float("nan")),
        ("layer_norm_eps", float("inf")),
        ("image_size", 10**6),
        ("image_size", [8, "8"]),
        ("patch_size", 0),
        ("id2label", ["a"]),
        ("label2id", 5),
        ("eos_token_id", "x"),
        ("hidden_size", None),
        ("num_layers", 10**9),
        ("mean", ["a"]),
        ("pretrained_cfg", [1]),
    ],
)
def test_values_of_another_kind_are_refused_by_name(key, value):
    refused({key: value}, key)


def test_settings_of_sections_are_named_with_their_section():
    refused({"text_config": {"hidden_size": "8"}}, "text_config.hidden_size")
    refused({"model_cfg": {"vision_cfg": {"width": 0}}}, "model_cfg.vision_cfg.width")
    refused({"rope_parameters": {"partial_rotary_factor": "x"}}, "rope_parameters.partial_rotary_factor")
    endless: dict[str, object] = {}
    for _ in range(500):
        endless = {"text_config": endless}
    with pytest.raises(ArchitectureError, match="sections are nested too deeply"):
        require_sensible(endless, "m")


def test_null_means_not_given_where_libraries_say_so():
    require_sensible(dict.fromkeys(["head_dim", "num_key_value_heads", "architectures", "rope_scaling"]), "m")
    require_sensible({"conv_dim": (8, 8), "id2label": {0: "a"}}, "as it is in memory")


def test_every_setting_that_has_a_kind_is_a_setting_of_some_table():
    from transfusion.families import all_families

    families = all_families()
    parts = [part for family in families for part in family.components.values()]
    parts += [part.family for part in parts if part.family is not None]
    known = {key for one in (*families, *parts) for key in (*one.known_keys, *one.required)}
    known |= {section for family in families for section in family.components}
    assert {key for key in KINDS if key not in known} <= {
        "mask_token_id",
        "test_crop_pct", "rotary_pct",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("case", "settings", "match"),
    [
        ("llama", {"head_dim": 10**6}, r"does not fit its layout"),
        ("llama", {"head_dim": 0}, "config.json: head_dim: "),
        ("llama", {"num_hidden_layers": 1_000_000_000}, "config.json: num_hidden_layers: "),
        ("llama", {"num_hidden_layers": 9_999}, "has 9999 blocks in 'layer', but there are only"),
        ("llama", {"num_attention_heads": 5, "num_key_value_heads": 2}, "5 is not a multiple of 2"),
        ("gpt_neox", {"num_attention_heads": 5}, "is not a multiple of 5"),
        ("t5", {"d_kv": 3}, "does not fit its layout"),
        ("open_clip", {"model_cfg__vision_cfg__head_width": 5}, "is not a multiple of 5"),
        ("swin", {"num_heads": [2]}, "an impossible value"),
        ("bert", {"architectures": "BertModel"}, "config.json: architectures: "),
        ("bert", {"model_type": ["bert"]}, "config.json: model_type: "),
        ("bert", {"quantization_config": [1]}, "is quantised"),
        ("clip", {"text_config": []}, "config.json: text_config: "),
    ],
)  # fmt: skip
def test_a_model_is_not_opened_with_settings_that_its_tensors_cannot_have(
    case, settings, match, made, tmp_path
):
    with pytest.raises(TransfusionError, match=match) as caught:
        Model.open(configured(made(case), tmp_path / "odd", **settings))
    assert caught.value.hint


def test_numbers_in_names_are_not_counted_up_to(made, tmp_path):
    """``blocks.999999999`` and ``experts.999999999`` are names like any other."""
    infos = Model.open(made("bert")).checkpoint.tensors
    some = next(iter(infos))
    with pytest.raises(ArchitectureError, match=r"999999999 of them are missing: w#0, w#1"):
        gather_pieces({"w#999999999": some}, infos, "m")
    assert gather_pieces({f"w#{'9' * 5000}": some}, infos, "m")
    state = load_file(made("timm-vit") / "model.safetensors")
    folder = configured(made("timm-vit"), tmp_path / "deep")
    save_file({**state, "blocks.999999.norm1.weight": torch.zeros(24)}, folder / "model.safetensors")
    with pytest.raises(ArchitectureError, match="1000000 blocks in 'layer', but there are only"):
        Model.open(folder)


@pytest.mark.parametrize(
    ("case", "settings", "match"),
    [
        ("bert", {"vocab_size": 2**24}, "by its configuration the model has"),
        ("bert", {"max_position_embeddings": 2**24}, "by its configuration the model has"),
        ("bert", {"architectures": ["AutoTokenizer"]}, "names AutoTokenizer, which is no class"),
        ("bert", {"architectures": ["logging"]}, "names logging, which is no class"),
        ("bert", {"hidden_act": "no such function"}, "cannot build the module"),
        ("bert", {"id2label": {"a": "b"}}, "cannot build the module"),
    ],
)
def test_a_live_model_takes_no_more_than_its_tensors_justify(case, settings, match, made, tmp_path):
    from transfusion.running.building import build

    model = Model.open(configured(made(case), tmp_path / "odd", **settings))
    with pytest.raises(ArchitectureError, match=match):
        build(model)


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("swin", {"image_size": 2**14}),
        ("whisper", {"max_source_positions": 2**24}),
        ("wav2vec2", {"conv_stride": [2**24] * 7}),
        ("siglip2", {"vision_config__num_patches": None}),
    ],
)
def test_inputs_are_made_up_within_bounds(case, settings, made, tmp_path):
    from small_models import CASES, FIRST

    name = case if case in CASES else FIRST[case]
    config = json.loads((made(name) / "config.json").read_text())
    for key, value in settings.items():
        *section, last = key.split("__")
        (config[section[0]] if section else config)[last] = value
    family = Model.open(made(name)).family
    with pytest.raises(ArchitectureError, match="the configuration"):
        random_inputs(family, config)


# ── adapter_config.json ──────────────────────────────────────────────────────────────────────


@pytest.fixture
def adapter(tmp_path) -> Path:
    """The folder of a LoRA, good enough to be opened."""
    save_file({"base_model.model.q.lora_A.weight": torch.zeros(2, 4)}, tmp_path / "adapter_model.safetensors")
    return tmp_path


def opened(folder: Path, **settings: object) -> Adapter:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"], **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return Adapter.open(folder)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("lora_alpha", value) for value in (NAN, INF, -INF, "x", True, [1], {}, -1)),
        *(("r", value) for value in (0, -1, 2.5, "2", True, 10**9, [2])),
        *(("target_modules", value) for value in (5, True, {"q": 1}, [5], 1.5)),
        *(("rank_pattern", value) for value in ([1], "q", {"q": 0}, {"q": "2"}, {"q": NAN}, {"q": [1]})),
        *(("alpha_pattern", value) for value in ([1], 5, {"q": 0}, {"q": "2"}, {"q": INF}, {"q": True})),
        *(("modules_to_save", value) for value in (5, "head", [5], {"head": 1})),
        *(("layers_to_transform", value) for value in ("1", [-1], 1.5, {"a": 1})),
        ("layers_pattern", 5),
        ("exclude_modules", 5),
        ("token_indices", ["1"]),
        ("trainable_token_indices", {"embed": "x"}),
        ("trainable_token_indices", [-1]),
        ("auto_mapping", ["a"]),
        ("auto_mapping", {"base_model_class": 5}),
        ("task_type", ["CAUSAL_LM"]),
        ("peft_type", {"a": 1}),
        ("base_model_name_or_path", 5),
        ("base_model_name_or_path", "a\0b"),
        ("base_model_name_or_path", "a" * 2000),
        ("revision", 1),
        ("bias", [1]),
        ("fan_in_fan_out", "no"),
        ("use_rslora", 1),
        ("use_dora", "yes"),
        ("init_lora_weights", {"a": 1}),
        ("init_r", 0),
        ("num_virtual_tokens", -1),
        ("num_layers", "x"),
    ],
    ids=str,
)
def test_settings_of_an_adapter_are_checked_when_it_is_opened(key, value, adapter):
    """Also where the adapter stays an adapter, and nobody computes with them."""
    with pytest.raises(AdapterError, match=rf"adapter_config\.json: {key}") as caught:
        opened(adapter, **{key: value})
    assert caught.value.hint


def test_null_settings_of_an_adapter_are_not_given(adapter):
    keys = ["rank_pattern", "alpha_pattern", "modules_to_save", "auto_mapping", "task_type", "revision", "r"]
    assert opened(adapter, **dict.fromkeys(keys)).settings("q").rank == 8


@pytest.mark.parametrize(
    "pattern", ["[", "*", "(" * 900 + ")" * 900, "a{9999999999999}", r"\L<x>", "q" * 2000]
)
@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_patterns_that_cannot_be_tried_are_refused_with_the_adapter(key, pattern, adapter):
    with pytest.raises(AdapterError, match=rf"{key}: the pattern '"):
        opened(adapter, **{key: {pattern: 2}})


@pytest.mark.parametrize("pattern", ["(a|aa)+b", "((a{1,1000}){1,1000}){1,1000}x"])
def test_patterns_that_backtrack_for_ever_are_given_up(pattern, monkeypatch):
    monkeypatch.setattr(import_module("transfusion.transport.adapters.settings"), "SECONDS", 0.05)
    with pytest.raises(AdapterError, match="with model.* takes too long") as caught:
        ModulePatterns((pattern,)).first("model.layers." + "a" * 60 + "!b!x!")
    assert repr(pattern) in caught.value.message


def test_all_names_together_have_the_time_and_not_each_of_them(monkeypatch):
    monkeypatch.setattr(
        import_module("transfusion.transport.adapters.settings"),
        "process_time",
        iter(range(100)).__next__,
    )
    tried = ModulePatterns(("(a|aa)+b",))
    assert [tried.first(name) for name in ("x", "y", "ab")] == [None, None, "(a|aa)+b"]
    assert tried._left < 0
    with pytest.raises(AdapterError, match="takes too long"):  # what is left is a moment
        tried.first("model.layers." + "a" * 60 + "!b!")


@pytest.mark.parametrize(
    ("pattern", "met"),
    [
        ("q_proj", True),
        ("self_attn.q_proj", True),
        ("proj", False),
        (r"layers\.\d+\.self_attn\.q_proj", True),
        ("^model.layers.1.self_attn.q_proj", True),
        ("^layers.1.self_attn.q_proj", False),
        (".*q_proj", True),
        ("(q|k)_proj", True),
        ("layers.[0-3].self_attn.(q_proj|v_proj)", True),
        ("layers.[2-3].self_attn.q_proj", False),
    ],
)
def test_patterns_mean_what_they_mean_to_peft(pattern, met):
    from peft.utils.other import get_pattern_key

    name = "model.layers.1.self_attn.q_proj"
    assert (ModulePatterns((pattern,)).first(name) == pattern) is met
    assert (get_pattern_key([pattern], name) == pattern) is met
    settings = ModuleSettings({"r": 4, "rank_pattern": {pattern: 16}}, name)
    assert settings.rank == (16 if met else 4)


def test_half_a_character_in_json_is_refused():
    with pytest.raises(CheckpointError, match="m: not readable as JSON"):
        parse_json('{"a": "\\ud800"}', "m")
    assert parse_json('{"a": "\\ud83d\\ude00"}', "m") == {"a": "😀"}


# ── π ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def pi(shuffled, tmp_path_factory) -> Path:
    from transfusion.matching.align import align

    a, b = shuffled("vit")
    return align(a, b, method="guarded").save(tmp_path_factory.mktemp("pi") / "pi")


def retold(pi: Path, place: Path, change) -> Path:
    """The same maps with other metadata."""
    from safetensors import safe_open

    with safe_open(pi, framework="pt") as opened:
        tensors = {id: opened.get_tensor(id) for id in opened.keys()}  # noqa: SIM118
        provenance = json.loads(opened.metadata()["transfusion"])
    info = change(provenance, tensors)
    text = info if isinstance(info, str) else json.dumps(provenance)
    save_file(tensors, place, {"transfusion": text})
    return place


def put(*path: object):
    *steps, key, value = path

    def change(provenance, tensors) -> None:
        for step in steps:
            provenance = provenance[step]
        provenance[key] = value

    return change


def drop(*path: object):
    *steps, key = path

    def change(provenance, tensors) -> None:
        for step in steps:
            provenance = provenance[step]
        del provenance[key]

    return change


def circle(provenance, tensors) -> None:
    provenance["parents"] |= {"layer.0.head": "layer.0.qk", "layer.0.qk": "layer.0.head"}


def swapped(id: str, make):
    def change(provenance, tensors) -> None:
        tensors[id] = make(tensors[id])

    return change


ODD_METADATA = {
    "circle": circle,
    "own parent": put("parents", "layer.0.head", "layer.0.head"),
    "unknown parent": put("parents", "layer.0.head", "nobody"),
    "parents a list": put("parents", []),
    "size 0": put("sizes", "layer.0.head", 0),
    "size negative": put("sizes", "layer.0.head", -4),
    "size huge": put("sizes", "layer.0.head", 10**12),
    "size text": put("sizes", "layer.0.head", "4"),
    "size of another": put("sizes", "layer.0.head", 5),
    "parent huge": put("sizes", "layer.0.head", 2**24),
    "no sizes": drop("sizes"),
    "kind unknown": put("maps", "layer.0.head", "kind", "swap"),
    "kind another": put("maps", "layer.0.head", "kind", "rotation"),
    "maps a list": put("maps", ["layer.0.head"]),
    "a map too few": drop("maps", "layer.0.head"),
    "advice": put("provenance", "advice", {"a": [1]}),
    "advice a list": put("provenance", "advice", [1]),
    "verdict a number": put("provenance", "advice", {"verdict": 1, "text": "x"}),
    "margins": put("provenance", "advice", {"verdict": "x", "text": "x", "margins": {"head": 5}}),
    "axes": put("provenance", "advice", {"verdict": "x", "text": "x", "axes": [1]}),
    "objective text": put("provenance", "objective", ["x"]),
    "objective NaN": put("provenance", "objective", [NAN]),
    "policy": put("provenance", "policy", "tied"),
    "policy unknown": put("provenance", "policy", "residual", "loose"),
    "seed": put("provenance", "seed", "0"),
    "source": put("provenance", "source", 5),
    "digest": put("provenance", "source_fingerprint", None),
    "options": put("provenance", "options", []),
    "an unknown key": put("provenance", "surprise", 1),
    "no provenance": drop("provenance"),
    "folds": put("folds", {"x": {"norm": 5, "offset": 0.0}}),
    "fold offset": put("folds", {"x": {"norm": "n", "offset": NAN}}),
    "format text": put("format", "1"),
    "no format": drop("format"),
    "not JSON": lambda provenance, tensors: "{",
    "nested": lambda provenance, tensors: "[" * 100_000 + "]" * 100_000,
    "a list": lambda provenance, tensors: "[]",
    "digits": lambda provenance, tensors: '{"format": ' + "1" * 5000 + "}",
    "floats": swapped("layer.0.head", torch.Tensor.double),
    "bfloat16": swapped("layer.0.head", torch.Tensor.bfloat16),
    "a dimension more": swapped("layer.0.head", lambda index: index[None]),
    "out of range": swapped("layer.0.head", lambda index: index + 10**6),
    "occurs twice": swapped("layer.0.head", torch.zeros_like),
    "fewer": swapped("layer.0.head", lambda index: index[:, 1:].contiguous()),
}


@pytest.mark.parametrize("name", ODD_METADATA)
def test_a_file_of_pi_is_checked_before_it_is_used(name, pi, tmp_path):
    with pytest.raises(AlignmentError) as caught:
        Alignment.load(retold(pi, tmp_path / "odd", ODD_METADATA[name]))
    assert str(tmp_path / "odd") in caught.value.message
    assert caught.value.hint


def test_a_rotation_with_what_is_no_number_is_refused(pi, tmp_path):
    def rotated(provenance, tensors) -> None:
        rows, size = tensors["layer.0.head"].shape
        tensors["layer.0.head"] = torch.full((rows, size, size), NAN)
        provenance["maps"]["layer.0.head"]["kind"] = "rotation"

    with pytest.raises(AlignmentError, match="the file is damaged"):
        Alignment.load(retold(pi, tmp_path / "odd", rotated))


def test_a_pi_whose_sizes_are_not_the_models_is_refused_whatever_digest_it_claims(
    pi, made, shuffled, tmp_path
):
    model = Model.open(shuffled("vit")[0])
    alignment = Alignment.load(pi)
    architecture = model.architecture.under(alignment.provenance.policy)
    alignment.require_for(architecture)
    still = next(id for id in architecture.backbone_spaces if id not in alignment.maps)
    lying = Alignment.load(retold(pi, tmp_path / "odd", put("sizes", still, 77)))
    with pytest.raises(AlignmentError, match=rf"other sizes of the architecture: {still} \(77 in π"):
        lying.require_for(architecture)


def test_a_pipe_is_no_file_of_pi(tmp_path):
    import os

    from transfusion.alignment.pi_file import is_alignment

    os.mkfifo(tmp_path / "pipe")
    assert not is_alignment(tmp_path / "pipe")
    for name in ("pipe", "nul\0", "a" * 5000):
        with pytest.raises(AlignmentError, match="no such file of π"):
            Alignment.load(tmp_path / name)


# ── α ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text",
    ["[]", "5", '"x"', "{", '{"a": "x"}', '{"a": NaN}', '{"a": Infinity}', '{"a": -1}', '{"a": true}', '{"a": [1]}',
     '{"default": null}', '{"default": {}}', '{"a": 1' + "0" * 400 + "}", '{"a": ' + "1" * 5000 + "}", "[" * 100_000,
     '{"a": 1, "a": 2}', json.dumps({"a" * 2000: 1}), json.dumps({str(number): 1 for number in range(10_001)})],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_a_file_of_alpha_that_makes_no_sense_is_refused(text, tmp_path):
    (tmp_path / "alpha.json").write_text(text)
    with pytest.raises(SettingError) as caught:
        Alpha.of(str(tmp_path / "alpha.json"))
    assert caught.value.hint


def test_alpha_is_read_from_regular_files_only(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")
    for name in ("/dev/zero", tmp_path / "pipe", tmp_path):
        with pytest.raises(SettingError, match="not a regular file"):
            Alpha.of(name)
    (tmp_path / "latin").write_bytes(b'{"\xe9": 1}')
    with pytest.raises(SettingError, match="not readable as text"):
        Alpha.of(tmp_path / "latin")


@pytest.mark.parametrize(
    "text", ["nul\0", "a" * 5000, "", "1,5", "1e", "\ud800"], ids=lambda text: repr(text)[:10]
)
def test_what_is_neither_a_number_nor_a_file_is_refused_as_alpha(text):
    with pytest.raises(SettingError, match="neither a number nor a file that exists"):
        Alpha.of(text)


@pytest.mark.parametrize("number", [NAN, INF, -1.0, True, 10**400, "nan", "inf", "-1", "9" * 400])
def test_numbers_that_alpha_cannot_be_are_refused(number):
    with pytest.raises(SettingError):
        Alpha.of(number)


# ── transfusion.json ─────────────────────────────────────────────────────────────────────────


def of_transport() -> dict:
    one = {"name": "a", "path": "/a", "fingerprint": "0" * 64, "licence": None}
    found = {"blake3": "0" * 64, "method": "guarded", "residual": "untied", "inner": "free", "heads": "matched",
             "options": {"dtype": "float32"}, "seed": 0, "advice": {}}  # fmt: skip
    return {
        "transfusion": "0.1.0", "format": 3, "verb": "transport", "kind": "model", "command": None, "finetuned": [dict(one)],
        "base": dict(one), "onto": dict(one), "alignment": found, "alpha": 1.0, "settings": {}, "repeatable": True,
        "dtype": None,
    }  # fmt: skip


def of_merge() -> dict:
    return {**of_transport(), "verb": "merge", "how": "sum", "weights": [], "density": None, "seed": None}


def keys_in(value: object, *before: object) -> list[tuple]:
    """Every key in metadata."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [
        path
        for key, one in inner
        for path in ([(*before, key)] if isinstance(key, str) else []) + keys_in(one, *before, key)
    ]


FREE = {"transfusion", "licence"}
"""What nothing goes by."""
DISPENSABLE = {"repeatable"}


@pytest.mark.parametrize("make", [of_transport, of_merge])
def test_metadata_is_checked_whole_before_a_rerun(make, tmp_path):
    """Every key, missing or of another kind, is named."""
    from transfusion.transport.record import read_metadata

    file = tmp_path / "transfusion.json"
    file.write_text(json.dumps(make()))
    assert read_metadata(file)
    for path in (path for path in keys_in(make()) if path[-1] not in FREE):
        changes = [put(*path, [[1]]), put(*path, 1e400)] + [drop(*path)] * (path[-1] not in DISPENSABLE)
        for change in changes:
            provenance = make()
            change(provenance, None)
            file.write_text(json.dumps(provenance))
            with pytest.raises(CheckpointError) as caught:
                pytest.fail(f"{path} was let in: {read_metadata(file)}")
            assert str(file) in caught.value.message


@pytest.mark.parametrize(
    ("options", "match"),
    [({"score": "no"}, "score = 'no' is not a choice"), ({"starts": ["no"]}, "starts"), ({"functional": {"a": 1}}, "alignment.options")],
)  # fmt: skip
def test_options_of_another_release_are_refused_by_name(options, match, made, tmp_path):
    from transfusion.transport.transport import transport

    place = made("vit", 1)
    one = {"name": str(place), "path": str(place), "fingerprint": Model.open(place).fingerprint}
    provenance = {**of_transport(), "base": one, "onto": one, "finetuned": [one]}
    provenance["alignment"]["options"] |= options
    (tmp_path / "transfusion.json").write_text(json.dumps(provenance))
    with pytest.raises(CheckpointError, match=match):
        transport(repeat=tmp_path)


# ── numbers on the command line ──────────────────────────────────────────────────────────────


def numeric_flags() -> list:
    """Every flag of every verb that takes a number: the verb, what else it needs, the flag, its type."""
    from inspect import signature
    from typing import get_args, get_type_hints

    from transfusion.cli.app import app

    found = []
    for verb in (one.callback for one in app.registered_commands):
        types, info = get_type_hints(verb), get_type_hints(verb, include_extras=True)
        needed: list[str] = []
        flags = []
        for name, parameter in signature(verb).parameters.items():
            if len(about := get_args(info[name])) < 2 or not hasattr(about[-1], "param_decls"):
                continue  # the context
            about = about[-1]
            flag = next(iter(about.param_decls or ()), f"--{name.replace('_', '-')}")
            if parameter.default is parameter.empty:
                option = type(about).__name__ == "OptionInfo"
                needed += [flag, "/nowhere/x.json"] if option else ["/nowhere/at/all"]
            if (
                kind := next((one for one in (int, float) if types[name] in (one, one | None)), None)
            ) is not None:
                flags.append((flag, kind))
        found += [pytest.param(verb.__name__, needed, *one, id=f"{verb.__name__} {one[0]}") for one in flags]
    return found


@pytest.mark.parametrize(("verb", "needed", "flag", "kind"), numeric_flags())
def test_numbers_that_are_none_are_wrong_usage(verb, needed, flag, kind, cli):
    """Exit 2, before anything is read."""
    for value in ("-1", str(10**30), "x") if kind is int else ("nan", "inf", "-inf", "x"):
        code, out, err = cli(verb, *needed, f"{flag}={value}")
        assert (code, out) == (2, ""), (value, err)
        assert flag.strip("-") in err


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "x"])
def test_a_tolerance_that_is_none_is_wrong_usage(value, cli):
    code, out, err = cli("verify", "/nowhere", "--via", "/nowhere", f"--tolerance={value}")
    assert (code, out) == (2, "")
    assert "--tolerance" in err


@pytest.mark.parametrize("value", [-1.0, NAN, INF])
def test_a_tolerance_in_python_is_checked_too(value):
    from transfusion.verification.verify import verify

    with pytest.raises(SettingError, match="tolerance = "):
        verify("/nowhere", via="/nowhere", tolerance=value)


# ── results for a report ─────────────────────────────────────────────────────────────────────


def results() -> dict[str, dict]:
    """A result of every verb, as small as can be."""
    data = {"data": "digits", "examples": 4, "question": "class", "metric": "accuracy"}
    value, gain = {"value": 0.5}, {"task": 1.0}
    point = {"alpha": 1.0, "task": value, "gain": gain}
    learned = {"label": "x", "plain": value, "learned": value, "gain": {"plain": 1.0, "learned": 1.0},
               "coefficients": {"default": 1.0}, "losses": [1.0]}  # fmt: skip
    way = {
        "label": "x",
        "points": [{"alpha": 0.0, "loss": 1.0, "accuracy": 0.5}],
        "height": 0.0,
        "faithful": True,
    }
    machine = {"processor": "x", "cores": 1, "threads": 1, "system": "x", "python": "3", "torch": "2"}
    info = {
        "evaluate": {"task": data, "models": [{"model": "b", "task": value, "gain": gain}]},
        "sweep": {"task": data, "at_zero": {"task": value}, "curves": [{"label": "x", "best": 1.0, "points": [point]}]},
        "fewshot": {"task": data, "shots": 1, "zero": value, "curves": [learned]},
        "barrier": {"question": "class", "examples": 4, "data": "digits", "curves": [way]},
        "verify": {"equal": True, "difference": 0.0, "outputs": ["logits"]},
        "verify-2": {"verb": "verify", "holds": True, "found": 0.5, "identity": 0.1, "null": 0.1,
                     "axes": {"layer.0.x": {"found": 0.5, "identity": 0.1, "null": 0.1}}},
        "verify-3": {"verb": "verify", "passed": True, "checks": [{"passed": True}]},
    }  # fmt: skip
    run = {"seconds": 1.0, "memory": 1, "machine": machine}
    return {
        name: {"verb": name, **json.loads(json.dumps(one)), "run": json.loads(json.dumps(run))}
        for name, one in info.items()
    }


@pytest.mark.parametrize("name", results())
def test_a_result_is_checked_whole_before_a_page_is_made_of_it(name, tmp_path):
    """Every key, missing or of another kind: the file and the key are named."""
    from transfusion.report.page import report

    file = tmp_path / "result.json"
    file.write_text(json.dumps(results()[name]))
    assert report(file).sections
    dispensable = {"run", "gain", "plain", "learned", "default", "layer.0.x", "verb"}
    for path in keys_in(results()[name]):
        if path[-2:] == ("gain", "task") and name == "evaluate":
            continue  # B itself gains nothing
        changes = [put(*path, [[1]])] + [drop(*path)] * (path[-1] not in dispensable)
        changes += [put(*path, INF)] * (path[-1] != "difference")  # two outputs may be that far apart
        for change in changes:
            info = results()[name]
            change(info, None)
            file.write_text(json.dumps(info))
            with pytest.raises(DataError) as caught:
                pytest.fail(f"{path} was let in: {report(file)}")
            assert str(file) in caught.value.message


@pytest.mark.parametrize("name", results())
def test_a_result_with_an_empty_list_is_refused_or_shown_without_a_warning(name, tmp_path):
    from transfusion.report.page import report

    refused = []
    for path in keys_in(whole := results()[name]):
        found = whole
        for step in path:
            found = found[step]
        if isinstance(found, list):
            put(*path, [])(info := results()[name], None)
            (file := tmp_path / "result.json").write_text(json.dumps(info))
            try:
                str(report(file))
            except DataError:
                refused.append(path[-1])
    assert name != "evaluate" or refused == ["models"]


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"verb": [1]}', '{"verb": {"a": 1}}', "5", '{"verb": "sweep"}', "{", "\0"]
)
def test_files_that_are_no_results_are_refused(text, tmp_path):
    from transfusion.report.page import report

    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(DataError, match=r"odd\.json: "):
        report(tmp_path / "odd.json")


# ── data to measure models on ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.csv", b"text,label,text\na,0,b\n", "several columns are called text"),
        ("a.tsv", b"text\tlabel\tlabel\na\t0\t1\n", "several columns are called label"),
        ("a.csv", b"text,label\na\0b,0\n", "NUL bytes"),
        ("a.csv", b"text,label\n\xff\xfe,0\n", "cannot be read as text"),
        ("a.csv", b"", "the file is empty"),
        ("a.csv", b"text,label\na," + b"9" * 5000 + b"\n", None),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("a.jsonl", b'{"text": "a", "label": ' + b"1" * 5000 + b"}", "line 1 is not JSON"),
        ("a.jsonl", b'{"text": "a", "label": ' + b"1" * 50 + b"}", "that is too large for a class"),
        ("a.jsonl", b'{"text": "a", "text": "b"}', "occurs twice"),
        ("a.jsonl", b"[1]\n", "line 1 is no object"),
        ("a.jsonl", b'{"text": [1], "label": 0}\n', "not a text"),
        ("a.jsonl", b'{"text": "a", "label": {"a": 1}}\n', "which is not a class"),
        ("a.txt", b"a\0b", "NUL bytes"),
        ("a.parquet", b"PAR1 and nothing more PAR1", "cannot be read as parquet"),
        ("a.parquet", b"", "cannot be read as parquet"),
    ],
)
def test_tables_that_make_no_sense_are_refused(name, content, match, tmp_path):
    from transfusion.data.read_examples import read_examples

    (tmp_path / name).write_bytes(content)
    if match is None:  # a class with a strange name
        assert read_examples(tmp_path / name).labels == ["9" * 5000]
        return
    with pytest.raises(DataError, match=match) as caught:
        read_examples(tmp_path / name)
    assert name in caught.value.message


def test_a_parquet_with_a_column_twice_is_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from transfusion.data.read_examples import read_examples

    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="several columns are called text"):
        read_examples(tmp_path / "a.parquet")


def test_examples_are_read_from_regular_files_only(tmp_path):
    import os

    from transfusion.data.dataset import Dataset
    from transfusion.data.examples import ImageFile
    from transfusion.data.read_examples import read_examples
    from transfusion.evaluation.classes import Classes

    for name in ("a.csv", "a.npz", "a.json", "a.png"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="not a regular file"):
        read_examples(tmp_path / "a.csv")
    with pytest.raises(DataError, match="no such file"):
        Dataset.load(tmp_path / "a.npz")
    with pytest.raises(DataError, match="not a regular file"):
        Classes.of(tmp_path / "a.json")
    with pytest.raises(DataError, match="not a regular file"):
        ImageFile.at(tmp_path / "a.png").opened()
    with pytest.raises(DataError, match="no file of classes"):
        Classes.of("nul\0")


@pytest.mark.parametrize(
    "content",
    [b"", b"PK", b"PK\x03\x04" + b"\0" * 40, b"\x93NUMPY\x01\x00"],
)
def test_archives_that_are_damaged_are_refused(content, tmp_path):
    from transfusion.data.dataset import Dataset

    for name in ("a.npz", "a.safetensors"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match="cannot be read as examples"):
            Dataset.load(tmp_path / name)


def test_an_archive_that_would_fill_the_memory_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr("transfusion.data.dataset.SPARE", 0)
    import zipfile

    from transfusion.data.dataset import Dataset

    with (
        zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("x.npy", "w") as file,
    ):
        file.write(bytes(2**20))
    with pytest.raises(DataError, match="it would unpack to"):
        Dataset.load(tmp_path / "a.npz")


def bmp(width: int, height: int) -> bytes:
    """The head of an image of any size."""
    import struct

    return struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 54, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    "content",
    [b"", b"no image", b"\x89PNG\r\n\x1a\n" + b"\0" * 20, b"GIF89a", bmp(10_000, 14_000), bmp(60_000, 60_000), bmp(8, 8),
     b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"],
    ids=lambda content: repr(content[:12]),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_images_that_are_damaged_or_far_too_large_are_refused(content, tmp_path):
    from transfusion.data.examples import ImageFile

    (tmp_path / "a.png").write_bytes(content)
    for picture in (ImageFile.at(tmp_path / "a.png"), ImageFile("a.png", content)):
        with pytest.raises(DataError, match=r"a\.png: cannot be read as an image"):
            picture.opened()


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "5",
        '{"classes": 5}',
        '{"classes": [1, 2]}',
        '{"classes": ["a"], "classes": ["b"]}',
        "\0",
    ],
)
def test_files_of_classes_that_make_no_sense_are_refused(text, tmp_path):
    from transfusion.evaluation.classes import Classes

    (tmp_path / "classes.json").write_text(text)
    with pytest.raises(DataError, match=r"classes\.json: "):
        Classes.of(tmp_path / "classes.json")


@pytest.mark.parametrize(
    "info",
    [{"size": "x"}, {"size": -1}, {"size": 10**9}, {"size": {"height": "x"}}, {"image_mean": ["x"]}, {"image_std": NAN},
     {"do_resize": "no"}, {"rescale_factor": INF}, {"image_processor": [1]}, {"image_processor": {"crop_size": 0}}],
    ids=str,
)  # fmt: skip
def test_how_images_are_prepared_is_checked_where_it_is_read(info, made, tmp_path):
    from transfusion.running.probes.probed_model import ProbedModel

    folder = configured(made("vit-classifier"), tmp_path / "vit")
    (folder / "preprocessor_config.json").write_text(json.dumps(info))
    subject = ProbedModel(Model.open(folder), torch.nn.Identity())
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json: "):
        subject.info("preprocessor_config.json")
    assert subject.info("no_such.json") == {}


# ── names, and the README of a model ─────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name", ["a" * 300 + ".csv", "~nobody-of-this-name/x.csv", "nul\0.csv"], ids=["long", "home", "NUL"]
)
@pytest.mark.parametrize(
    "verb",
    [
        ("inspect", "{}"),
        ("align", "{}", "b", "-o", "out"),
        ("evaluate", "a", "--data", "{}"),
        ("report", "{}"),
        ("transport", "--from", "{}", "-o", "out"),
        ("inspect", "a", "--config", "{}"),
        ("verify", "a", "--via", "{}"),
    ],
    ids=" ".join,
)
def test_names_that_no_file_can_have_are_known_errors(verb, name, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = cli(*(word.format(name) for word in verb))
    assert code in (1, 2)
    assert out == ""
    assert "unexpected" not in err


def test_a_licence_is_read_from_a_small_regular_file_only(tmp_path):
    import os

    from transfusion.transport.model_card import licence_of

    (tmp_path / "README.md").write_text("---\nlicense: [mit, apache-2.0]\n---\n")
    assert licence_of(tmp_path) == "mit, apache-2.0"
    billion = "a: &a [x, x, x, x, x, x, x, x, x]\n"
    for one, next_ in zip("abcdefgh", "bcdefghi", strict=True):
        billion += f"{next_}: &{next_} [{', '.join([f'*{one}'] * 9)}]\n"
    (tmp_path / "README.md").write_text(f"---\n{billion}license: *i\n---\n")
    assert licence_of(tmp_path) is None
    (tmp_path / "README.md").unlink()
    os.mkfifo(tmp_path / "README.md")
    assert licence_of(tmp_path) is None
