"""Rows, axes and settings that decoder-only language models share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from transfusion.architecture.config_schema import shared
from transfusion.architecture.table import ANGLES, Axis, Config, Family, Stack, Table, fixed, rotary
from transfusion.errors import ArchitectureError
from transfusion.families._shared import HARMLESS, LABEL, PLAIN, VOCAB

NORMED = f"{ANGLES}, and a norm multiplies each by its own number"


def grouped(*qk: Axis) -> tuple[Axis, ...]:
    """A query head may change places with another of its group, never with one of another group."""
    return (Axis("group"), Axis("rep", within="group"), *qk, Axis("vo", within="group"), Axis("ffn"))


GROUPED = grouped(rotary("qk", "group"))
GROUPED_INTERLEAVED = grouped(rotary("qk", "group", interleaved=True))
GROUPED_FIXED = grouped(fixed("qk", ANGLES, scope="layer"))
GROUPED_NORMED = grouped(fixed("qk", NORMED, scope="layer"))

# Rotary positions rotate only some units of q and k; the rest are as free as without rotary positions.
PARTLY_ROTARY = (
    Axis("head"),
    rotary("rot", "head"),
    Axis("qk", within="head"),
    Axis("vo", within="head", tied_with="qk"),
    Axis("ffn"),
)


def grouped_partly(*, interleaved: bool = False) -> tuple[Axis, ...]:
    """Grouped queries of which some units, or those of some blocks, are not rotated."""
    return grouped(rotary("rot", "group", interleaved=interleaved), Axis("qk", within="group"))


ALIBI = "each head has its own slope over distances"

EMBEDDING = "embed_tokens.weight   vocab -> x@first"
GROUPED_ATTENTION = """
layers.{}.self_attn.q_proj.*   (group rep qk) <- x
layers.{}.self_attn.k_proj.*   (group qk) <- x
layers.{}.self_attn.v_proj.*   (group vo) <- x
layers.{}.self_attn.o_proj.*   y <- (group rep vo)
"""
GATED_MLP = """
layers.{}.mlp.gate_proj.*   ffn <- y
layers.{}.mlp.up_proj.*     ffn <- y
layers.{}.mlp.down_proj.*   x@next <- ffn
"""

# Attention where rotary positions rotate q and k in some blocks only: in the others they are free.
SOME_ROTARY = """
layers.{rotary}.self_attn.q_proj.*   (group rep rot) <- x
layers.{rotary}.self_attn.k_proj.*   (group rot) <- x
layers.{plain}.self_attn.q_proj.*    (group rep qk) <- x
layers.{plain}.self_attn.k_proj.*    (group qk) <- x
layers.{}.self_attn.v_proj.*         (group vo) <- x
layers.{}.self_attn.o_proj.*         y <- (group rep vo)
"""

HEADS = """
lm_head.*      vocab <- x@last
score.*        label <- x@last
classifier.*   label <- x@last
qa_outputs.*   label <- x@last
"""

KNOWN = (
    HARMLESS
    | {"hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
    | {"head_dim", "intermediate_size", "max_position_embeddings", "attention_bias", "mlp_bias"}
    | {"rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "layer_types"}
    | {"use_sliding_window", "max_window_layers", "_sliding_window_pattern", "sliding_window_pattern"}
)


def lines(*texts: str) -> str:
    """Rows of several texts as one."""
    return "\n".join(text.strip() for text in texts)


def grouped_sizes(config: Config) -> dict[str, int]:
    """The sizes of a decoder with grouped queries."""
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    head = config.get("head_dim")
    return {
        "x": config["hidden_size"],
        "group": groups,
        "rep": shared(heads, groups, "query heads among the key heads"),
        "ffn": config["intermediate_size"],
        **({"qk": head, "vo": head} if head else {}),
    }


def decoder(
    stack: Stack,
    *,
    tied: bool,
    embedding: str = "embed_tokens.weight",
    output: str = "lm_head.weight",
    heads: str = HEADS,
    buffers: str = "layers.{}.self_attn.rotary_emb.inv_freq",
) -> Table:
    """One stack from tokens to tokens, whose ends are one space if the embeddings are tied."""
    return Table(
        stacks=(stack,),
        axes=(VOCAB, LABEL),
        heads=heads,
        buffers=buffers,
        unified=(("x@first", "x@last"),) if tied else (),
        ties={output: embedding} if tied else {},
        outputs={"last_hidden_state": "x@last"},
    )


def grouped_decoder(
    config: Config,
    rows: str,
    shortcuts: str,
    *,
    tied: bool,
    axes: tuple[Axis, ...] = GROUPED,
    points: tuple[str, ...] = ("x", "y"),
    kinds: Mapping[str, Collection[int]] | None = None,
    branch_factor: float = 1.0,
    sizes: Mapping[str, int] | None = None,
) -> Table:
    """A decoder with rotary positions and grouped queries, under Llama's names."""
    sizes = {**grouped_sizes(config), **(sizes or {})}
    depth = config["num_hidden_layers"]
    stack = Stack("layer", depth, rows, axes, sizes, shortcuts, points, kinds or {}, branch_factor)
    return decoder(stack, tied=bool(config.get("tie_word_embeddings", tied)))


def rotary_kinds(config: Config, rotary_blocks: Iterable[int]) -> dict[str, frozenset[int]]:
    """Return the kinds of blocks of a decoder that rotates q and k in some blocks only."""
    rotates = frozenset(rotary_blocks)
    return {"rotary": rotates, "plain": frozenset(range(config["num_hidden_layers"])) - rotates}


def rotary_sizes(config: Config) -> dict[str, int]:
    """Return the sizes of a head in blocks of both kinds."""
    head = head_size(config)
    return {"rot": head, "qk": head}


def rope_blocks(config: Config) -> list[int]:
    """Return the blocks with rotary positions, as ``no_rope_layers`` (1: rotary) or its interval says."""
    depth, every = config["num_hidden_layers"], config.get("no_rope_layer_interval") or 4
    listed = config.get("no_rope_layers") or [(i + 1) % every for i in range(depth)]
    return [i for i, rotates in enumerate(listed) if rotates]


def sliding_blocks(config: Config) -> list[int]:
    """Return the blocks whose attention slides, as ``layer_types`` or the pattern of older files says."""
    kinds = config.get("layer_types")
    if kinds is not None:
        return [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 4
    if not isinstance(every, int):
        raise ArchitectureError(
            f"sliding_window_pattern = {every!r:.40} does not tell which blocks slide without layer_types",
            hint="save the model again with the installed transformers, which writes layer_types",
        )
    return [i for i in range(config["num_hidden_layers"]) if (i + 1) % every]


def head_size(config: Config) -> int:
    """Return the number of units of a head."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    return config.get("head_dim") or shared(width, heads, "the width among the heads")


def rotated(config: Config, head_size: int, default: float) -> int:
    """Return the number of units of a head that rotary positions rotate."""
    parameters = config.get("rope_parameters") or {}
    share = parameters.get("partial_rotary_factor")
    for key in ("partial_rotary_factor", "rotary_pct"):
        share = config.get(key) if share is None else share
    return int(head_size * (default if share is None else share))


def family(name: str, model_types: tuple[str, ...], table: Any, signature: str, **more: Any) -> Family:
    """A decoder of transformers; its shapes never tell how many heads it has."""
    settings = {"prefixes": ("model.", "transformer."), "known_keys": KNOWN, "required": PLAIN, **more}
    return Family(
        name=name,
        library="transformers",
        table=table,
        signature=tuple(signature.split()),
        model_types=model_types,
        inputs=("tokens",),
        **settings,
    )
