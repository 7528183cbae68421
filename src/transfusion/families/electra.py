"""ELECTRA as in transformers: BERT's encoder, embeddings of another width than the stream, other heads."""

from __future__ import annotations

from transfusion.architecture.table import Axis, Config, Family, Table
from transfusion.families import bert
from transfusion.families._shared import HARMLESS, LABEL, VOCAB

NARROW = f"""
{bert.EMBEDDINGS.strip().replace("x@first", "word")}
embeddings_project.*   x@first <- word
"""

HEADS = """
classifier.dense.*                             sentence <- x@last
classifier.out_proj.*                          label <- sentence
classifier.*                                   label <- x@last
qa_outputs.*                                   label <- x@last
discriminator_predictions.dense.*              replaced <- x@last
discriminator_predictions.dense_prediction.*   _ <- replaced
generator_predictions.dense.*                  {words} <- x@last
generator_predictions.LayerNorm.*              scale {words}
generator_lm_head.*                            vocab <- {words}
"""


def table(config: Config, names: frozenset[str]) -> Table:
    tied = config.get("tie_word_embeddings", True)
    narrow = config["embedding_size"] != config["hidden_size"]
    embedding = "word" if narrow else "x@first"
    return Table(
        stacks=(bert.stack(config, NARROW if narrow else bert.EMBEDDINGS),),
        axes=(
            Axis("word", scope="model"),
            Axis("sentence", scope="model"),
            Axis("replaced", scope="model"),
            Axis("mlm", scope="model"),
            VOCAB,
            LABEL,
        ),
        heads=HEADS.format(words=embedding if tied else "mlm"),
        buffers="embeddings.position_ids",
        sizes={"word": config["embedding_size"]},
        ties={"generator_lm_head.weight": "embeddings.word_embeddings.weight"} if tied else {},
        outputs={"last_hidden_state": "x@last"},
    )


FAMILIES = (
    Family(
        name="electra",
        library="transformers",
        table=table,
        signature=bert.SIGNATURE,
        fits=lambda shapes: bert.segments(shapes) > 1 and "pooler.dense.weight" not in shapes,
        model_types=("electra",),
        inputs=("tokens",),
        prefixes=("electra.",),
        aliases=bert.ALIASES,
        known_keys=HARMLESS
        | bert.SIZES
        | {"embedding_size", "max_position_embeddings", "type_vocab_size"}
        | {"summary_activation", "summary_last_dropout", "summary_type", "summary_use_proj"},
        required=bert.REQUIRED,
    ),
)
