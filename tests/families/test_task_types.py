"""Adapters with task types: merged, each becomes a model of a class that its library has, and that loads it."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from small_models import CASES
from tests.transport.test_folded_adapters import adapted, lora
from transfusion.architecture.naming import Naming
from transfusion.data.dataset import Dataset
from transfusion.errors import AdapterError
from transfusion.evaluation.sweep import sweep
from transfusion.families import all_families
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel, largest_difference
from transfusion.running.probes.inputs import random_inputs, run_model
from transfusion.transport.adapters.classes import class_for, classes_of
from transfusion.transport.transport import merge, transport

BESIDE = ("head", "pooler", "projector", "classification_head", "classifier")
"""Parts of heads that PEFT does not save unless it is told to."""
SAMPLE = {
    "bert": ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS"),
    "bert-pretraining": ("TOKEN_CLS",),
    "roberta": ("SEQ_CLS",),
    "distilbert": ("SEQ_CLS", "TOKEN_CLS"),
    "gpt2": ("SEQ_CLS", "CAUSAL_LM"),
    "llama": ("SEQ_CLS", "QUESTION_ANS"),
    "t5": ("SEQ_CLS", "TOKEN_CLS"),
    "modernbert-masked": ("SEQ_CLS",),
    "bart": ("SEQ_2_SEQ_LM",),
    "vit": ("FEATURE_EXTRACTION",),
    "hubert": ("SEQ_CLS",),
}
SMALLER = ("umt5-encoder", "clip-classifier", "siglip-classifier", "siglip2-classifier", "whisper-classifier")
"""Bases that lack what the classes of most tasks have."""


@cache
def told_by_the_library() -> dict[str, dict[str, str]]:
    """For each task, the class that transformers itself has for a type of model."""
    from transformers.models.auto import modeling_auto as auto

    return {
        "SEQ_CLS": {
            **auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
            **auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        },
        "TOKEN_CLS": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        "QUESTION_ANS": auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
        "CAUSAL_LM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "SEQ_2_SEQ_LM": {
            **auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
            **auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        },
        "FEATURE_EXTRACTION": auto.MODEL_MAPPING_NAMES,
    }


NOT_IN_THE_LIBRARY = {
    *("siglip_text_model", "siglip2_text_model", "colpali", "colqwen2"),
    "vision-encoder-decoder",
}
"""Types that no automatic class of the library knows."""


def test_a_class_of_every_type_is_one_of_the_library():
    import peft
    import transformers

    info = told_by_the_library()
    assert info.keys() == {task.value for task in peft.TaskType}
    types = {kind for one in all_families() if one.library == "transformers" for kind in one.model_types}
    assert {kind for kind in types if not classes_of(kind)} == NOT_IN_THE_LIBRARY
    for kind in types & info["FEATURE_EXTRACTION"].keys():
        assert classes_of(kind) == {task: names[kind] for task, names in info.items() if kind in names}
    for name in (name for kind in types for name in classes_of(kind).values()):
        assert issubclass(getattr(transformers, name), transformers.PreTrainedModel)


# ── every task on every family ───────────────────────────────────────────────────────────────


def trained(base: Path, folder: Path, class_name: str, task: str) -> Path:
    """A LoRA of this task on some layers, with every part of its head; PEFT saves most of them itself."""
    import peft
    import transformers

    torch.manual_seed(0)
    labels = 2 if task == "QUESTION_ANS" else 5
    load = getattr(transformers, class_name).from_pretrained
    model, info = load(base, num_labels=labels, output_loading_info=True)
    new = {word for name in info["missing_keys"] for word in name.split(".")}
    beside = [name for name in BESIDE if name in new]
    linear = (nn.Linear, transformers.pytorch_utils.Conv1D)
    inside = [name for name, one in model.named_modules() if isinstance(one, linear)]
    target = next(name for name in inside if any(word.isdigit() for word in name.split(".")))
    settings = peft.LoraConfig(r=2, task_type=task, target_modules=[target], modules_to_save=beside or None)
    tuned = peft.get_peft_model(model, settings)
    for _, parameter in tuned.named_parameters():
        if parameter.requires_grad:
            parameter.data = 0.2 * torch.randn(parameter.shape)
    tuned.save_pretrained(folder)
    return folder


def filled(module: nn.Module, base: Path) -> nn.Module:
    """With the base's tensors; the library finds none of them where a class has another prefix than others."""
    origin = Model.open(base)
    naming = Naming(origin.family, live=True)
    for name, parameter in module.named_parameters():
        if (ours := naming.canonical(name)) in origin.names:
            parameter.data = origin.read(ours)
    return module


