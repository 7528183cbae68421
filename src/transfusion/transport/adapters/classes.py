"""The transformers class that an adapter was trained in, from the adapter's task and the base's model type.

transformers knows the classes of its model types. For a type that it does not know, a class follows from the
name of the base's own. Without transformers that serves to read an adapter, never to name the class of an
output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from transfusion.model.tensor_pieces import TensorPieces
from transfusion.runtime.optional_libraries import require_library

TASKS = {
    "SEQ_CLS": ("ForSequenceClassification", "AUDIO_CLASSIFICATION SEQUENCE_CLASSIFICATION"),
    "TOKEN_CLS": ("ForTokenClassification", "TOKEN_CLASSIFICATION"),
    "QUESTION_ANS": ("ForQuestionAnswering", "QUESTION_ANSWERING"),
    "CAUSAL_LM": ("ForCausalLM", "CAUSAL_LM"),
    "SEQ_2_SEQ_LM": ("ForConditionalGeneration", "SPEECH_SEQ_2_SEQ SEQ_TO_SEQ_CAUSAL_LM"),
    "FEATURE_EXTRACTION": ("Model", ""),
}
"""PEFT's task types, with the usual ending of the class name, and transformers' tables of their classes."""
_SAME_CLASSES = {"RefinedWeb": "falcon", "RefinedWebModel": "falcon", "new": "gte"}
"""Model types of remote code whose classes transformers has under another type."""
PREFIXES = {
    f"{kind}ForQuestionAnswering": "transformer."
    for kind in ("Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Qwen3Next")
}
"""Classes with another prefix before the base model's names than the other classes of their type."""
ENCODERS = (
    "WhisperForAudioClassification",
    *(f"{kind}ForTokenClassification" for kind in ("MT5", "T5", "UMT5")),
)
"""Classes that have only the encoder of an encoder-decoder type."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_CLASS = re.compile(r"(?P<beginning>[A-Za-z][A-Za-z0-9_]*?)(For[A-Z]\w*|LMHeadModel|MTModel|Model)")


@cache
def classes_of(model_type: object) -> dict[str, str]:
    """Return the class that transformers has for each task of a model type; none of an unknown type."""
    try:
        from transformers.models.auto import modeling_auto
    except ImportError:
        return {}
    kind, found = _SAME_CLASSES.get(str(model_type), str(model_type)), dict[str, str]()
    for task, (_, tables) in TASKS.items():
        for table in (f"MODEL_FOR_{one}_MAPPING_NAMES" for one in tables.split()):
            found |= {task: name} if (name := getattr(modeling_auto, table, {}).get(kind)) else {}
    name = modeling_auto.MODEL_MAPPING_NAMES.get(kind)
    return found | ({"FEATURE_EXTRACTION": name} if isinstance(name, str) else {})


def class_for(adapter: Mapping[str, Any], base: Mapping[str, Any]) -> str | None:
    """Return the class that an adapter was trained in, from both configurations, or None if there is none.

    PEFT stores the class of the base in ``auto_mapping`` if no task type was given.
    """
    own, classes = named_in(base), classes_of(base.get("model_type"))
    info = adapter.get("auto_mapping")
    if isinstance(info, Mapping) and (name := info.get("base_model_class")) is not None:
        valid = isinstance(name, str) and _NAME.fullmatch(name)
        fits = not classes or name in classes.values() or str(name).startswith(_beginning(classes))
        return str(name) if valid and fits else None
    task = adapter.get("task_type")
    if not task:
        return own
    if not isinstance(task, str) or task not in TASKS:
        return None
    ending = TASKS[task][0]
    if task in classes or (own or "").endswith(ending):
        return classes.get(task, own)
    found = None if classes else _CLASS.fullmatch(own or "")
    return found["beginning"] + ending if found else None


def _beginning(classes: Mapping[str, str]) -> str:
    """Return what the names of all classes of a model type begin with."""
    found = _CLASS.fullmatch(next(iter(classes.values())))
    return found["beginning"] if found else ""


def named_in(config: Mapping[str, Any]) -> str | None:
    """Return the class that a configuration names, if the name is valid."""
    names = config.get("architectures")
    own = names[0] if isinstance(names, list) and names else None
    return own if isinstance(own, str) and _NAME.fullmatch(own) else None


def class_for_type(name: str, own: object, other: object) -> str:
    """Return the class of another model type for the same task; the name itself, if the type is not known.

    >>> class_for_type("LlamaForSequenceClassification", "llama", "qwen2")
    'Qwen2ForSequenceClassification'
    """
    if own == other:
        return name
    require_library("transformers")  # a guess would write a class that B's type may not have
    ours, theirs = classes_of(own), classes_of(other)
    if not ours or not theirs or name in theirs.values():
        return name
    task = next((task for task, known in ours.items() if known == name and task in theirs), None)
    if task is not None:
        return theirs[task]
    before = _beginning(ours)
    return _beginning(theirs) + name.removeprefix(before) if name.startswith(before) else name


def class_prefix(class_name: str, config: Mapping[str, Any], known: tuple[str, ...]) -> str:
    """Return the prefix that a class puts before the names of the base model."""
    by_type = f"{config.get('model_type')}.".replace("-", "_")
    usual = by_type if by_type in known else next(iter(known), "")
    return PREFIXES.get(class_name, usual)


def in_class(
    names: Mapping[str, TensorPieces], class_name: str, config: Mapping[str, Any], known: tuple[str, ...]
) -> dict[str, TensorPieces]:
    """Return names as the files of a class have them: those of the base model behind the class's prefix."""
    prefix = class_prefix(class_name, config, known)
    bare = not any(one.names[0].startswith(known) for one in names.values())
    found = {}
    for name, one in names.items():
        before = next((start for start in known if one.names[0].startswith(start)), "")
        alike = before and not {prefix, before} & set(PREFIXES.values())
        found[name] = one.renamed(prefix, before) if (bare or before) and not alike else one
    return found
