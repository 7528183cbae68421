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
albert                 Albert               SEQ_CLS TOKEN_CLS QUESTION_ANS
apertus                Apertus              TOKEN_CLS CAUSAL_LM
arcee                  Arcee                SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
bart                   Bart                 SEQ_CLS QUESTION_ANS CAUSAL_LM SEQ_2_SEQ_LM
beit                   Beit
bert                   Bert                 SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM=BertLMHeadModel
bloom                  Bloom                SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
camembert              Camembert            SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
clip                   CLIP
clip_text_model        CLIPText
clip_vision_model      CLIPVision
cohere                 Cohere               CAUSAL_LM
cohere2                Cohere2              CAUSAL_LM
colpali                ColPali              FEATURE_EXTRACTION=ColPaliForRetrieval
colqwen2               ColQwen2             FEATURE_EXTRACTION=ColQwen2ForRetrieval
cwm                    Cwm                  CAUSAL_LM
data2vec-vision        Data2VecVision
deberta-v2             DebertaV2            SEQ_CLS TOKEN_CLS QUESTION_ANS
deit                   DeiT
dinov2                 Dinov2
dinov2_with_registers  Dinov2WithRegisters
dinov3_vit             DINOv3ViT
distilbert             DistilBert           SEQ_CLS TOKEN_CLS QUESTION_ANS
electra                Electra              SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
ernie4_5               Ernie4_5             CAUSAL_LM
exaone4                Exaone4              SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
falcon                 Falcon               SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
gemma                  Gemma                SEQ_CLS TOKEN_CLS CAUSAL_LM
gemma2                 Gemma2               SEQ_CLS TOKEN_CLS CAUSAL_LM
gemma3                 Gemma3               SEQ_CLS CAUSAL_LM=Gemma3ForConditionalGeneration
gemma3_text            Gemma3Text           SEQ_CLS CAUSAL_LM=Gemma3ForCausalLM
glm                    Glm                  SEQ_CLS TOKEN_CLS CAUSAL_LM
glm4                   Glm4                 SEQ_CLS TOKEN_CLS CAUSAL_LM
gpt2                   GPT2                 SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM=GPT2LMHeadModel
gpt_neox               GPTNeoX              SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
gpt_oss                GptOss               SEQ_CLS TOKEN_CLS CAUSAL_LM
gptj                   GPTJ                 SEQ_CLS QUESTION_ANS CAUSAL_LM
granite                Granite              CAUSAL_LM
granitemoe             GraniteMoe           CAUSAL_LM
granitemoeshared       GraniteMoeShared     CAUSAL_LM
gte                    Gte                  SEQ_CLS TOKEN_CLS
helium                 Helium               SEQ_CLS TOKEN_CLS CAUSAL_LM
hubert                 Hubert               SEQ_CLS
hunyuan_v1_dense       HunYuanDenseV1       SEQ_CLS CAUSAL_LM
idefics3               Idefics3
jais2                  Jais2                CAUSAL_LM
jina_embeddings_v3     JinaEmbeddingsV3     SEQ_CLS TOKEN_CLS QUESTION_ANS
llama                  Llama                SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
llama4                 Llama4               CAUSAL_LM FEATURE_EXTRACTION=Llama4ForConditionalGeneration
llama4_text            Llama4Text           CAUSAL_LM=Llama4ForCausalLM
llava                  Llava
marian                 Marian               CAUSAL_LM SEQ_2_SEQ_LM=MarianMTModel
mbart                  MBart                SEQ_CLS QUESTION_ANS CAUSAL_LM SEQ_2_SEQ_LM
ministral              Ministral            SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
ministral3             Ministral3           SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
mistral                Mistral              SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
mistral3               Mistral3
mixtral                Mixtral              SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
modernbert             ModernBert           SEQ_CLS TOKEN_CLS QUESTION_ANS
mpnet                  MPNet                SEQ_CLS TOKEN_CLS QUESTION_ANS
mt5                    MT5                  SEQ_CLS TOKEN_CLS QUESTION_ANS SEQ_2_SEQ_LM
nemotron               Nemotron             SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
new                    Gte                  SEQ_CLS TOKEN_CLS
nomic_bert             NomicBert            SEQ_CLS TOKEN_CLS
olmo                   Olmo                 SEQ_CLS CAUSAL_LM
olmo2                  Olmo2                SEQ_CLS CAUSAL_LM
olmo3                  Olmo3                SEQ_CLS CAUSAL_LM
olmoe                  Olmoe                CAUSAL_LM
opt                    OPT                  SEQ_CLS QUESTION_ANS CAUSAL_LM
paligemma              PaliGemma
phi                    Phi                  SEQ_CLS TOKEN_CLS CAUSAL_LM
phi3                   Phi3                 SEQ_CLS TOKEN_CLS CAUSAL_LM
phimoe                 Phimoe               SEQ_CLS CAUSAL_LM
pixtral                PixtralVision
qwen2                  Qwen2                SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
qwen2_5_vl             Qwen2_5_VL
qwen2_moe              Qwen2Moe             SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
qwen2_vl               Qwen2VL
qwen3                  Qwen3                SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
qwen3_moe              Qwen3Moe             SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
qwen3_vl               Qwen3VL
RefinedWeb             Falcon               SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
RefinedWebModel        Falcon               SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
roberta                Roberta              SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
sam                    Sam
sam_vision_model       SamVision
seed_oss               SeedOss              SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
siglip                 Siglip
siglip2                Siglip2
siglip2_text_model     Siglip2Text
siglip2_vision_model   Siglip2Vision
siglip_text_model      SiglipText
siglip_vision_model    SiglipVision
smollm3                SmolLM3              SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
smolvlm                SmolVLM
stablelm               StableLm             SEQ_CLS TOKEN_CLS CAUSAL_LM
starcoder2             Starcoder2           SEQ_CLS TOKEN_CLS CAUSAL_LM
swin                   Swin
swinv2                 Swinv2
t5                     T5                   SEQ_CLS TOKEN_CLS QUESTION_ANS SEQ_2_SEQ_LM
umt5                   UMT5                 SEQ_CLS TOKEN_CLS QUESTION_ANS SEQ_2_SEQ_LM
vit                    ViT
vit_mae                ViTMAE
wav2vec2               Wav2Vec2             SEQ_CLS
whisper                Whisper              SEQ_CLS=WhisperForAudioClassification CAUSAL_LM SEQ_2_SEQ_LM
xlm-roberta            XLMRoberta           SEQ_CLS TOKEN_CLS QUESTION_ANS CAUSAL_LM
"""
"""For every model type: the beginning of its class names, and the tasks that it has a class for."""


def _read(line: str) -> tuple[str, dict[str, str]]:
    kind, beginning, *tasks = line.split()
    info = dict(word.partition("=")[::2] for word in ("FEATURE_EXTRACTION", *tasks))
    return kind, {task: name or beginning + TASKS[task] for task, name in info.items()}


CLASSES = dict(_read(line) for line in _TABLE.strip().splitlines())
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
