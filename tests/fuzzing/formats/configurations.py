"""Configurations of models: every known key with values that make no sense, sections, and code in texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from fuzzing.cases import Build, Command, Made, Place
from fuzzing.mutating import DEEP, DEEP_OBJECT, LONG, Raw, changed_text, code, dumps, with_value
from fuzzing.seeds import BERT, LLAMA, OPEN_CLIP, VIT

COUNT = 150
CONFIGS = {
    "a": "config.json",
    "llama": "config.json",
    "open_clip": "open_clip_config.json",
    "reader": "config.json",
}
SETTINGS = {"a": VIT, "llama": LLAMA, "open_clip": OPEN_CLIP, "reader": BERT}

SENSELESS: tuple[Any, ...] = (
    0,
    -1,
    "8",
    3.5,
    10**9,
    True,
    None,
    [],
    {},
    Raw("NaN"),
    LONG,
    "",
    [8],
    2**63,
    Raw("1e400"),
)
SIZES = {
    "a": (
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_size",
        "intermediate_size",
        "image_size",
        "patch_size",
        "num_channels",
    ),
    "llama": (
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "vocab_size",
    ),
    "open_clip": (
        *("model_cfg.vision_cfg.layers", "model_cfg.vision_cfg.width", "model_cfg.vision_cfg.head_width"),
        *(
            "model_cfg.text_cfg.heads",
            "model_cfg.text_cfg.layers",
            "model_cfg.embed_dim",
            "model_cfg.vision_cfg.mlp_ratio",
        ),
    ),
}
DECISIVE = {
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "model_cfg.vision_cfg.layers",
    "model_cfg.vision_cfg.head_width",
    "model_cfg.text_cfg.heads",
    "model_cfg.text_cfg.layers",
}
"""What shapes do not tell, or what the table is made of: a value without sense cannot be passed over."""
OTHERS = (
    "model_type",
    "architectures",
    "hidden_act",
    "layer_norm_eps",
    "torch_dtype",
    "id2label",
    "label2id",
    "qkv_bias",
    "auto_map",
    "quantization_config",
    "_name_or_path",
    "tie_word_embeddings",
    "rope_scaling",
    "pruned_heads",
    "unknown_setting",
    "dtype",
    "transformers_version",
    "is_encoder_decoder",
)


def _with(seed: str, path: str, value: Any, *, refused: bool = False, verb: str = "inspect") -> Build:
    def build(place: Place) -> Sequence[Command]:
        info = SETTINGS[seed]
        keys = tuple(path.split("."))
        config = with_value(info, keys, value) if len(keys) > 1 or keys[0] in info else {**info, path: value}
        return _run(place, seed, dumps(config), verb, refused=refused)

    return build


def _run(place: Place, seed: str, text: str, verb: str, *, refused: bool = False) -> Sequence[Command]:
    folder = place.copy(seed)
    place.write(str(folder / CONFIGS[seed]), text)
    match verb:
        case "align":
            return [place.align(folder, folder if seed != "a" else None, refused=refused)]
        case "transport":
            return [place.transport(base=folder, refused=refused)]
        case "apply":
            return [place.apply(a=folder, refused=refused)]
        case "verify":
            return [place.verify(folder)]
        case "propose":
            return [place.propose(folder)]
        case "evaluate":
            return [place.evaluate(folder, place.world.seed("pictures"))]
    return [place.inspect(folder, refused=refused)]


def _text(text: str | bytes, verb: str = "inspect", seed: str = "a") -> Build:
    def build(place: Place) -> Sequence[Command]:
        folder = place.copy(seed)
        place.write(str(folder / CONFIGS[seed]), text)
        return [
            place.inspect(folder, refused=True),
            *([] if verb == "inspect" else [place.propose(folder)]),
        ]

    return build


def _code(key: str, number: int, verb: str, seed: str = "llama") -> Build:
    def build(place: Place) -> Sequence[Command]:
        text = code(place.canary)[number]
        value: Any = [text] if key == "architectures" else {"AutoModel": text} if key == "auto_map" else text
        return _run(place, seed, dumps({**SETTINGS[seed], key: value}), verb)

    return build


def _given(text: str) -> Build:
    """A configuration that is given by ``--config``."""

    def build(place: Place) -> Sequence[Command]:
        folder = place.copy("a")
        (folder / "config.json").unlink()
        return [place.inspect(folder, "--config", place.write("given.json", text), refused=True)]

    return build


def _absent(seed: str) -> Build:
    """Without a configuration: what cannot be known is asked for."""

    def build(place: Place) -> Sequence[Command]:
        folder = place.copy(seed)
        (folder / CONFIGS[seed]).unlink()
        return [place.inspect(folder, refused=True), place.align(folder, folder, refused=True)]

    return build


def made() -> Iterator[Made]:
    verbs = ("inspect", "align", "transport", "verify")
    number = 0
    for seed, keys in SIZES.items():
        for key in keys:
            for value in SENSELESS:
                number += 1
                verb = verbs[number % 4] if seed == "a" else ("inspect", "align")[number % 2]
                if verb == "verify" and key == "num_hidden_layers":
                    verb = "transport"
                refused = key in DECISIVE and not (
                    value is None and key in ("head_dim", "num_key_value_heads")
                )
                quick = (key, value) in (
                    ("head_dim", 0),
                    ("head_dim", "8"),
                    ("head_dim", 3.5),
                    ("num_hidden_layers", 10**9),
                )
                title = f"{seed}: {key} = {str(getattr(value, 'text', value))[:20]!r}, {verb}"
                yield Made(title, _with(seed, key, value, refused=refused, verb=verb), quick)
    for key in OTHERS:
        for value in (None, 5, "x", [], {"a": [1]}, DEEP):
            number += 1
            verb = ("inspect", "transport", "align")[number % 3]
            yield Made(
                f"a: {key} = {str(getattr(value, 'text', value))[:20]!r}, {verb}",
                _with("a", key, value, verb=verb),
            )
    for section in ("model_cfg", "model_cfg.vision_cfg", "model_cfg.text_cfg", "preprocess_cfg"):
        for value in (None, 5, "x", [], {}, [{}], DEEP_OBJECT):
            yield Made(
                f"open_clip: {section} = {str(value)[:20]}",
                _with("open_clip", section, value),
                section == "model_cfg" and value == [],
            )
    for text in (
        "",
        "{",
        "[]",
        "null",
        "5",
        '"x"',
        "{} {}",
        "\ufeff{}",
        b"\xff\xfe{}",
        '{"a": 1, "a": 2}',
        DEEP.text,
        DEEP_OBJECT.text,
        LONG.text,
        "{}",
    ):
        title = f"the configuration is {text[:20]!r}"
        yield Made(title, _text(text), text in (DEEP.text, LONG.text))
    twice = json.dumps(VIT)[:-1] + ', "num_attention_heads": 4}'
    yield Made("num_attention_heads twice", _text(twice), True)
    yield Made("nested 100,000 deep, proposed", _text(DEEP.text, "propose"))
    for number in range(len(code(_NOWHERE))):
        for key in ("model_type", "architectures"):
            yield Made(f"code {number} in {key}, proposed", _code(key, number, "propose"), number == 0)
    for number in (0, 1, 2, 4):
        for key in ("model_type", "architectures", "auto_map", "_name_or_path", "hidden_act", "torch_dtype"):
            yield Made(f"code {number} in {key}, inspected", _code(key, number, "inspect", "a"))
            yield Made(f"code {number} in {key}, transported", _code(key, number, "transport", "a"))
        for key in ("hidden_act", "rope_scaling", "auto_map", "torch_dtype", "_name_or_path"):
            yield Made(f"code {number} in {key}, proposed", _code(key, number, "propose"))
    for key in ("auto_map", "architectures", "hidden_act", "torch_dtype", "id2label", "_attn_implementation"):
        for number in (0, 1):
            yield Made(f"code {number} in {key}, verified", _code(key, number, "verify", "a"))
            yield Made(f"code {number} in {key}, evaluated", _code(key, number, "evaluate", "a"))
    for text in (DEEP.text, "[]", "5", '{"a": 1, "a": 2}', "{}", '{"model_cfg": 5}'):
        yield Made(f"--config is {text[:20]!r}", _given(text))
    yield Made("open_clip without its configuration", _absent("open_clip"), True)
    for seed in ("a", "llama", "reader"):
        yield Made(f"{seed} without its configuration", _absent(seed))


class _Nowhere:
    def __str__(self) -> str:
        return "nowhere"


_NOWHERE: Any = _Nowhere()


def mutant(place: Place) -> Sequence[Command]:
    seed = place.rng.choice(("a", "a", "llama", "open_clip"))
    text, what = changed_text(json.dumps(SETTINGS[seed]), place.rng, place.canary)
    verbs = (
        "inspect",
        "align",
        *(("transport", "apply", "verify", "evaluate") if seed == "a" else ()),
    )
    verb = place.rng.choice(verbs)
    place.note(f"{seed}, {verb}: {what}")
    return _run(place, seed, text, verb)
