"""GPT-OSS as in transformers: experts with biases, and a learned sink in the attention of each head.

The rows of each expert's gate and up alternate. Released weights are quantised (MXFP4) and refused; copies in
bfloat16 are read.
"""

from __future__ import annotations

from dataclasses import replace

from transfusion.architecture.table import Config, Table, fixed
from transfusion.families._decoders import EMBEDDING, GROUPED_ATTENTION, KNOWN, family, lines
from transfusion.families.mixtral import KNOWN_OF_EXPERTS, NORM, mixture

ROWS = lines(
    EMBEDDING,
    "layers.{}.input_layernorm.weight            scale x",
    GROUPED_ATTENTION,
    """
    layers.{}.self_attn.sinks                   (group rep)
    layers.{}.post_attention_layernorm.weight   scale y
    layers.{}.mlp.router.*                      expert <- y
    layers.{}.mlp.experts.gate_up_proj          expert y -> (ffn half)
    layers.{}.mlp.experts.gate_up_proj_bias     expert (ffn half)
    layers.{}.mlp.experts.down_proj             expert ffn -> x@next
    layers.{}.mlp.experts.down_proj_bias        expert x@next
    """,
    NORM,
)
HALF = fixed("half", "gate and up alternate")


def table(config: Config, names: frozenset[str]) -> Table:
    sizes = {"expert": config["num_local_experts"], "half": 2}
    whole = mixture(config, ROWS, **sizes)
    return replace(whole, axes=(*whole.axes, HALF))


FAMILIES = (
    family(
        "gpt_oss",
        ("gpt_oss",),
        table,
        "",
        known_keys=KNOWN
        | KNOWN_OF_EXPERTS
        | {"experts_per_token", "initial_context_length", "swiglu_alpha", "swiglu_limit"},
    ),
)
