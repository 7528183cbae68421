"""Qwen3 and Hunyuan as in transformers: a Llama with a norm on queries and keys, shared by all heads."""

from __future__ import annotations

from transfusion.architecture.table import Config, Table
from transfusion.families._decoders import (
    GROUPED_NORMED,
    KNOWN,
    family,
    grouped_decoder,
    lines,
)
from transfusion.families._shared import PLAIN
from transfusion.families.llama import ROWS, SHORTCUTS, SIGNATURE

QK_NORM = """
layers.{}.self_attn.q_norm.weight   scale qk
layers.{}.self_attn.k_norm.weight   scale qk
"""


def table(config: Config, names: frozenset[str]) -> Table:
    return grouped_decoder(config, lines(ROWS, QK_NORM), SHORTCUTS, tied=False, axes=GROUPED_NORMED)


HUNYUAN_KEYS = frozenset(
    {"attention_head_dim", "eod_token_id", "pretraining_tp", "org_vocab_size", "norm_type", "class_num"}
    | {"add_classification_head", "dense_list", "pool_type", "skip_cls_token", "mask_init_id"}
    | {"enable_attention_fp32_softmax", "enable_lm_head_fp32", "im_start_id", "im_end_id", "im_newline_id"}
    | {"text_start_id", "text_end_id", "cla_share_factor"}
)

FAMILIES = (
    family("qwen3", ("qwen3",), table, f"{SIGNATURE} layers.0.self_attn.q_norm.weight"),
    family(
        "hunyuan",
        ("hunyuan_v1_dense",),
        table,
        "",
        aliases=(
            ("layers.{}.self_attn.query_layernorm", "layers.{}.self_attn.q_norm"),
            ("layers.{}.self_attn.key_layernorm", "layers.{}.self_attn.k_norm"),
        ),
        known_keys=KNOWN | HUNYUAN_KEYS,
        required={**PLAIN, "use_qk_norm": (True,), "use_cla": (False, None)},
    ),
)
