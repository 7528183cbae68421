"""RoBERTa, XLM-RoBERTa and CamemBERT as in transformers: BERT's encoder with other heads."""

from __future__ import annotations

from transfusion.architecture.table import Axis, Config, Family, Stack, Table
from transfusion.families import bert
from transfusion.families._shared import HARMLESS, LABEL, VOCAB

HEADS = """
pooler.dense.*          pool <- x@last
classifier.dense.*      sentence <- x@last
classifier.out_proj.*   label <- sentence
classifier.*            label <- {pooled}
qa_outputs.*            label <- x@last
lm_head.dense.*         {words} <- x@last
lm_head.layer_norm.*    scale {words}
lm_head.decoder.*       vocab <- {words}
lm_head.bias            vocab
"""

TIES = {
    "lm_head.decoder.weight": "embeddings.word_embeddings.weight",
    "lm_head.decoder.bias": "lm_head.bias",
}


def table(config: Config, names: frozenset[str]) -> Table:
    return with_heads(bert.stack(config), config, names)


def with_heads(stack: Stack, config: Config, names: frozenset[str]) -> Table:
    """A stack under RoBERTa's heads, which other families have too."""
    tied = config.get("tie_word_embeddings", True)
    return Table(
        stacks=(stack,),
        axes=(
            Axis("pool", scope="model"),
            Axis("sentence", scope="model"),
            Axis("mlm", scope="model"),
            VOCAB,
            LABEL,
        ),
        heads=HEADS.format(pooled=bert.pooled(config, names), words="x@first" if tied else "mlm"),
        buffers="embeddings.position_ids",
        ties=TIES if tied else {},
        outputs={"last_hidden_state": "x@last", "pooler_output": "pool"},
    )


FAMILIES = (
    Family(
        name="roberta",
        library="transformers",
        table=table,
        signature=bert.SIGNATURE,
        fits=lambda shapes: bert.segments(shapes) == 1 and not bert.narrow(shapes),
        model_types=("roberta", "xlm-roberta", "camembert"),
        inputs=("tokens",),
        positions_after_padding=True,
        prefixes=("roberta.",),
        aliases=bert.ALIASES,
        known_keys=HARMLESS | bert.SIZES | {"max_position_embeddings", "type_vocab_size"},
        required=bert.REQUIRED,
    ),
)
