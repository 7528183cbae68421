"""Find a model, and its weights: in a folder, in an index and its shards, or in a single file.

A reference is an existing path, or else a hub id: ``org/name`` or ``org/name@revision``. Of a pipeline of
diffusers, the model that denoises is meant; ``org/name/transformer`` fetches nothing else. Of a folder of
sentence-transformers, the encoder is meant.
"""

from __future__ import annotations

import re
from pathlib import Path

from transfusion.errors import CheckpointError, listing
from transfusion.files.lora_keys import is_lora
from transfusion.files.sentence_modules import SentenceModules
from transfusion.files.tensor_files import PICKLES, TensorInfo, content, headers, read_tensor, unpickle
from transfusion.runtime.untrusted_files import path_inside, read_json, require_closed, validate

DENOISERS = ("transformer", "transformer_2", "unet")
"""The folders of the models in a pipeline that denoise."""
_HUB_ID = re.compile(
    rf"(?P<repo>[\w][\w.-]*(/[\w][\w.-]*?)?)(/(?P<part>{'|'.join(DENOISERS)}))?(@(?P<revision>[\w][\w./-]*))?"
)


def resolve(reference: str | Path) -> Path:
    """Return the path of a reference; download a hub id, unless a path of that name exists."""
    if not str(reference):
        raise CheckpointError("the name of a model is empty", hint="give a path or a hub id")
    try:
        path = Path(reference).expanduser()
        if path.exists():
            return _model_in(path)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{reference}: the path cannot be read ({getattr(error, 'strerror', None) or error})",
            hint="give a path that exists, or a hub id such as org/name or org/name@revision",
        ) from error
    match = _HUB_ID.fullmatch(str(reference))
    if match is None or path.suffix in PICKLES | {".safetensors", ".json"}:
        raise CheckpointError(
            f"{reference}: no such file or folder",
            hint="give a path that exists, or a hub id such as org/name or org/name@revision",
        )
    folder = _fetch(str(reference), match["repo"], match["revision"], match["part"])
    return _model_in(folder) if match["part"] is None else path_inside(folder, folder / match["part"])


def _model_in(root: Path) -> Path:
    """Return the folder of the model that is meant."""
    sentence = SentenceModules.of(root)
    return _denoiser(root) if sentence is None else sentence.encoder


def _denoiser(root: Path) -> Path:
    """Return the folder of the model that denoises, if the root is a pipeline of diffusers."""
    if not (root / "model_index.json").is_file() or (root / "config.json").exists():
        return root
    found = [root / name for name in DENOISERS if (root / name / "config.json").is_file()]
    if len(found) != 1:
        held = " and ".join(part.name for part in found) or "none of " + ", ".join(DENOISERS)
        raise CheckpointError(
            f"{root}: a pipeline, with {held}",
            hint=f"give the folder of one model, such as {root / (found[0].name if found else DENOISERS[0])}",
        )
    return path_inside(root, found[0])


def _fetch(reference: str, repo: str, revision: str | None, part: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def snapshot(patterns: list[str]) -> Path:
        within = [f"{part}/{pattern}" for pattern in patterns] if part else patterns
        patterns = [*within, "README.md"]  # it states the licence
        return Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=patterns))

    beside = ["*.json", "*.txt", "*.model", "*.jinja"]
    try:
        folder = snapshot([*beside, "*.safetensors"])
        if not any(folder.rglob("*.safetensors")):
            folder = snapshot([*beside, "*.bin"])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        offline = isinstance(error, LocalEntryNotFoundError)
        text = "it cannot be reached" if offline else str(error).strip()
        reason = text.splitlines()[0] if text else type(error).__name__
        raise CheckpointError(
            f"{reference}: no such file or folder here, and the hub could not provide it ({reason})",
            hint="check the spelling, the network and your access, or give a local path",
        ) from error
    return folder


# ── weights ───────────────────────────────────────────────────────────────────────────────

WEIGHTS = (
    "model.safetensors",
    "open_clip_model.safetensors",
    "pytorch_model.bin",
    "open_clip_pytorch_model.bin",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.bin",
)
_KINDS = PICKLES | {".safetensors"}
_SHARDED = re.compile(r".+-\d{5}-of-\d{5}\.(safetensors|bin)")
_ADAPTER, _PEFT = "adapter_model", "base_model.model."
_FINETUNED = "give it to 'transport' as FINETUNED, with its base as `base`"
_GGUF = ".gguf"
_UNPACK = (
    "GGUF is mostly quantised: take the original weights, or dequantise it with transformers: from_pretrained"
    " with gguf_file=… and quantization_config=GgufConfig(dequantize=True), and save_pretrained"
)
_AGAIN = "fetch the file again"
_MIXED = "index and shards belong to different models; fetch the folder again"


