"""The names of tensors in LoRA files for image and video models.

A name is a prefix (the program that wrote the file, and the model that the tensor belongs to), the name of a
module, and an ending (the part of the adapter). Some programs join the name of a module with underscores.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from transfusion.errors import AdapterError, listing

DENOISER = "transformer"
"""The component that the table of a diffusion model describes."""

_OTHER = "TransFusion does not know this kind of change"
_PROCESSOR = "XLabs' names of attention processors are not known; convert the file to diffusers' format"
_TUCKER = "a Tucker decomposition, with a core tensor that TransFusion does not know"
_BLOCKS = "it acts on blocks of neighbouring units, and π separates neighbours"
_GLORA = "a sum and a product at once, which TransFusion does not know"


@dataclass(frozen=True)
class LoraPrefix:
    """How the names of a program begin."""

    pattern: str
    """A regular expression; its group, if any, is the number or the name of a text encoder."""
    format: str
    component: str = DENOISER
    underscored: bool = False
    """Whether the names of modules are joined with underscores."""


_PREFIXES = (
    LoraPrefix(r"lora_(?:unet|transformer)_", "kohya", underscored=True),
    LoraPrefix(r"lora_te(\d?)_", "kohya", "text_encoder", underscored=True),
    LoraPrefix(r"lycoris_", "LyCORIS", underscored=True),
    LoraPrefix(r"(?:model\.)?diffusion_model\.", "ComfyUI"),
    LoraPrefix(r"text_encoders\.(\w+)\.", "ComfyUI", "text_encoder"),
    LoraPrefix(r"(?:transformer|unet)\.", "diffusers"),
    LoraPrefix(r"transformer_2\.", "diffusers", "transformer_2"),
    LoraPrefix(r"text_encoder(?:_(\d))?\.", "diffusers", "text_encoder"),
    LoraPrefix(r"base_model\.model\.", "PEFT"),
    LoraPrefix(r"", "without a prefix"),
)


@dataclass(frozen=True)
class LoraEnding:
    """How the names of one part of an adapter end."""

    pattern: str
    part: str
    """The name of the part, as in `transport.adapters.kinds`."""
    kind: str = "LoRA"
    refused: str = ""
    """Why a tensor of this kind cannot be moved; empty if it can."""


_NAMED = r"(?:\.default(?:_\d+)?)?"
"""PEFT's name of the adapter."""
_LOKR = ("w1", "w2", "w1_a", "w1_b", "w2_a", "w2_b")
_ENDINGS = (
    LoraEnding(rf"\.lora_(?:A{_NAMED}|down)(?:\.weight)?", "lora_A"),
    LoraEnding(rf"\.lora_(?:B{_NAMED}|up)(?:\.weight)?", "lora_B"),
    LoraEnding(rf"\.lora_(?:B{_NAMED}|up)\.bias", "lora_B.bias"),
    LoraEnding(r"(?:\.|_)lora\.down\.weight|\.lora_linear_layer\.down\.weight", "lora_A"),
    LoraEnding(r"(?:\.|_)lora\.up\.weight|\.lora_linear_layer\.up\.weight", "lora_B"),
    LoraEnding(
        rf"\.lora_magnitude_vector{_NAMED}(?:\.weight)?|\.dora_scale", "lora_magnitude_vector", "DoRA"
    ),
    LoraEnding(r"\.alpha", "alpha", ""),
    LoraEnding(r"\.(?:diff|w_norm)", "diff", "differences"),
    LoraEnding(r"\.(?:diff_b|b_norm)", "diff_b", "differences"),
    *(LoraEnding(rf"\.hada_{part}", f"hada_{part}", "LoHa") for part in ("w1_a", "w1_b", "w2_a", "w2_b")),
    *(LoraEnding(rf"\.lokr_{part}", f"lokr_{part}", "LoKr") for part in _LOKR),
    LoraEnding(r"\.lokr_\w+", "lokr", "LoKr", _TUCKER),
    LoraEnding(r"\.lora_mid(?:\.weight)?", "lora_mid", "LoCon", _TUCKER),
    LoraEnding(r"\.hada_t[12]", "hada_t", "LoHa", _TUCKER),
    LoraEnding(r"\.(?:oft_blocks|oft_diag|oft_R\.weight|boft_\w+|rescale)", "oft", "OFT", _BLOCKS),
    LoraEnding(r"\.[ab][12]\.weight", "glora", "GLoRA", _GLORA),
    LoraEnding(r"\.\w+_lora\d?\.(?:down|up)\.weight", "processor", "LoRA on processors", _PROCESSOR),
    LoraEnding(r"\.on_input", "on_input", "IA3", "TransFusion does not know this form of IA3"),
    LoraEnding(r"\.(?:diff_m|set_weight|reshape_weight|scalar)", "other", "other", _OTHER),
)
_SIGNATURE = re.compile(
    r".*(?:[._]lora_(?:A|B|down|up)(?:\.|$)|[._]lora\d?\.(?:down|up)\.|\.lora_linear_layer\.|\.hada_w|\.lokr_w"
    r"|\.oft_blocks|\.dora_scale|\.(?:diff|diff_b|w_norm|b_norm)$)"
)


