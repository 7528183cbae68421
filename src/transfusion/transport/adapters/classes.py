"""The transformers class that an adapter was trained in, from the adapter's task and the base's model type.

The table works without transformers. A test compares it with the library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transfusion.model.tensor_pieces import TensorPieces

TASKS = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
    "CAUSAL_LM": "ForCausalLM",
    "SEQ_2_SEQ_LM": "ForConditionalGeneration",
    "FEATURE_EXTRACTION": "Model",
}
"""PEFT's task types, with the usual ending of the class name."""

_TABLE = """
FEATURE_EXTRACTION: beit=Beit clip=CLIP clip_text_model=CLIPText clip_vision_model=CLIPVision
    data2vec-vision=Data2VecVision deit=DeiT dinov2=Dinov2 dinov2_with_registers=Dinov2WithRegisters
    dinov3_vit=DINOv3ViT idefics3=Idefics3 llava=Llava mistral3=Mistral3 paligemma=PaliGemma
    pixtral=PixtralVision qwen2_5_vl=Qwen2_5_VL qwen2_vl=Qwen2VL qwen3_vl=Qwen3VL sam=Sam
    sam_vision_model=SamVision siglip=Siglip siglip2=Siglip2 siglip2_text_model=Siglip2Text
    siglip2_vision_model=Siglip2Vision siglip_text_model=SiglipText siglip_vision_model=SiglipVision
    smolvlm=SmolVLM swin=Swin swinv2=Swinv2 vit=ViT vit_mae=ViTMAE
CAUSAL_LM: cohere=Cohere cohere2=Cohere2 cwm=Cwm ernie4_5=Ernie4_5 granite=Granite granitemoe=GraniteMoe
    granitemoeshared=GraniteMoeShared jais2=Jais2 olmoe=Olmoe
SEQ_CLS: hubert=Hubert wav2vec2=Wav2Vec2
SEQ_CLS CAUSAL_LM: hunyuan_v1_dense=HunYuanDenseV1 olmo=Olmo olmo2=Olmo2 olmo3=Olmo3 phimoe=Phimoe
SEQ_CLS TOKEN_CLS: gte=Gte new=Gte nomic_bert=NomicBert
TOKEN_CLS CAUSAL_LM: apertus=Apertus
SEQ_CLS QUESTION_ANS CAUSAL_LM: gptj=GPTJ opt=OPT
SEQ_CLS TOKEN_CLS CAUSAL_LM: gemma=Gemma gemma2=Gemma2 glm=Glm glm4=Glm4 gpt_oss=GptOss helium=Helium
    phi=Phi phi3=Phi3 stablelm=StableLm starcoder2=Starcoder2
SEQ_CLS TOKEN_CLS QUESTION_ANS: albert=Albert deberta-v2=DebertaV2 distilbert=DistilBert
    jina_embeddings_v3=JinaEmbeddingsV3 modernbert=ModernBert mpnet=MPNet
SEQ_CLS QUESTION_ANS CAUSAL_LM SEQ_2_SEQ_LM: bart=Bart mbart=MBart
SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM: arcee=Arcee bloom=Bloom camembert=Camembert electra=Electra
    exaone4=Exaone4 falcon=Falcon gpt_neox=GPTNeoX llama=Llama ministral=Ministral ministral3=Ministral3
    mistral=Mistral mixtral=Mixtral nemotron=Nemotron qwen2=Qwen2 qwen2_moe=Qwen2Moe qwen3=Qwen3
    qwen3_moe=Qwen3Moe RefinedWeb=Falcon RefinedWebModel=Falcon roberta=Roberta seed_oss=SeedOss
    smollm3=SmolLM3 xlm-roberta=XLMRoberta
SEQ_CLS TOKEN_CLS QUESTION_ANS SEQ_2_SEQ_LM: mt5=MT5 t5=T5 umt5=UMT5
SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM=BertLMHeadModel: bert=Bert
FEATURE_EXTRACTION=ColPaliForRetrieval: colpali=ColPali
FEATURE_EXTRACTION=ColQwen2ForRetrieval: colqwen2=ColQwen2
SEQ_CLS CAUSAL_LM=Gemma3ForConditionalGeneration: gemma3=Gemma3
SEQ_CLS CAUSAL_LM=Gemma3ForCausalLM: gemma3_text=Gemma3Text
SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM=GPT2LMHeadModel: gpt2=GPT2
CAUSAL_LM FEATURE_EXTRACTION=Llama4ForConditionalGeneration: llama4=Llama4
CAUSAL_LM=Llama4ForCausalLM: llama4_text=Llama4Text
CAUSAL_LM SEQ_2_SEQ_LM=MarianMTModel: marian=Marian
SEQ_CLS=WhisperForAudioClassification CAUSAL_LM SEQ_2_SEQ_LM: whisper=Whisper
"""
"""Tasks, and the model types that have a class for each of them with the beginning of their class names.

Every type also has FEATURE_EXTRACTION. A class with an unusual name stands behind its task.
"""