def weights_in(root: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a folder or of a file, in the order of its files."""
    if root.is_dir():
        require_closed(root)
        index = next(iter(sorted(root.glob("*.index.json"))), None)
        tensors = headers(_only_weights(root)) if index is None else _in_shards(root, index)
    else:
        if root.suffix not in _KINDS:
            raise CheckpointError(
                f"{root}: not a kind of file that holds weights",
                hint=_UNPACK
                if root.suffix == _GGUF
                else "give a .safetensors, .bin or .pt file, or a folder",
            )
        tensors = {} if root.name.startswith(_ADAPTER) else headers(root)
    lora = is_lora(tensors)
    if root.name.startswith(_ADAPTER) or (lora and any(name.startswith(_PEFT) for name in tensors)):
        raise CheckpointError(
            f"{root}: these are the weights of an adapter",
            hint="give the adapter's folder, which also holds its adapter_config.json",
        )
    if lora:
        raise CheckpointError(
            f"{root}: this is a LoRA, and not a model", hint=f"{_FINETUNED}; 'inspect' shows what it is for"
        )
    return tensors


def _only_weights(root: Path) -> Path:
    """Return the file with the weights of a folder without an index."""
    found = [root / name for name in WEIGHTS if (root / name).exists()]
    if found:
        return found[0]
    candidates = sorted(path for path in root.iterdir() if path.suffix in _KINDS)
    names = listing(path.name for path in candidates)
    if not candidates:
        what = f"no weights in this folder (looked for {listing(WEIGHTS)})"
        adapter = (root / "adapter_config.json").exists()
        hint = f"this is an adapter; {_FINETUNED}" if adapter else "give the folder with the model's files"
        hint = _UNPACK if any(path.suffix == _GGUF for path in root.iterdir()) else hint
    elif any(_SHARDED.fullmatch(path.name) for path in candidates):
        what, hint = f"shards without an index ({names})", "fetch the .index.json that belongs to them"
    elif len(candidates) > 1:
        what, hint = f"several files with weights ({names})", "give the path of one of the files"
    elif candidates[0].name.startswith(_ADAPTER):
        what, hint = "this is an adapter, not a model", _FINETUNED
    else:
        return candidates[0]
    raise CheckpointError(f"{root}: {what}", hint=hint)


def _in_shards(root: Path, index: Path) -> dict[str, TensorInfo]:
    """Return the tensors of all shards; refuse those that are not where the index says."""
    placed = _read_index(index)
    shards = {name: headers(root / name) for name in dict.fromkeys(placed.values())}
    absent = [f"{name} in {file}" for name, file in placed.items() if name not in shards[file]]
    unlisted = [name for shard in shards.values() for name in shard if name not in placed]
    if absent or unlisted:
        shown = f"the index names {len(absent)} tensor(s) that their shard does not hold: {listing(absent)}"
        other = f"the shards hold {len(unlisted)} tensor(s) that the index does not name: {listing(unlisted)}"
        raise CheckpointError(f"{root}: {shown if absent else other}", hint=_MIXED)
    for file, shard in shards.items():
        for name, info in shard.items():
            if placed[name] != file and not _same(info, shards[placed[name]][name]):
                raise CheckpointError(
                    f"{root}: {name} is in {placed[name]}, as the index says, and differs in {file}",
                    hint=_MIXED,
                )
    return {name: shards[file][name] for file in shards for name in shards[file] if placed[name] == file}


def _same(one: TensorInfo, other: TensorInfo) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    first, second = (
        unpickle(info.file)[info.name] if info.file.suffix in PICKLES else read_tensor(info)
        for info in (one, other)
    )
    return content(first) == content(second)


def _read_index(index: Path) -> dict[str, str]:
    """Return the file of every tensor."""
    if not (found := read_json(index).get("weight_map")):
        raise CheckpointError(f"{index}: it has no weight_map, or an empty one", hint=_AGAIN)
    placed = validate(found, dict[str, str], f"{index}: weight_map", hint=_AGAIN)
    files = list(dict.fromkeys(placed.values()))
    if odd := [name for name in files if Path(name).suffix not in _KINDS]:
        what = f"it names {odd[0]!r}, which is not a kind of file that holds weights"
        raise CheckpointError(f"{index}: {what}", hint=_AGAIN)
    missing = [name for name in files if not path_inside(index.parent, index.parent / name).exists()]
    if missing:
        raise CheckpointError(
            f"{index.parent}: {index.name} names {len(missing)} shard(s) that do not exist:"
            f" {listing(missing)}",
            hint="the download is incomplete; fetch the missing files",
        )
    return placed