@dataclass(frozen=True)
class LoraKey:
    """The name of one tensor, taken apart."""

    key: str
    prefix: str
    format: str
    component: str
    """The model that the tensor belongs to: the denoiser, or a text encoder."""
    underscored: bool
    module: str
    """As written, without the prefix."""
    ending: LoraEnding

    @property
    def part(self) -> str:
        return self.ending.part

    @property
    def owner(self) -> str:
        """The module with its prefix: one name for all parts of a module."""
        return self.prefix + self.module


def is_lora(names: Iterable[str]) -> bool:
    """Whether these are the names of tensors in a LoRA file, of any format; a model may hold a LoRA, too."""
    names = list(names)
    if not any(_SIGNATURE.match(name) for name in names):
        return False
    return 2 * sum(read_key(name) is not None for name in names) >= len(names)


def read_keys(label: str, names: Iterable[str]) -> dict[str, LoraKey]:
    """Take all names of a file apart; refuse names that no format has."""
    found = {name: read_key(name) for name in names}
    if unknown := [name for name, one in found.items() if one is None]:
        raise AdapterError(
            f"{label}: {len(unknown)} tensor(s) that no format of a LoRA has: {listing(unknown)}",
            hint="the file holds more than a LoRA; save the LoRA alone",
        )
    return {name: one for name, one in found.items() if one is not None}


def require_movable(label: str, keys: Mapping[str, LoraKey]) -> None:
    """Refuse parts that cannot be moved, with the reason."""
    for one in keys.values():
        if reason := one.ending.refused:
            count = sum(other.ending.kind == one.ending.kind for other in keys.values())
            raise AdapterError(
                f"{label}: {count} tensor(s) of kind {one.ending.kind}, such as {one.key:.120}, cannot be"
                f" moved: {reason}",
                hint="merge the LoRA into its base, and move the merged model",
            )


@lru_cache(maxsize=2**14)
def read_key(name: str) -> LoraKey | None:
    """Take one name apart; None if its ending is not known."""
    for ending in _ENDINGS:
        if found := re.search(rf"(?:{ending.pattern})$", name):
            return _with_prefix(name, name[: found.start()], ending)
    return None


def _with_prefix(name: str, stem: str, ending: LoraEnding) -> LoraKey:
    prefix, found = next((one, begin) for one in _PREFIXES if (begin := re.match(one.pattern, stem)))
    number = next(iter(found.groups()), None)
    component = f"{prefix.component}_{number}" if number else prefix.component
    module = re.sub(r"\.processor\.(?=to_\w+$)", ".", stem[found.end() :])  # an attention of older diffusers
    return LoraKey(name, found[0], prefix.format, component, prefix.underscored, module, ending)


def format_of(keys: Mapping[str, LoraKey]) -> str:
    """Return the format of most names: the program that introduced it."""
    return Counter(one.format for one in keys.values()).most_common(1)[0][0]
