"""Rows, axes and settings that decoder-only language models share."""

from __future__ import annotations

from typing import Any

from transfusion.architecture.config_schema import shared
from transfusion.architecture.families._shared import HARMLESS, LABEL, PLAIN, VOCAB
from transfusion.architecture.table import ANGLES, Axis, Config, Family, Stack, Table, fixed, rotary

NORMED = f"{ANGLES}, and a norm multiplies each by its own number"


def grouped(qk: Axis) -> tuple[Axis, ...]:
    """A query head may change places with another of its group, never with one of another group."""
    return (Axis("group"), Axis("rep", within="group"), qk, Axis("vo", within="group"), Axis("ffn"))


GROUPED = grouped(rotary("qk", "group"))
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
    **sizes: int,
) -> Table:
    """A decoder with rotary positions and grouped queries, under Llama's names."""
    sizes = {**grouped_sizes(config), **sizes}
    stack = Stack("layer", config["num_hidden_layers"], rows, axes, sizes, shortcuts)
    return decoder(stack, tied=bool(config.get("tie_word_embeddings", tied)))


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