def _read(table: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for line in re.sub(r"\n +", " ", table.strip()).splitlines():
        tasks, _, types = line.partition(": ")
        names = dict(word.partition("=")[::2] for word in ("FEATURE_EXTRACTION", *tasks.split()))
        for kind, beginning in (word.split("=") for word in types.split()):
            found[kind] = {task: name or beginning + TASKS[task] for task, name in names.items()}
    return found


CLASSES = _read(_TABLE)
"""For every model type, the class for each task."""

PREFIXES = dict.fromkeys(
    (
        "LlamaForQuestionAnswering",
        "Qwen2ForQuestionAnswering",
        "Qwen3ForQuestionAnswering",
        "Qwen3MoeForQuestionAnswering",
    ),
    "transformer.",
)
"""Classes with another prefix before the base model's names than the other classes of their type."""

ENCODERS = frozenset(
    {
        "MT5ForTokenClassification",
        "T5ForTokenClassification",
        "UMT5ForTokenClassification",
        "WhisperForAudioClassification",
    }
)
"""Classes that have only the encoder of an encoder-decoder type."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_CLASS = re.compile(r"(?P<beginning>[A-Za-z][A-Za-z0-9_]*?)(For[A-Z]\w*|LMHeadModel|MTModel|Model)")


def class_for(adapter: Mapping[str, Any], base: Mapping[str, Any]) -> str | None:
    """Return the class that an adapter was trained in, from both configurations, or None if there is none.

    PEFT stores the class of the base in ``auto_mapping`` if no task type was given.
    """
    own = named_in(base)
    info = adapter.get("auto_mapping")
    if isinstance(info, Mapping) and info.get("base_model_class") is not None:
        return _checked(info["base_model_class"], base)
    task = adapter.get("task_type")
    if not task:
        return own
    if not isinstance(task, str) or task not in TASKS:
        return None
    classes = _classes(base)
    if classes is not None and task in classes:
        return classes[task]
    if own is not None and own.endswith(TASKS[task]):
        return own
    found = _CLASS.fullmatch(own or "") if classes is None else None
    return found["beginning"] + TASKS[task] if found else None


def _checked(name: object, base: Mapping[str, Any]) -> str | None:
    """Return a class name from a configuration if it can be a class of this model type."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    if (classes := _classes(base)) is None or name in classes.values():
        return name
    return name if name.startswith(_beginning(classes)) else None


def _beginning(classes: Mapping[str, str]) -> str:
    """Return what the names of all classes of a model type begin with."""
    return classes["FEATURE_EXTRACTION"].removesuffix(TASKS["FEATURE_EXTRACTION"])


def _classes(config: Mapping[str, Any]) -> Mapping[str, str] | None:
    kind = config.get("model_type")
    return CLASSES.get(kind) if isinstance(kind, str) else None


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
    ours, theirs = CLASSES.get(str(own)), CLASSES.get(str(other))
    if own == other or ours is None or theirs is None or name in theirs.values():
        return name
    task = next((task for task, known in ours.items() if known == name and task in theirs), None)
    if task is not None:
        return theirs[task]
    before, after = _beginning(ours), _beginning(theirs)
    return after + name.removeprefix(before) if name.startswith(before) else name


def class_prefix(class_name: str, config: Mapping[str, Any], known: tuple[str, ...]) -> str:
    """Return the prefix that a class puts before the names of the base model."""
    by_type = f"{config.get('model_type')}.".replace("-", "_")
    usual = by_type if by_type in known else next(iter(known), "")
    return PREFIXES.get(class_name, usual)


def with_prefix(stored: TensorPieces, prefix: str, known: tuple[str, ...]) -> TensorPieces:
    """Rename a tensor of the base model to a class's prefix, unless its own prefix is equivalent."""
    before = next((one for one in known if stored.names[0].startswith(one)), "")
    alike = before and not {prefix, before} & set(PREFIXES.values())
    return stored if alike else stored.renamed(prefix, before)