def check(case: str, task: str, made, place: Path) -> None:
    import peft
    import transformers

    a, b = made(case, 1), made(case, 2)
    kind = json.loads((a / "config.json").read_text())["model_type"]
    class_name = told_by_the_library()[task][kind]
    adapter = trained(a, place / "adapter", class_name, task)
    full = transport(adapter, base=a, onto=b, method="naive", full=True).save(place / "full")
    config = json.loads((full / "config.json").read_text())
    (named,) = config["architectures"]
    found, info = getattr(transformers, named).from_pretrained(full, output_loading_info=True)
    # What only training by masks needs is B's, and the library leaves it out.
    info["unexpected_keys"] = {name for name in info["unexpected_keys"] if not name.endswith(".mask_token")}
    assert not any(info.values()), info
    reopened = Model.open(full)
    live = LiveModel.of(reopened)
    if json.loads((full / "transfusion.json").read_text())["carried"]:
        assert named == class_name
        if task != "FEATURE_EXTRACTION":  # which has no labels: a base's own number stays as it is
            assert found.config.num_labels == (2 if task == "QUESTION_ANS" else 5)
    else:
        assert named == json.loads((b / "config.json").read_text())["architectures"][0]
    if named == class_name:  # then PEFT can tell what the adapter does on B
        own = filled(getattr(transformers, named).from_pretrained(b, num_labels=found.config.num_labels), b)
        kept = transport(adapter, base=a, onto=b, method="naive").save(place / "kept")
        wanted = peft.PeftModel.from_pretrained(own, kept).double().eval().get_base_model()
        inputs = random_inputs(reopened.family, found.config.to_dict())
        shown = run_model(wanted, reopened.family, inputs)
        assert largest_difference(shown, run_model(live.module, reopened.family, inputs)) < 2e-4


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize(("case", "task"), [(case, task) for case, tasks in SAMPLE.items() for task in tasks])
def test_a_merged_adapter_is_a_model_of_its_class(case, task, made, tmp_path):
    check(case, task, made, tmp_path)


