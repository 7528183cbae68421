"""Valid files, as small as they can be: what cases spoil. Each is made when a case first asks for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

MARK = np.float32(31415.926)
"""Of which every tensor outside is made: it must not turn up in an output."""
WIDTH, HEADS, FFN, LAYERS, LABELS, IMAGE, PATCH = 8, 2, 6, 2, 3, 4, 2

VIT: dict[str, Any] = {
    "architectures": ["ViTForImageClassification"],
    "model_type": "vit",
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": FFN,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "num_channels": 3,
    "qkv_bias": True,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "layer_norm_eps": 1e-12,
    "initializer_range": 0.02,
    "encoder_stride": 2,
    "id2label": {"0": "bird", "1": "cat", "2": "dog"},
    "label2id": {"bird": 0, "cat": 1, "dog": 2},
    "torch_dtype": "float32",
    "transformers_version": "4.50.0",
}

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 6,
    "vocab_size": 11,
    "max_position_embeddings": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}

BERT: dict[str, Any] = {
    "architectures": ["BertForSequenceClassification"],
    "model_type": "bert",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 6,
    "vocab_size": 12,
    "max_position_embeddings": 16,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "pad_token_id": 0,
    "id2label": {"0": "no", "1": "yes"},
    "label2id": {"no": 0, "yes": 1},
}
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film", "was", "it", ".")

ADAPTER: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": None,
    "base_model_name_or_path": "a",
    "revision": None,
    "r": 2,
    "lora_alpha": 4,
    "lora_dropout": 0.0,
    "target_modules": ["query", "value"],
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "use_rslora": False,
    "use_dora": False,
    "layers_pattern": None,
    "layers_to_transform": None,
    "auto_mapping": None,
    "peft_version": "0.15.0",
}


def vit_shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of the tiny ViT, as files name them."""
    square, wide = (WIDTH, WIDTH), (WIDTH,)
    shapes: dict[str, tuple[int, ...]] = {
        "vit.embeddings.cls_token": (1, 1, WIDTH),
        "vit.embeddings.position_embeddings": (1, 1 + (IMAGE // PATCH) ** 2, WIDTH),
        "vit.embeddings.patch_embeddings.projection.weight": (WIDTH, 3, PATCH, PATCH),
        "vit.embeddings.patch_embeddings.projection.bias": wide,
    }
    for layer in range(LAYERS):
        block = f"vit.encoder.layer.{layer}."
        for norm in ("layernorm_before", "layernorm_after"):
            shapes |= {f"{block}{norm}.weight": wide, f"{block}{norm}.bias": wide}
        for part in ("attention.query", "attention.key", "attention.value", "output.dense"):
            shapes |= {f"{block}attention.{part}.weight": square, f"{block}attention.{part}.bias": wide}
        shapes |= {
            f"{block}intermediate.dense.weight": (FFN, WIDTH),
            f"{block}intermediate.dense.bias": (FFN,),
        }
        shapes |= {f"{block}output.dense.weight": (WIDTH, FFN), f"{block}output.dense.bias": wide}
    shapes |= {"vit.layernorm.weight": wide, "vit.layernorm.bias": wide}
    return shapes | {"classifier.weight": (LABELS, WIDTH), "classifier.bias": (LABELS,)}


def llama_shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of a tiny Llama."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (11, 8)}
    for layer in range(2):
        block = f"model.layers.{layer}."
        shapes |= {
            f"{block}self_attn.{one}_proj.weight": (size, 8) for one, size in (("q", 8), ("k", 4), ("v", 4))
        }
        shapes |= {f"{block}self_attn.o_proj.weight": (8, 8), f"{block}mlp.down_proj.weight": (8, 6)}
        shapes |= {f"{block}mlp.{one}_proj.weight": (6, 8) for one in ("gate", "up")}
        shapes |= {f"{block}{one}_layernorm.weight": (8,) for one in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (8,), "lm_head.weight": (11, 8)}


def bert_shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of a tiny BERT that tells two classes apart."""
    shapes: dict[str, tuple[int, ...]] = {
        "bert.embeddings.word_embeddings.weight": (12, 8),
        "bert.embeddings.position_embeddings.weight": (16, 8),
        "bert.embeddings.token_type_embeddings.weight": (2, 8),
    }
    block = "bert.encoder.layer.0."
    for part in (
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
        "attention.output.dense",
    ):
        shapes |= {f"{block}{part}.weight": (8, 8), f"{block}{part}.bias": (8,)}
    for norm in (
        "bert.embeddings.LayerNorm",
        f"{block}attention.output.LayerNorm",
        f"{block}output.LayerNorm",
    ):
        shapes |= {f"{norm}.weight": (8,), f"{norm}.bias": (8,)}
    shapes |= {f"{block}intermediate.dense.weight": (6, 8), f"{block}intermediate.dense.bias": (6,)}
    shapes |= {f"{block}output.dense.weight": (8, 6), f"{block}output.dense.bias": (8,)}
    shapes |= {"bert.pooler.dense.weight": (8, 8), "bert.pooler.dense.bias": (8,)}
    return shapes | {"classifier.weight": (2, 8), "classifier.bias": (2,)}


def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def as_json(value: object) -> str:
    return json.dumps(value, indent=2)


@dataclass(frozen=True)
class World:
    """The folder of all seeds, and what lies outside of every case."""

    root: Path

    @property
    def outside(self) -> Path:
        return self.root / "outside"

    @property
    def names(self) -> frozenset[str]:
        return frozenset(vit_shapes())

    def seed(self, name: str) -> Path:
        """The path of a seed, which is made if it is not there."""
        maker, file = SEEDS[name]
        path = self.root / "world" / file
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            maker(self, path)
        return path

    def plant(self) -> None:
        """Put secrets outside: a model, texts, a picture, none of which may be opened."""
        from PIL import Image

        self.outside.mkdir(parents=True)
        (self.outside / "secret.txt").write_text("SECRET-31415926\n")
        (self.outside / "secret.json").write_text(as_json({"default": 1.0, "secret": "SECRET-31415926"}))
        marked = {name: np.full(shape, MARK) for name, shape in vit_shapes().items()}
        save_file(marked, self.outside / "model.safetensors", {"format": "pt"})
        (self.outside / "config.json").write_text(as_json(VIT))
        Image.new("RGB", (IMAGE, IMAGE), (9, 8, 7)).save(self.outside / "secret.png")


def run(*arguments: object) -> None:
    """A command line that has to succeed."""
    from contextlib import redirect_stderr, redirect_stdout
    from io import StringIO

    from transfusion.cli import main

    said = StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            main([str(one) for one in arguments])
    except SystemExit as stop:
        if stop.code:
            raise RuntimeError(f"a seed could not be made: {said.getvalue()}") from stop


def _model(
    shapes: Callable[[], dict[str, tuple[int, ...]]], config: dict[str, Any], seed: int
) -> Callable[..., None]:
    def make(world: World, path: Path) -> None:
        path.mkdir()
        save_file(drawn(shapes(), seed), path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(as_json(config))

    return make


def _other(world: World, path: Path) -> None:
    """B: A with its units in another order, and a little different."""
    import transfusion

    order = transfusion.align(world.seed("a"), world.seed("a"), method="random", residual="tied", seed=3)
    transfusion.apply(order, world.seed("a")).save(path)
    for name in ("transfusion.json", "README.md"):
        (path / name).unlink(missing_ok=True)
    _changed(path / "model.safetensors", path / "model.safetensors", 5, 0.01)


def _tuned(world: World, path: Path) -> None:
    shutil.copytree(world.seed("a"), path)
    _changed(world.seed("a") / "model.safetensors", path / "model.safetensors", 7, 0.1)


def _changed(source: Path, target: Path, seed: int, size: float) -> None:
    tensors, noise = load_file(source), drawn(vit_shapes(), seed)
    save_file(
        {name: one + np.float32(size) * noise[name] for name, one in tensors.items()},
        target,
        {"format": "pt"},
    )


def _pi(world: World, path: Path) -> None:
    run("align", world.seed("a"), world.seed("b"), "-o", path, "--residual", "tied", "-q", "--jobs", 1)


def _turned(world: World, path: Path) -> None:
    run("align", world.seed("a"), world.seed("b"), "-o", path, "--method", "functional", "-q", "--jobs", 1)


def _moved(world: World, path: Path) -> None:
    where = ("--base", world.seed("a"), "--onto", world.seed("b"), "--via", world.seed("pi"))
    run("transport", world.seed("tuned"), *where, "-o", path, "--jobs", 1, "-q")


def _merged(world: World, path: Path) -> None:
    where = ("--base", world.seed("a"), "--onto", world.seed("b"), "--via", world.seed("pi"))
    run("merge", world.seed("tuned"), world.seed("tuned"), *where, "-o", path, "--jobs", 1, "-q")


def adapter_tensors() -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        for part in ("query", "value"):
            module = f"base_model.model.vit.encoder.layer.{layer}.attention.attention.{part}"
            shapes |= {f"{module}.lora_A.weight": (2, WIDTH), f"{module}.lora_B.weight": (WIDTH, 2)}
    return drawn(shapes, 11)


def _adapter(world: World, path: Path) -> None:
    path.mkdir()
    save_file(adapter_tensors(), path / "adapter_model.safetensors", {"format": "pt"})
    (path / "adapter_config.json").write_text(as_json(ADAPTER))


def _reader(world: World, path: Path) -> None:
    """A BERT with a tokenizer of a dozen words."""
    _model(bert_shapes, BERT, 21)(world, path)
    (path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (path / "tokenizer_config.json").write_text(
        as_json({"tokenizer_class": "BertTokenizer", "model_max_length": 16})
    )


def _pictures(world: World, path: Path) -> None:
    from PIL import Image

    for number, kind in enumerate(("bird", "cat", "dog")):
        (path / kind).mkdir(parents=True)
        Image.new("RGB", (IMAGE, IMAGE), (60 * number, 90, 200)).save(path / kind / f"{number}.png")


def _results(world: World, path: Path) -> None:
    """A folder of results, one of every verb, about the run of the seed ``moved``."""
    import reports

    shutil.copytree(world.seed("moved"), path)
    a, b, tuned = (str(world.seed(name)) for name in ("a", "b", "tuned"))
    reports.write(path / "evaluate.json", "evaluate", reports.evaluation(b, str(path), tuned))
    reports.write(path / "sweep.json", "sweep", reports.sweep(tuned, a, b))
    reports.write(path / "fewshot.json", "fewshot", reports.fewshot(tuned, a, b))
    reports.write(path / "barrier.json", "barrier", reports.barrier(a, b))
    info = json.loads((path / "transfusion.json").read_text())["alignment"]
    proof = {
        "a": a,
        "via": str(world.seed("pi")),
        "alignment": {"blake3": info["blake3"], "method": "guarded"},
    }
    reports.write(path / "verify.json", "verify", {**proof, **reports.PROOF})
    reports.write(path / "align.json", "align", {"written": str(world.seed("pi")), "method": "guarded"})


SEEDS: dict[str, tuple[Callable[[World, Path], None], str]] = {
    "a": (_model(vit_shapes, VIT, 1), "a"),
    "b": (_other, "b"),
    "tuned": (_tuned, "tuned"),
    "llama": (_model(llama_shapes, LLAMA, 1), "llama"),
    "reader": (_reader, "reader"),
    "pi": (_pi, "pi.safetensors"),
    "turned": (_turned, "turned.safetensors"),
    "moved": (_moved, "moved"),
    "merged": (_merged, "merged"),
    "adapter": (_adapter, "adapter"),
    "pictures": (_pictures, "pictures"),
    "results": (_results, "results"),
}
