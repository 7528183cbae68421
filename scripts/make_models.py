"""Make small models to try the verbs on: python scripts/make_models.py models

For a Llama and for a CLIP: a base ``a``; its successor ``b``, slightly changed and with its units shuffled;
``tuned``, a fine-tune of ``a``; for the Llama also ``lora``, an adapter for ``a``. For a Flux, if diffusers
is installed: ``a``, ``b`` and ``lora.safetensors``, a LoRA file for ``a`` in kohya's format. The weights are
random; shapes and symmetries are those of real models. Needs transformers and peft:
``pip install '.[demo]'``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    print("loading libraries …", file=sys.stderr, flush=True)

import torch
from safetensors.torch import save_file

import transfusion
from transfusion.running.probes.texts import corpus
from transfusion.runtime.optional_libraries import install_hint

try:
    import peft
    import tokenizers
    import transformers
except ImportError as error:
    raise SystemExit(f"error: {error}\nhint: {install_hint('demo')}") from error

TOKENS = 512
LLAMA = transformers.LlamaConfig(
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=256,
    vocab_size=TOKENS,
    max_position_embeddings=128,
)
CLIP = transformers.CLIPConfig(
    vision_config={
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "intermediate_size": 192,
        "image_size": 32,
        "patch_size": 8,
    },
    text_config={
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": TOKENS,
        "max_position_embeddings": 32,
        "bos_token_id": 510,
        "eos_token_id": 511,
    },
    projection_dim=48,
)

FLUX: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 24,
    "axes_dims_rope": [4, 6, 6],
}
"""The settings of a Flux: far fewer blocks, heads and units than the real one has."""


def changed(model: Any, amount: float, seed: int) -> Any:
    """Add noise to every parameter, in proportion to its size. Return the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(amount * parameter.std(unbiased=False).clamp(min=1e-2) * noise)
    return model


def tokenizer(first: Sequence[str], last: Sequence[str]) -> Any:
    """Return a byte-level tokenizer of the bundled corpus, with special tokens in the first and last rows."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=TOKENS - len(last),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(first),
        show_progress=False,
    )
    made.train_from_iterator([text for texts in corpus().values() for text in texts], trainer)
    made.add_special_tokens(list(last))
    return made


def make_bases(folder: Path, model: Any) -> Iterator[Path]:
    """Save a base, and a successor that is slightly changed and shuffled."""
    changed(model, 0.1, seed=1).save_pretrained(folder / "a")
    yield folder / "a"
    with tempfile.TemporaryDirectory() as plain:
        changed(type(model).from_pretrained(folder / "a"), 0.2, seed=2).save_pretrained(plain)
        shuffle = transfusion.align(plain, plain, method="random", residual="tied", seed=3)
        yield transfusion.apply(shuffle, plain).save(folder / "b")


def make(folder: Path, model_class: Any, config: Any, reader: Any) -> Iterator[Path]:
    """Save a base, a shuffled successor and a fine-tune, each with its tokenizer."""
    torch.manual_seed(1)
    yield from make_bases(folder, model_class(config))
    changed(model_class.from_pretrained(folder / "a"), 0.1, seed=4).save_pretrained(folder / "tuned")
    yield folder / "tuned"
    for name in ("a", "b", "tuned"):
        reader.save(str(folder / name / "tokenizer.json"))


def make_adapter(base: Path, folder: Path) -> Path:
    """Save a LoRA adapter of rank 4 whose change is not zero."""
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
    tuned.save_pretrained(folder)
    return folder


def make_flux(folder: Path) -> Iterator[Path]:
    """Save a base, a shuffled successor, and a LoRA file of rank 4 for the base."""
    import diffusers

    torch.manual_seed(1)
    yield from make_bases(folder, diffusers.FluxTransformer2DModel(**FLUX))
    width = FLUX["attention_head_dim"] * FLUX["num_attention_heads"]
    modules = {
        f"double_blocks_{block}_img_{name}": shape
        for block in range(FLUX["num_layers"])
        for name, shape in {"attn_qkv": (3 * width, width), "mlp_2": (width, 4 * width)}.items()
    }
    single = range(FLUX["num_single_layers"])
    modules |= {f"single_blocks_{block}_linear1": (7 * width, width) for block in single}
    tensors, generator = {}, torch.Generator().manual_seed(5)
    for name, (rows, columns) in modules.items():
        tensors[f"lora_unet_{name}.lora_down.weight"] = 0.1 * torch.randn(4, columns, generator=generator)
        tensors[f"lora_unet_{name}.lora_up.weight"] = 0.1 * torch.randn(rows, 4, generator=generator)
        tensors[f"lora_unet_{name}.alpha"] = torch.tensor(2.0)
    tags = {"10_cat": {"ohwx cat": 24, "on grass": 9, "looking up": 4}}
    header = {"ss_base_model_version": "flux1", "ss_sd_model_name": "a", "ss_network_dim": "4"}
    place = folder / "lora.safetensors"
    save_file(tensors, place, {**header, "ss_tag_frequency": json.dumps(tags)})
    yield place


def main() -> None:
    parser = argparse.ArgumentParser(description="Make small models to try the verbs on.")
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    transformers.utils.logging.disable_progress_bar()
    if folder.exists():
        parser.error(f"{folder} exists already; give another place, or remove it")
    of_llama, of_clip = tokenizer(["<unk>", "<s>", "</s>"], []), tokenizer([], ["<start>", "<end>"])
    for made in make(folder / "llama", transformers.LlamaForCausalLM, LLAMA, of_llama):
        print(made)
    print(make_adapter(folder / "llama" / "a", folder / "llama" / "lora"))
    for made in make(folder / "clip", transformers.CLIPModel, CLIP, of_clip):
        print(made)
    if find_spec("diffusers") is None:
        print("diffusers is not installed: no Flux was made")
        return
    for made in make_flux(folder / "flux"):
        print(made)


if __name__ == "__main__":
    main()