def first_classes() -> list[str]:
    """Two cases of every type of model that have all of it, of different classes and without labels."""
    found: dict[str, dict[str, str]] = {}
    for case in CASES.values():
        class_name, config, *_ = (*getattr(case.make, "args", ()), "", "")
        of_type = found.setdefault(config, {})
        odd = not config or case.name in SMALLER or class_name.endswith(("Classification", "Answering"))
        if not odd and len(of_type) < 2:
            of_type.setdefault(class_name, case.name)
    return [name for of_type in found.values() for name in of_type.values()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PEFT has opinions on what is trained here
@pytest.mark.parametrize("case", first_classes())
def test_so_it_is_for_every_task_on_every_family(case, made, tmp_path):
    kind = json.loads((made(case) / "config.json").read_text())["model_type"]
    for task, names in told_by_the_library().items():
        if kind in names:
            (tmp_path / task).mkdir()
            check(case, task, made, tmp_path / task)


# ── what a merged adapter is good for ────────────────────────────────────────────────────────


@pytest.fixture
def classifying(made, tmp_path):
    """A LoRA with five labels for a bare BERT, as the demo makes one."""
    return (
        made("bert", 1),
        made("bert", 2),
        trained(made("bert", 1), tmp_path / "adapter", "BertForSequenceClassification", "SEQ_CLS"),
    )


def test_what_was_merged_is_taken_again_by_every_verb(classifying, cli, tmp_path):
    a, b, adapter = classifying
    full, again = tmp_path / "full", tmp_path / "again"
    way = ("--method", "naive", "-o")
    code, _, err = cli("transport", adapter, "--base", a, "--onto", b, "--full", *way, full)
    assert code == 0, err
    code, out, err = cli("inspect", full)
    assert code == 0, err
    assert "classifier" in out
    assert cli("verify", full)[0] in (0, 2)
    code, _, err = cli("transport", full, "--base", b, "--onto", a, *way, again)
    assert code == 0, err
    assert json.loads((again / "config.json").read_text())["architectures"] == [
        "BertForSequenceClassification"
    ]


@pytest.mark.parametrize("task", ["SEQ_CLS", "TOKEN_CLS"])
def test_a_sweep_of_a_classifying_adapter(task, made, tmp_path):
    """The base has a pooler, which a classifier of tokens has no use for."""
    a, b = made("bert", 1), made("bert", 2)
    class_name = classes_of("bert")[task]
    adapter = trained(a, tmp_path / "adapter", class_name, task)
    pi = align(a, b, advice=False)
    if task == "TOKEN_CLS":  # which no meter measures
        module = transport(adapter, base=a, onto=b, via=pi, full=True).module()
        assert type(module).__name__ == class_name
        return
    ids = torch.randint(0, 30, (15, 7), generator=torch.Generator().manual_seed(1))
    data = Dataset.of("made up", {"input_ids": ids}, torch.arange(15) % 5)
    found = sweep(adapter, base=a, onto=b, via=pi, data=data, alphas=[0.5, 1])
    assert [curve.method for curve in found.curves] == [None, "auto"]
    losses = {point.task.loss for curve in found.curves for point in curve.points}
    assert len(losses) == 4


def test_labels_are_as_many_as_the_head_has(made, tmp_path):
    """Those of the base, and what its own head was for, do not stay."""
    a, b = (Path(shutil.copytree(made("bert", seed), tmp_path / str(seed))) for seed in (1, 2))
    for base in (a, b):
        config = json.loads((base / "config.json").read_text())
        assert len(config["id2label"]) == 7
        config |= {"num_labels": 7, "problem_type": "multi_label_classification"}
        (base / "config.json").write_text(json.dumps(config))
    adapter = trained(made("bert", 1), tmp_path / "adapter", "BertForSequenceClassification", "SEQ_CLS")
    full = transport(adapter, base=a, onto=b, method="naive", full=True).save(tmp_path / "full")
    config = json.loads((full / "config.json").read_text())
    assert list(config["id2label"]) == ["0", "1", "2", "3", "4"]
    assert sorted(config["label2id"].values()) == [0, 1, 2, 3, 4]
    assert not config.keys() & {"num_labels", "problem_type"}


@pytest.mark.parametrize("case", ["bert-classifier", "distilbert-classifier"])
def test_a_base_with_labels_of_its_own_is_no_obstacle(case, made, tmp_path):
    """The adapter's head has another number of labels, under another name or the same."""
    import transformers

    a, b = made(case, 1), made(case, 2)
    kind = json.loads((a / "config.json").read_text())["model_type"]
    class_name = classes_of(kind)["TOKEN_CLS"]
    model = getattr(transformers, class_name)
    settings = {"target_modules": r".*0.*(query|q_lin)", "modules_to_save": ["classifier"]}
    config = lora(task_type="TOKEN_CLS", **settings)
    adapter = adapted(
        a, tmp_path / "adapter", config, into=class_name, num_labels=5, ignore_mismatched_sizes=True
    )
    full = transport(adapter, base=a, onto=b, method="naive", full=True).save(tmp_path / "full")
    found, info = model.from_pretrained(full, output_loading_info=True)
    assert not any(info.values()), info
    assert found.config.num_labels == 5


# ── what cannot be merged ────────────────────────────────────────────────────────────────────


def info(adapter: Path, **settings: object) -> Path:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return adapter


@pytest.fixture
def seeing(made, tmp_path):
    """A LoRA with a head for a bare ViT."""
    config = lora(target_modules=["q_proj"], modules_to_save=["classifier"])
    into = "ViTForImageClassification"
    return made("vit", 1), made("vit", 2), adapted(made("vit", 1), tmp_path / "adapter", config, into=into)


@pytest.mark.parametrize(
    "settings",
    [
        {"task_type": "SEQ_CLS", "auto_mapping": None},
        {"task_type": "CAUSAL_LM", "auto_mapping": None},
        {"task_type": "COOKING", "auto_mapping": None},
        {"auto_mapping": {"base_model_class": "pipeline", "parent_library": "transformers"}},
        {"auto_mapping": {"base_model_class": "os.system('id')"}},
    ],
    ids=str,
)
def test_a_task_that_a_type_has_no_class_for_is_refused_early(settings, seeing, monkeypatch):
    a, b, adapter = seeing
    info(adapter, **settings)
    monkeypatch.setattr("transfusion.matching.align.align", lambda *_, **__: pytest.fail("aligned"))
    message = r"was trained for .*, and a model of type 'vit' has no such class: classifier.bias, classifier"
    with pytest.raises(AdapterError, match=message):
        transport(adapter, base=a, onto=b, full=True)
    with pytest.raises(AdapterError, match=message):
        merge([adapter], base=a, onto=b, full=True)


def test_such_an_adapter_moves_as_an_adapter(seeing, tmp_path):
    a, b, adapter = seeing
    info(adapter, task_type="SEQ_CLS", auto_mapping=None)
    moved = transport(adapter, base=a, onto=b, method="naive").save(tmp_path / "moved")
    assert json.loads((moved / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"


def test_the_class_that_peft_wrote_down_is_used(seeing, tmp_path):
    a, b, adapter = seeing
    full = transport(adapter, base=a, onto=b, method="naive", full=True).save(tmp_path / "full")
    assert json.loads((full / "config.json").read_text())["architectures"] == ["ViTForImageClassification"]


def test_a_head_that_reads_through_what_b_lacks_is_refused(made, tmp_path):
    a, b = made("bert", 1), Path(shutil.copytree(made("bert", 2), tmp_path / "b"))
    tensors = load_file(b / "model.safetensors")
    left = {name: one for name, one in tensors.items() if not name.startswith("pooler.")}
    save_file(left, b / "model.safetensors", {"format": "pt"})
    adapter = trained(a, tmp_path / "adapter", "BertForSequenceClassification", "SEQ_CLS")
    with pytest.raises(AdapterError, match=r"reads through pooler.dense.bias, pooler.dense.weight, which"):
        transport(adapter, base=a, onto=b, full=True, method="naive")


@pytest.mark.parametrize(
    ("base", "task", "wanted"),
    [
        ({"model_type": "mine", "architectures": ["MineForCausalLM"]}, "SEQ_CLS", "MineForSequenceClassification"),
        ({"model_type": "mine", "architectures": ["MineLMHeadModel"]}, "TOKEN_CLS", "MineForTokenClassification"),
        ({"model_type": "mine", "architectures": ["MineModel"]}, "SEQ_2_SEQ_LM", "MineForConditionalGeneration"),
        ({"model_type": "mine", "architectures": ["MineForMaskedLM"]}, "FEATURE_EXTRACTION", "MineModel"),
        ({"model_type": "mine", "architectures": ["Mine"]}, "SEQ_CLS", None),
        ({"model_type": "mine"}, "SEQ_CLS", None),
        ({"model_type": "gpt2", "architectures": 5}, "CAUSAL_LM", "GPT2LMHeadModel"),
        ({"model_type": "gpt2"}, "SEQ_2_SEQ_LM", None),
        ({"model_type": "nomic_bert", "architectures": ["NomicBertForQuestionAnswering"]}, "QUESTION_ANS", "NomicBertForQuestionAnswering"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, None, "BertForMaskedLM"),
    ],
)  # fmt: skip
def test_the_class_of_a_type_that_nobody_knows_follows_from_its_own(base, task, wanted):
    assert class_for({"task_type": task}, base) == wanted
