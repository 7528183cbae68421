"""How much memory and time a transport takes: a sharded bfloat16 model, against a plain copy of its files.

    python benchmarks/transporting.py                    a Llama of 1.36 billion parameters, 2.7 GB a model
    python benchmarks/transporting.py --layers 2         smaller, to try it out
    python benchmarks/transporting.py --keep FOLDER      keep the models there, and use them again
    python benchmarks/transporting.py --no-peer          without mergekit, which is installed once (1.6 GB)

Three models are drawn at random (A, a fine-tune of A, and B) and a random π. Every contender runs in a
process of its own, so that its peak memory is its own; rounds are interleaved, and the table has medians.
mergekit computes what `--method naive` does, and both outputs are compared value by value.
Pages of mapped files count as memory, as they do in the system's own reckoning.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from own_process import OwnProcess, run_alone
from peers import Peer, difference, install
from transfusion.alignment.alignment import Alignment, random_maps
from transfusion.alignment.provenance import Provenance
from transfusion.architecture.architecture import Policy
from transfusion.files.publishing import write_json
from transfusion.files.writing import LazyTensor, write_shard
from transfusion.model.model import Model

SHARDS = 6


class Size(NamedTuple):
    """A Llama."""

    layers: int
    width: int = 2048
    ffn: int = 8192
    heads: int = 32
    groups: int = 8
    vocabulary: int = 128256


COPY, FLUSHED = "a plain copy of B's files", "the same, flushed to the disk"
PROGRAM = "the program, with a tiny model"
NAIVE = "transport --method naive"
PEERS = {"mergekit in bfloat16": "bfloat16", "mergekit in float32": "float32"}
"""The type that mergekit computes in; both store bfloat16."""
TINY = Size(1, 64, 64, 4, 2, 100)
"""What is left when it is moved is the program itself."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--layers", type=int, default=18)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--keep", type=Path)
    arguments.add_argument("--no-peer", action="store_true", help="without mergekit")
    arguments.add_argument("--output", type=Path, help="also write the results as JSON")
    asked = arguments.parse_args()
    with _workplace(asked.keep) as folder:
        large, tiny = make(folder / "large", Size(asked.layers)), make(folder / "tiny", TINY)
        result = measure(large, tiny, asked.rounds, None if asked.no_peer else install())
    print(table(result))
    if asked.output:
        write_json(asked.output, result)


@contextmanager
def _workplace(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)


# ── models ───────────────────────────────────────────────────────────────────────────────────


