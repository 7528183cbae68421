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

DENOISER = "transformer"  # the component that the table of a diffusion model describes
TUCKER = "a Tucker decomposition, with a core tensor that TransFusion does not know"
_PROCESSOR = "XLabs' names of attention processors are not known; convert the file to diffusers' format"
_BLOCKS = "it acts on blocks of neighbouring units, and π separates neighbours"

_PREFIXES = (
    (r"lora_(?:unet_?|transformer)_", "kohya", DENOISER),  # of VideoX-Fun with two underscores
    (r"lora_te(\d?)_", "kohya", "text_encoder"),
    (r"lycoris_", "LyCORIS", DENOISER),
    (r"(?:model\.)?diffusion_model\.", "ComfyUI", DENOISER),
    (r"text_encoders\.(\w+)\.", "ComfyUI", "text_encoder"),
    (r"(?:transformer|unet)\.(?:base_model\.model\.)?", "diffusers", DENOISER),
    (r"transformer_2\.", "diffusers", "transformer_2"),
    (r"text_encoder(?:_(\d))?\.", "diffusers", "text_encoder"),
    (r"base_model\.model\.", "PEFT", DENOISER),
    (r"", "without a prefix", DENOISER),
)
"""How names begin, the program that writes them, and the model that they belong to. A group is the number or
the name of a text encoder."""
_UNDERSCORED = ("kohya", "LyCORIS")  # programs that join the names of modules with underscores

_NAMED = r"(?:\.default(?:_\d+)?)?"  # PEFT's name of the adapter
_HADA, _LOKR = ("w1_a", "w1_b", "w2_a", "w2_b"), ("w1", "w2", "w1_a", "w1_b", "w2_a", "w2_b")
_ENDINGS = (
    (rf"\.lora_(?:A{_NAMED}|down)(?:\.weight)?", "lora_A", "LoRA", ""),
    (rf"\.lora_(?:B{_NAMED}|up)(?:\.weight)?", "lora_B", "LoRA", ""),
    (rf"\.lora_(?:B{_NAMED}|up)\.bias", "lora_B.bias", "LoRA", ""),
    (r"(?:\.|_)lora\.down\.weight|\.lora_linear_layer\.down\.weight", "lora_A", "LoRA", ""),
    (r"(?:\.|_)lora\.up\.weight|\.lora_linear_layer\.up\.weight", "lora_B", "LoRA", ""),
    (
        rf"\.lora_magnitude_vector{_NAMED}(?:\.weight)?|\.dora_scale",
        *("lora_magnitude_vector", "DoRA", ""),
    ),
    (r"\.alpha", "alpha", "", ""),
    (r"\.(?:diff|w_norm)", "diff", "differences", ""),
    (r"\.(?:diff_b|b_norm)", "diff_b", "differences", ""),
    *((rf"\.hada_{part}", f"hada_{part}", "LoHa", "") for part in _HADA),
    *((rf"\.lokr_{part}", f"lokr_{part}", "LoKr", "") for part in _LOKR),
    (r"\.lokr_\w+", "lokr", "LoKr", TUCKER),
    (r"\.lora_mid(?:\.weight)?", "lora_mid", "LoCon", TUCKER),
    (r"\.hada_t[12]", "hada_t", "LoHa", TUCKER),
    (r"\.(?:oft_blocks|oft_diag|oft_R\.weight|boft_\w+|rescale)", "oft", "OFT", _BLOCKS),
    (r"\.[ab][12]\.weight", "glora", "GLoRA", "a sum and a product at once, which TransFusion does not know"),
    (r"\.\w+_lora\d?\.(?:down|up)\.weight", "processor", "LoRA on processors", _PROCESSOR),
    (r"\.on_input", "on_input", "IA3", "TransFusion does not know this form of IA3"),
    (
        r"\.(?:diff_m|set_weight|reshape_weight|scalar)",
        *("other", "other", "TransFusion does not know this kind of change"),
    ),
)
"""How names end: the part, as in `transport.adapters.kinds`; its kind; and why it cannot be moved, if so."""
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
    component: str  # the model that the tensor belongs to: the denoiser, or a text encoder
    module: str  # as written, without the prefix
    part: str
    kind: str
    refused: str  # why a tensor of this kind cannot be moved; empty if it can

    @property
    def owner(self) -> str:
        """The module with its prefix: one name for all parts of a module."""
        return self.prefix + self.module

    @property
    def underscored(self) -> bool:
        """Whether the names of modules are joined with underscores."""
        return self.format in _UNDERSCORED


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


@lru_cache(maxsize=2**14)
def read_key(name: str) -> LoraKey | None:
    """Take one name apart; None if its ending is not known."""
    endings = ((re.search(rf"(?:{pattern})$", name), about) for pattern, *about in _ENDINGS)
    found, about = next(((match, about) for match, about in endings if match), (None, None))
    if found is None or about is None:
        return None
    stem = name[: found.start()]
    for pattern, format, component in _PREFIXES:
        if begin := re.match(pattern, stem):
            number = next(iter(begin.groups()), None)
            component = f"{component}_{number}" if number else component
            module = re.sub(r"\.processor\.(?=to_\w+$)", ".", stem[begin.end() :])  # older diffusers
            return LoraKey(name, begin[0], format, component, module, *about)
    return None


def format_of(keys: Mapping[str, LoraKey]) -> str:
    """Return the format of most names: the program that introduced it."""
    return Counter(one.format for one in keys.values()).most_common(1)[0][0]
