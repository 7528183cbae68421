"""Whisper as in transformers: pre-norm, an encoder of spectrograms and a decoder of text."""

from __future__ import annotations

from transfusion.architecture.table import Axis, Config, Family, Table, fixed
from transfusion.families import bart
from transfusion.families._shared import LABEL, PLAIN, SPEC_AUGMENT, VOCAB

# The encoder's positions are sines that the library would compute, but every file has them: they are
# read like any other weight, and so move like one.
AUDIO_EMBEDDINGS = """
encoder.conv1.*                  heard <- mel tap
encoder.conv2.*                  x@first <- heard tap
encoder.embed_positions.weight   position -> x@first
"""

WRITING = """
decoder.embed_tokens.weight      vocab -> x@first
decoder.embed_positions.weight   position -> x@first
"""

HEADS = """
projector.*    sound <- encoder.x@last
classifier.*   label <- sound
"""

GENERATION = """
proj_out.weight   vocab <- decoder.x@last
"""


def table(config: Config, names: frozenset[str]) -> Table:
    encoder = bart.stack("encoder", config, before=True, embeddings=AUDIO_EMBEDDINGS)
    axes = (
        Axis("heard", scope="model"),
        Axis("sound", scope="model"),
        fixed("mel", "frequencies come in this order"),
        fixed("tap", "moments come in this order"),
        VOCAB,
        LABEL,
    )
    if not any(name.startswith("decoder.") for name in names):
        return Table(stacks=(encoder,), axes=axes, heads=HEADS)
    tied = config.get("tie_word_embeddings", True)
    return Table(
        stacks=(encoder, bart.stack("decoder", config, before=True, embeddings=WRITING)),
        axes=axes,
        heads=HEADS + GENERATION,
        unified=(("decoder.x@first", "decoder.x@last"),) if tied else (),
        ties={"proj_out.weight": "decoder.embed_tokens.weight"} if tied else {},
        outputs={
            "last_hidden_state": "decoder.x@last",
            "encoder_last_hidden_state": "encoder.x@last",
        },
    )


FAMILIES = (
    Family(
        name="whisper",
        library="transformers",
        table=table,
        signature=(
            "encoder.conv1.weight",
            "encoder.conv2.weight",
            "encoder.embed_positions.weight",
            "encoder.layers.0.fc1.weight",
        ),
        model_types=("whisper",),
        inputs=("spectrogram",),
        prefixes=("model.",),
        known_keys=bart.KNOWN
        | SPEC_AUGMENT
        | {"num_mel_bins", "max_source_positions", "max_target_positions", "classifier_proj_size"}
        | {"median_filter_width", "forced_decoder_ids", "alignment_heads", "task", "is_multilingual"}
        | {"no_timestamps_token_id", "lang_to_id", "task_to_id", "max_initial_timestamp_index"},
        required={**PLAIN, "is_decoder": (False,), "use_weighted_layer_sum": (False,)},
    ),
)
