"""BERT as in transformers: post-norm, with its pre-training heads and the usual fine-tuning heads."""

from __future__ import annotations

from transfusion.architecture.table import Axis, Config, Family, Shapes, Stack, Table, fixed
from transfusion.families._shared import (
    ATTENTION,
    HARMLESS,
    LABEL,
    MATCH,
    PLAIN,
    POSITION,
    VOCAB,
    usual_sizes,
)

EMBEDDINGS = """
embeddings.word_embeddings.weight               vocab -> x@first
embeddings.position_embeddings.weight           position -> x@first
embeddings.token_type_embeddings.weight         type -> x@first
embeddings.LayerNorm.*                          scale x@first
"""

BLOCKS = """
encoder.layer.{}.attention.self.query.*         (head qk) <- x
encoder.layer.{}.attention.self.key.*           (head qk) <- x
encoder.layer.{}.attention.self.value.*         (head vo) <- x
encoder.layer.{}.attention.output.dense.*       y <- (head vo)
encoder.layer.{}.attention.output.LayerNorm.*   scale y
encoder.layer.{}.intermediate.dense.*           ffn <- y
encoder.layer.{}.output.dense.*                 x@next <- ffn
encoder.layer.{}.output.LayerNorm.*             scale x@next
"""

SHORTCUTS = """
encoder.layer.{}.attention.self.query   x -> y        encoder.layer.{}.attention.output.dense
encoder.layer.{}.intermediate.dense     y -> x@next   encoder.layer.{}.output.dense
"""

# The transform of the masked-language head ends in the space of the matrix that reads it: the
# embedding's where that matrix is tied, its own otherwise.
HEADS = """
pooler.dense.*                          pool <- x@last
classifier.*                            label <- {pooled}
qa_outputs.*                            label <- x@last
linear.*                                match <- x@last
cls.seq_relationship.*                  next <- {pooled}
cls.predictions.bias                    vocab
cls.predictions.transform.dense.*       {words} <- x@last
cls.predictions.transform.LayerNorm.*   scale {words}
cls.predictions.decoder.*               vocab <- {words}
"""

TIES = {
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


TYPE = fixed("type", "segment ids select its rows", scope="stack")
SIZES = {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}


def stack(config: Config, embeddings: str = EMBEDDINGS) -> Stack:
    """The encoder, which other families have too."""
    axes = (*ATTENTION, POSITION, TYPE)
    return Stack(
        "layer", config["num_hidden_layers"], embeddings + BLOCKS, axes, usual_sizes(config), SHORTCUTS
    )


def pooled(
    config: Config, names: frozenset[str], pooler: str = "pooler.dense.weight", pool: str = "pool"
) -> str:
    """Where a plain classifier reads: behind the pooler if there is one, but never token by token."""
    by_token = (config.get("architectures") or [""])[0].endswith("ForTokenClassification")
    return pool if pooler in names and not by_token else "x@last"


def table(config: Config, names: frozenset[str]) -> Table:
    return with_heads(stack(config), config, names)


def with_heads(stack: Stack, config: Config, names: frozenset[str]) -> Table:
    """A stack under BERT's heads, which other families have too."""
    tied = config.get("tie_word_embeddings", True)
    return Table(
        stacks=(stack,),
        axes=(
            Axis("pool", scope="model"),
            Axis("mlm", scope="model"),
            VOCAB,
            LABEL,
            MATCH,
            fixed("next", "follows, or does not follow: in this order"),
        ),
        heads=HEADS.format(pooled=pooled(config, names), words="x@first" if tied else "mlm"),
        buffers="embeddings.position_ids",
        ties=TIES if tied else {},
        outputs={"last_hidden_state": "x@last", "pooler_output": "pool"},
    )


def segments(shapes: Shapes) -> int:
    """How many kinds of segments there are: two in BERT and ELECTRA, one in RoBERTa."""
    return shapes["embeddings.token_type_embeddings.weight"][0]


def narrow(shapes: Shapes) -> bool:
    """Whether the embeddings have a width of their own."""
    return shapes["embeddings.word_embeddings.weight"][1] != shapes[QUERY][1]


QUERY = "encoder.layer.0.attention.self.query.weight"
SIGNATURE = (
    "embeddings.word_embeddings.weight",
    "embeddings.token_type_embeddings.weight",
    QUERY,
    "encoder.layer.0.attention.output.LayerNorm.weight",
    "encoder.layer.0.intermediate.dense.weight",
)
ALIASES = (
    ("*LayerNorm.gamma", "*LayerNorm.weight"),
    ("*LayerNorm.beta", "*LayerNorm.bias"),
)
REQUIRED = {**PLAIN, "position_embedding_type": ("absolute", None), "is_decoder": (False, None)}

FAMILIES = (
    Family(
        name="bert",
        library="transformers",
        table=table,
        signature=SIGNATURE,
        fits=lambda shapes: segments(shapes) > 1 and not narrow(shapes),
        model_types=("bert",),
        inputs=("tokens",),
        prefixes=("bert.",),
        aliases=ALIASES,
        known_keys=HARMLESS
        | SIZES
        | {"max_position_embeddings", "type_vocab_size"}
        | {"directionality", "pooler_fc_size", "pooler_num_attention_heads"}
        | {"pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"},
        required=REQUIRED,
    ),
)