def shapes(size: Size) -> dict[str, tuple[int, ...]]:
    width, kv = size.width, size.width // size.heads * size.groups
    of_a_layer = {
        "self_attn.q_proj.weight": (width, width),
        "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width),
        "self_attn.o_proj.weight": (width, width),
        "mlp.gate_proj.weight": (size.ffn, width),
        "mlp.up_proj.weight": (size.ffn, width),
        "mlp.down_proj.weight": (width, size.ffn),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    blocks = {
        f"model.layers.{i}.{name}": shape for i in range(size.layers) for name, shape in of_a_layer.items()
    }
    return {"model.embed_tokens.weight": (size.vocabulary, width), **blocks, "model.norm.weight": (width,)}


class Made(NamedTuple):
    """Three models, and a π from the first base to the second."""

    a: Path
    tuned: Path
    b: Path
    pi: Path


def make(folder: Path, size: Size) -> Made:
    """Those that are there already are used again."""
    a, tuned, b = (_model(folder / name, size) for name in ("a", "tuned", "b"))
    pi = folder / "pi.safetensors"
    if not pi.exists():
        source, target = Model.open(a), Model.open(b)
        policy = Policy()
        architecture = source.architecture.under(policy)
        metadata = Provenance(
            source.family.name,
            architecture.digest(),
            policy,
            "random",
            {},
            0,
            str(a),
            source.fingerprint,
            str(b),
            target.fingerprint,
        )
        Alignment.of(random_maps(architecture, 0), architecture, metadata).save(pi)
    return Made(a, tuned, b, pi)


def _model(folder: Path, size: Size) -> Path:
    """A model by its name: a fine-tune is its base with a little noise."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    named = list(shapes(size).items())
    step = -(-len(named) // SHARDS)
    placed: dict[str, str] = {}
    for number in range(SHARDS):
        file = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        part = dict(named[number * step : (number + 1) * step])
        lazy_tensors = {
            name: LazyTensor(shape, torch.bfloat16, _drawn(name, shape, folder.name))
            for name, shape in part.items()
        }
        write_shard(folder / file, lazy_tensors)
        placed |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": placed})
    write_json(folder / "config.json", _config(size))
    return folder


def _drawn(name: str, shape: tuple[int, ...], who: str) -> Any:
    def draw() -> list[Any]:
        base = torch.randn(shape, generator=_generator(name, "b" if who == "b" else "a")) / 50
        if who == "tuned":
            base += torch.randn(shape, generator=_generator(name, "tuned")) / 500
        return [lambda: base.to(torch.bfloat16)]

    return draw


def _generator(name: str, who: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(map(ord, name + who)))


def _config(size: Size) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.width,
        "intermediate_size": size.ffn,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.groups,
        "num_hidden_layers": size.layers,
        "vocab_size": size.vocabulary,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


# ── measuring ────────────────────────────────────────────────────────────────────────────────


def command(made: Made, out: Path, *how: str | Path) -> list[str]:
    """Return the command of a transport, by the random π or in another way."""
    info = ["transport", made.tuned, "--base", made.a, "--onto", made.b, "-o", out, "-q"]
    return [sys.executable, "-m", "transfusion", *map(str, (*info, *(how or ("--via", made.pi))))]


def measure(large: Made, tiny: Made, rounds: int, peer: Peer | None) -> dict[str, Any]:
    out = large.b.parent / "moved"
    shutil.rmtree(out, ignore_errors=True)  # of a run that was interrupted
    plan = json.loads(subprocess.check_output([*command(large, out), "--dry-run", "--json"]))
    copy = "import os, shutil, sys; shutil.copytree(*sys.argv[1:3]);"
    flush = " [os.fsync(os.open(file.path, os.O_RDWR)) for file in os.scandir(sys.argv[2])]"
    contenders = {
        COPY: [sys.executable, "-c", copy, str(large.b), str(out)],
        FLUSHED: [sys.executable, "-c", copy + flush, str(large.b), str(out)],
        "transport": command(large, out),
        NAIVE: command(large, out, "--method", "naive"),
        PROGRAM: command(tiny, out),
    }
    if peer is not None:
        three = large.a, large.tuned, large.b, out
        contenders |= {name: peer.command(*three, dtype) for name, dtype in PEERS.items()}
    seen: dict[str, list[OwnProcess]] = {name: [] for name in contenders}
    written: dict[str, int] = {}
    differences: dict[str, dict[str, int]] = {}
    ours = out.with_name("moved-naive")
    for turn in range(rounds):
        for name, one in contenders.items():
            shutil.rmtree(out, ignore_errors=True)
            seen[name].append(run_alone(one).require())
            written[name] = sum(file.stat().st_size for file in out.iterdir())
            if name == NAIVE and peer is not None and turn == rounds - 1:
                shutil.rmtree(ours, ignore_errors=True)
                out.rename(ours)
            if name in PEERS and turn == rounds - 1:
                differences[name] = difference(ours, out)._asdict()
    for folder in (ours, out):
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "peer": peer and peer.versions,
        "differences": differences,
        "written_bytes": written,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "bytes": sum(file.stat().st_size for file in large.b.glob("*.safetensors")),
        "plan": plan,
        "rounds": rounds,
        "seconds": {name: statistics.median(run.seconds for run in runs) for name, runs in seen.items()},
        "processor": {name: statistics.median(run.processor for run in runs) for name, runs in seen.items()},
        "peak_bytes": {name: max(run.peak for run in runs) for name, runs in seen.items()},
    }


def table(result: dict[str, Any]) -> str:
    plan, peaks = result["plan"], result["peak_bytes"]
    for_tensors = peaks["transport"] - peaks[PROGRAM]
    lines = [
        f"{result['bytes'] / 1e9:.2f} GB a model, {result['rounds']} rounds, {result['machine']}",
        f"announced: {plan['bytes_to_read'] / 1e9:.1f} GB to read,"
        f" {plan['bytes_to_write'] / 1e9:.1f} GB to write; found: {for_tensors / 1e6:.0f} MB for tensors",
        "",
        "| | seconds | of all cores | throughput, as a share of a copy's | of a flushed one's | peak memory"
        " | written |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, seconds in result["seconds"].items():
        shares = [f"{result['seconds'][copy] / seconds:.0%}" * (name != PROGRAM) for copy in (COPY, FLUSHED)]
        written = f"{result['written_bytes'][name] / 1e9:.2f} GB" * (name != PROGRAM)
        memory = f"{peaks[name] / 1e6:.0f} MB"
        taken = f"{seconds:.1f} | {result['processor'][name]:.1f}"
        lines.append(f"| {name} | {taken} | {' | '.join(shares)} | {memory} | {written} |")
    for name, found in result["differences"].items():
        lines += [
            "",
            f"{name} ({result['peer']}) and {NAIVE}: {found['differing']} of {found['values']} values differ,"
            f" by {found['steps']} step(s) of bfloat16 at most",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
