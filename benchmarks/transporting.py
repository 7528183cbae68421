"""How much memory and time a transport takes: a sharded bfloat16 model, against a plain copy of its files.

    python benchmarks/transporting.py                    a Llama of 1.36 billion parameters, 2.7 GB a model
    python benchmarks/transporting.py --layers 2         smaller, to try it out
    python benchmarks/transporting.py --keep FOLDER      keep the models there, and use them again

Three models are drawn at random (A, a fine-tune of A, and B) and a random π. Every contender runs in a
process of its own, so that its peak memory is its own; rounds are interleaved, and the table has medians.
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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from transfusion.alignment import Alignment, Provenance, random_maps
from transfusion.architecture import Policy
from transfusion.model import Model
from transfusion.writer import Parcel, write_json, write_shard

WIDTH, FFN, HEADS, GROUPS, VOCABULARY, SHARDS = 2048, 8192, 32, 8, 128256, 6


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--layers", type=int, default=18)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--keep", type=Path)
    arguments.add_argument("--output", type=Path, help="also write the results as JSON")
    asked = arguments.parse_args()
    with _workplace(asked.keep) as folder:
        a, tuned, b, pi = make(folder, asked.layers)
        result = measure(folder, a, tuned, b, pi, asked.rounds)
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


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    inner, kv = WIDTH, WIDTH // HEADS * GROUPS
    of_a_layer = {
        "self_attn.q_proj.weight": (inner, WIDTH),
        "self_attn.k_proj.weight": (kv, WIDTH),
        "self_attn.v_proj.weight": (kv, WIDTH),
        "self_attn.o_proj.weight": (WIDTH, inner),
        "mlp.gate_proj.weight": (FFN, WIDTH),
        "mlp.up_proj.weight": (FFN, WIDTH),
        "mlp.down_proj.weight": (WIDTH, FFN),
        "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,),
    }
    blocks = {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in of_a_layer.items()}
    return {"model.embed_tokens.weight": (VOCABULARY, WIDTH), **blocks, "model.norm.weight": (WIDTH,)}


def make(folder: Path, layers: int) -> tuple[Path, Path, Path, Path]:
    """Three models and a π between the two bases; those that are there already are used again."""
    a, tuned, b = (_model(folder / name, layers) for name in ("a", "tuned", "b"))
    pi = folder / "pi.safetensors"
    if not pi.exists():
        source, target = Model.open(a), Model.open(b)
        policy = Policy()
        architecture = source.architecture.under(policy)
        story = Provenance(
            source.family.name,
            architecture.digest(),
            policy,
            "random",
            {},
            0,
            str(a),
            source.digest,
            str(b),
            target.digest,
        )
        Alignment.of(random_maps(architecture, 0), architecture, story).save(pi)
    return a, tuned, b, pi


def _model(folder: Path, layers: int) -> Path:
    """A model by its name: a fine-tune is its base with a little noise."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    named = list(shapes(layers).items())
    step = -(-len(named) // SHARDS)
    placed: dict[str, str] = {}
    for number in range(SHARDS):
        file = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        part = dict(named[number * step : (number + 1) * step])
        parcels = {
            name: Parcel(shape, torch.bfloat16, _drawn(name, shape, folder.name))
            for name, shape in part.items()
        }
        write_shard(folder / file, parcels)
        placed |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": placed})
    write_json(folder / "config.json", _config(layers))
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


def _config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


# ── measuring ────────────────────────────────────────────────────────────────────────────────


def measure(folder: Path, a: Path, tuned: Path, b: Path, pi: Path, rounds: int) -> dict[str, Any]:
    out = folder / "moved"
    command = [sys.executable, "-m", "transfusion", "transport", str(tuned), "--base", str(a)]
    command += ["--onto", str(b), "--via", str(pi), "-o", str(out), "-q"]
    plan = json.loads(subprocess.check_output([*command, "--dry-run", "--json"]))
    copy = "import shutil, sys; shutil.copytree(*sys.argv[1:])"
    nothing = [sys.executable, "-c", "import transfusion.cli.app, transfusion.transportation"]
    contenders = {
        "a plain copy of B's files": [sys.executable, "-c", copy, str(b), str(out)],
        "transport": command,
        "importing the program": nothing,
    }
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, one in contenders.items():
            shutil.rmtree(out, ignore_errors=True)
            seen[name].append(_run(one))
    shutil.rmtree(out, ignore_errors=True)
    return {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "bytes": sum(file.stat().st_size for file in b.glob("*.safetensors")),
        "plan": plan,
        "rounds": rounds,
        "seconds": {name: statistics.median(seconds for seconds, _ in runs) for name, runs in seen.items()},
        "peak_bytes": {name: max(peak for _, peak in runs) for name, runs in seen.items()},
    }


def _run(command: list[str]) -> tuple[float, float]:
    """Seconds, and the peak of resident memory."""
    watch = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True);"
    watch += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    begun = time.perf_counter()
    told = subprocess.check_output([sys.executable, "-c", watch, *command], text=True)
    unit = 1 if sys.platform == "darwin" else 1024
    return time.perf_counter() - begun, float(told.splitlines()[-1]) * unit


def table(result: dict[str, Any]) -> str:
    size, plan = result["bytes"], result["plan"]
    plain = result["seconds"]["a plain copy of B's files"]
    lines = [
        f"{size / 1e9:.2f} GB a model, {result['rounds']} rounds, {result['machine']}",
        f"announced: {plan['memory'] / 1e6:.0f} MB for tensors, {plan['bytes_to_read'] / 1e9:.1f} GB to read,"
        f" {plan['bytes_to_write'] / 1e9:.1f} GB to write",
        "",
        "| | seconds | share of the copy's throughput | peak memory |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {seconds:.1f} | {plain / seconds:.0%} | {result['peak_bytes'][name] / 1e6:.0f} MB |"
        for name, seconds in result["seconds"].items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
