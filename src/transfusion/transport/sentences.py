"""The modules of sentence-transformers that an output has behind its encoder."""

from __future__ import annotations

from transfusion.alignment.alignment import Alignment
from transfusion.errors import MismatchError, listing
from transfusion.files.checkpoint import Checkpoint
from transfusion.files.sentence_modules import SentenceModules


def modules_moved(checkpoint: Checkpoint, alignment: Alignment) -> SentenceModules | None:
    """Return the modules behind an encoder that is moved; refuse those that π cannot move with it."""
    sentence = checkpoint.sentence
    if sentence is None:
        return None
    if sentence.odd:
        raise MismatchError(
            f"{checkpoint.label}: {listing(f'{one.name} ({one.kind})' for one in sentence.odd)} has weights"
            " behind the encoder, and how they read its units is not known",
            hint="to move the encoder alone, copy its folder without modules.json, and give the copy",
        )
    if sentence.tensors and alignment.rotates and any("max" in one.modes for one in sentence.pooling):
        raise MismatchError(
            f"{checkpoint.label}: a dense layer reads the largest value of each unit, and this π mixes units",
            hint="choose a method that permutes, such as `method='guarded'`",
        )
    return sentence


def notes_on_heads(sentence: SentenceModules | None) -> list[str]:
    """Return what becomes of the classifiers of SetFit."""
    return [
        f"{name} is a program, which is not read: the output has no classifier; fit one on its embeddings"
        for name in (sentence.heads if sentence else ())
    ]
