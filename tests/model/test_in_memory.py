"""Models in memory: modules and state dicts go in, modules come out, and nothing differs from files."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import transfusion
from small_models import CASES, FIRST, OFTEN, PRINCIPAL, VIT, often, transformers_model
from transfusion.data.dataset import Dataset
from transfusion.errors import ArchitectureError, CheckpointError, LayoutError, MismatchError
from transfusion.files.checkpoint import CONFIGS, Checkpoint
from transfusion.matching.align import align
from transfusion.model.in_memory import configuration
from transfusion.model.model import Model
from transfusion.running.building import build, model_of
from transfusion.running.live_model import LiveModel, largest_difference

CONTRADICTED = ("mt5-untied", "umt5-untied", "t5-untied-as-published")
"""Cases whose files say what their modules do not: that two matrices of words are not tied."""
RENAMED = ("esm", "esm-masked", "esm-classifier", "esm-tokens")
"""Cases in whose files transformers 5 gives the table of angles another name than in memory."""

MOVED = (
    *PRINCIPAL,
    "open_clip-custom",
    "timm-vit",
    "timm-vit-scaled",
    "mixtral-tied",  # experts, which files keep apart
    "nomic-bert-masked",  # queries, keys and values, which files keep together
    "dinov2-gated",
    "t5-still-tied",
)


def config_in(folder: Path) -> dict[str, Any]:
    return json.loads(next(folder / name for name in CONFIGS if (folder / name).exists()).read_text())


def opened(module: nn.Module, folder: Path) -> Model:
    """A module as a model, with the configuration of its folder if the library keeps none in modules."""
    return Model.open(module, config=None if configuration(module) else config_in(folder))


def tuned(module: nn.Module) -> nn.Module:
    """A copy, every number a little changed."""
    copy, generator = deepcopy(module), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return copy


def contents(model: Model) -> dict[str, torch.Tensor]:
    return {name: model.read(name) for name in model.names}


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) and one[name].dtype is two[name].dtype for name in one)


class Three:
    """A, B and a fine-tune of A: as modules, as models in memory, and as folders."""

    def __init__(self, case: str, root: Path) -> None:
        made = CASES[case]
        a, b = made.build(1), made.build(2)
        self.modules = {"a": a, "b": b, "tuned": tuned(a)}
        self.folders = {role: made.store(module, root / role) for role, module in self.modules.items()}
        self.models = {role: opened(module, self.folders[role]) for role, module in self.modules.items()}
        self.pi = align(self.folders["a"], self.folders["b"], method="random", residual="tied")

    def moved(self, which: dict[str, Any], **more: Any) -> Any:
        return transfusion.transport(which["tuned"], base=which["a"], onto=which["b"], via=self.pi, **more)


def first_and_last() -> list[str]:
    """Two cases of every family."""
    whole = [name for name in CASES if name not in (*CONTRADICTED, *RENAMED)]
    last = {CASES[name].family: name for name in whole}
    first = {CASES[name].family: name for name in reversed(whole)}
    return sorted({*first.values(), *last.values(), *MOVED})


@pytest.mark.parametrize("case", often(first_and_last(), [*MOVED, *(FIRST[family] for family in OFTEN)]))
def test_a_module_is_the_model_that_its_library_saves(case, made):
    module = CASES[case].build(1)
    held, stored = opened(module, made(case)), Model.open(made(case))
    assert held.architecture.tensors == stored.architecture.tensors
    assert held.names.keys() == stored.names.keys()
    assert held.fingerprint == stored.fingerprint
    assert held.label == f"{type(module).__name__} in memory"


@pytest.mark.parametrize(
    "case",
    often(
        MOVED,
        [
            "bert-pretraining",
            "open_clip",
            "gpt2",
            "timm-vit",
            "mixtral-tied",
            "nomic-bert-masked",
            "t5-still-tied",
        ],
    ),
)
def test_modules_are_moved_as_their_folders_are(case, tmp_path):
    """The same tensors, and a module that computes what the saved folder computes."""
    three = Three(case, tmp_path)
    here, there = three.moved(three.models), three.moved(three.folders)
    assert_same(
        contents(Model.open(here.state_dict(), config=here.config)),
        contents(Model.open(there.state_dict(), config=there.config)),
    )
    folder = there.save(tmp_path / "moved")
    loaded = LiveModel.of(Model.open(folder))
    as_loaded = build(Model.open(folder), torch.float32)
    for module in (here.module(), there.module()):
        assert type(module) is type(three.modules["tuned"])
        assert not module.training
        assert_same(module.state_dict(), as_loaded.state_dict())
        alone = LiveModel(module.double(), loaded.family, loaded.architecture, loaded.inputs)
        assert largest_difference(loaded.outputs(), alone.outputs()) < 1e-5


@pytest.mark.parametrize("case", ["vit-classifier", "mixtral", "nomic-bert", "open_clip", "timm-vit"])
def test_what_was_moved_in_memory_can_be_saved_and_loads_in_its_library(case, tmp_path):
    three = Three(case, tmp_path)
    moved = three.moved(three.models)
    folder = moved.save(tmp_path / "moved")
    if case == "timm-vit":  # timm's modules do not know with which arguments they were made
        (folder / "config.json").write_text((three.folders["b"] / "config.json").read_text())
    assert_same(build(Model.open(folder), torch.float32).state_dict(), moved.module().state_dict())


def test_from_checkpoints_to_a_module_in_two_lines(made, tmp_path):
    import transformers

    three = Three("llama", tmp_path)
    folders = three.folders
    moved = transfusion.transport(
        folders["tuned"], base=folders["a"], onto=folders["b"], force_unrelated=True
    )
    model = moved.module()
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert model.config.vocab_size == 31
    assert set(moved.state_dict()) == set(model.state_dict())


def test_from_modules_to_a_module(tmp_path):
    modules = Three("mistral-tied", tmp_path).modules
    before = {role: deepcopy(module.state_dict()) for role, module in modules.items()}
    bases = {"base": modules["a"], "onto": modules["b"]}
    model = transfusion.transport(modules["tuned"], **bases, force_unrelated=True).module()
    assert model.lm_head.weight is model.model.embed_tokens.weight, "what is tied stays tied"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for role, module in modules.items():
        assert_same(dict(module.state_dict()), dict(before[role]))


def test_the_tensors_fit_the_module_that_b_is(tmp_path):
    """They have the names that B's module has, which are not those of its files."""
    three = Three("vit-classifier", tmp_path)
    moved = three.moved(three.modules)
    b = deepcopy(three.modules["b"])
    b.load_state_dict(moved.state_dict())
    assert_same(b.state_dict(), moved.module().state_dict())
    assert set(b.state_dict()) != set(three.moved(three.folders).state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_module_has_the_type_of_its_tensors(dtype, tmp_path):
    module = Three("gpt2", tmp_path)
    assert {p.dtype for p in module.moved(module.models, dtype=dtype).module().parameters()} == {dtype}


def test_a_fine_tune_with_a_head_gives_a_module_with_that_head(tmp_path):
    """B's module has no head, and another prefix: the output is of the fine-tune's class."""
    bases = [CASES["bert"].build(seed) for seed in (1, 2)]
    classifier = CASES["bert-classifier"].build(3)
    classifier.bert.load_state_dict(tuned(bases[0]).state_dict())
    moved = transfusion.transport(classifier, base=bases[0], onto=bases[1], method="naive")
    model = moved.module()
    assert type(model) is type(classifier)
    assert torch.equal(model.classifier.weight, classifier.classifier.weight)


def test_every_verb_takes_modules(tmp_path):
    three = Three("vit", tmp_path)
    a = three.modules["a"]
    assert transfusion.verify(a, via=three.pi).equal
    applied = transfusion.apply(three.pi, a)
    assert applied.state_dict().keys() == a.state_dict().keys()
    info = transfusion.inspect(a)
    assert (info["model"], info["files"]) == ("ViTModel in memory", [])
    images = {"pixel_values": torch.randn(4, 3, 12, 12)}
    classifiers = [CASES["vit-classifier"].build(seed) for seed in (1, 2)]
    data = Dataset.of("images", images, torch.arange(4))
    assert len(transfusion.barrier(*classifiers, data=data, points=2).curves["vanilla"].points) == 2
    assert transfusion.inspect(dict(a.state_dict()), config=config_in(three.folders["a"]))["family"] == "vit"


@pytest.mark.filterwarnings("ignore")  # of torch's own
def test_wrappers_around_a_module_do_not_matter():
    module = CASES["gpt2"].build(1)
    held = Model.open(nn.DataParallel(module))
    assert held.label == "GPT2LMHeadModel in memory"
    assert held.fingerprint == Model.open(torch.compile(module)).fingerprint == Model.open(module).fingerprint


def test_a_class_of_ones_own_is_made_again(tmp_path):
    import transformers

    class Mine(transformers.ViTModel):
        pass

    config = transformers.ViTConfig(**VIT)
    a, b = Mine(config), Mine(config)
    moved = transfusion.transport(tuned(a), base=a, onto=b, method="naive", trust_base=True)
    assert type(moved.module()) is Mine


def test_a_clip_of_open_clip_knows_its_heads_without_a_configuration(made):
    """Its tensors alone would not tell: the heads are not of 64 units."""
    for case in ("open_clip", "open_clip-custom"):
        module = CASES[case].build(1)
        assert Model.open(module).architecture == Model.open(made(case)).architecture
    a, b = (CASES["open_clip"].build(seed) for seed in (1, 2))
    model = transfusion.transport(tuned(a), base=a, onto=b, method="naive").module()
    assert type(model) is type(b)


def test_a_state_dict_with_a_configuration_is_a_model(made):
    folder = made("llama")
    state = {name: Model.open(folder).checkpoint.read(name) for name in Model.open(folder).checkpoint.tensors}
    for config in (config_in(folder), folder / "config.json", str(folder / "config.json")):
        assert Model.open(state, config=config).fingerprint == Model.open(folder).fingerprint
    assert Model.open(folder / "model.safetensors", config=config_in(folder)).family.name == "llama"


def test_names_and_shapes_tell_the_family_of_a_state_dict_too():
    """Of an MPNet even the number of heads; of a ViT not."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
    module = transformers_model("MPNetModel", "MPNetConfig", **sizes, vocab_size=31)
    held = Model.open(module.state_dict())
    assert held.family.name == "mpnet"
    assert held.label == "a state dict in memory"
    other = transformers_model("ViTModel", "ViTConfig", **sizes, image_size=8, patch_size=4)
    with pytest.raises(ArchitectureError, match="a state dict in memory: a vit by its tensors' names, but"):
        Model.open(other.state_dict())


# ── refusals ─────────────────────────────────────────────────────────────────────────────────


def test_a_module_of_an_unknown_class_is_refused():
    with pytest.raises(ArchitectureError, match=r"Linear in memory: no configuration, .* no known family"):
        Model.open(nn.Linear(3, 4))
    other = transformers_model("BlenderbotSmallModel", "BlenderbotSmallConfig", d_model=8, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=8, decoder_ffn_dim=8, encoder_attention_heads=1, decoder_attention_heads=1, vocab_size=9)  # fmt: skip
    with pytest.raises(ArchitectureError, match="'blenderbot-small' is not supported. Nearest: bart"):
        Model.open(other)


def test_unknown_names_are_refused_by_name(made):
    module = CASES["vit"].build(1)
    state = {**module.state_dict(), "encoder.surprise.weight": torch.zeros(3)}
    with pytest.raises(ArchitectureError, match="encoder.surprise.weight"):
        Model.open(state, config=configuration(module))


def test_a_state_dict_that_needs_a_configuration_says_so():
    with pytest.raises(ArchitectureError, match="the number of attention heads does not follow") as caught:
        Model.open(CASES["llama"].build(1).state_dict())
    assert "`config`" in str(caught.value.hint)


def test_a_configuration_that_lacks_something_is_refused():
    module = CASES["vit"].build(1)
    config = configuration(module)
    del config["hidden_size"]
    with pytest.raises(ArchitectureError, match="its configuration lacks 'hidden_size'"):
        Model.open(module, config=config)


def test_tensors_without_values_are_refused():
    with torch.device("meta"):
        module = CASES["gpt2"].make()
    with pytest.raises(CheckpointError, match=r"GPT2LMHeadModel in memory: \d+ tensor\(s\) have no values"):
        Model.open(module)


def test_values_that_are_not_numbers_are_refused():
    a, b = CASES["vit"].build(1), CASES["vit"].build(2)
    b.layers[0].attention.q_proj.weight.data[3, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"^ViTModel in memory: .*q.*weight contains NaN"):
        align(a, b)


@pytest.mark.parametrize("thing", [{}, {"state_dict": {"x": 1}}, {"weight": [1.0]}])
def test_what_is_no_state_dict_is_refused(thing):
    with pytest.raises(CheckpointError, match="a mapping of names to tensors was expected"):
        Model.open(thing)


def test_what_is_no_model_at_all_is_refused():
    with pytest.raises(CheckpointError, match="an object of type int is not a model"):
        Model.open(3)


def test_a_module_with_an_adapter_is_refused():
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(CASES["llama"].build(1), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(CheckpointError, match="has an adapter in it") as caught:
        Model.open(wrapped)
    assert "merge_and_unload" in str(caught.value.hint)


def test_parts_of_one_tensor_must_all_be_there():
    module = CASES["nomic-bert"].build(1)
    state = module.state_dict()
    del state["layers.0.self_attn.k_proj.weight"]
    with pytest.raises(
        ArchitectureError, match=r"1 of them are missing: encoder.layers.0.attn.Wqkv.weight\[1\]"
    ):
        Model.open(state, config=configuration(module))


def test_modules_of_two_classes_are_refused():
    with pytest.raises(MismatchError, match="BertModel in memory is a bert and ViTModel in memory a vit"):
        align(CASES["bert"].build(1), CASES["vit"].build(1))


def _built(state: dict[str, torch.Tensor], config: dict[str, Any] | None) -> nn.Module:
    return build(model_of(state, config), None)


def test_a_module_is_made_of_all_tensors_or_not_at_all(made):
    model = Model.open(made("vit"))
    config = config_in(made("vit"))
    state = {name: model.checkpoint.read(name) for name in model.checkpoint.tensors}
    extra = {**state, "surprise.weight": torch.zeros(3)}
    with pytest.raises(ArchitectureError, match="does not know: surprise.weight"):
        _built(extra, config)
    less = {name: tensor for name, tensor in state.items() if name != "layernorm.bias"}
    with pytest.raises(ArchitectureError, match="missing layernorm.bias"):
        _built(less, config)
    with pytest.raises(LayoutError, match="layernorm.bias"):
        _built({**state, "layernorm.bias": torch.zeros(5)}, config)
    with pytest.raises(ArchitectureError, match="names a class Unheard"):
        _built(state, {**config, "architectures": ["Unheard"]})
    bare = {key: value for key, value in config.items() if key != "architectures"}
    assert type(_built(state, bare)).__name__ == "ViTModel"


@pytest.mark.parametrize("case", ["open_clip", "timm-vit"])
def test_other_libraries_take_all_tensors_or_none_too(case, made):
    model = Model.open(made(case))
    state = {name: model.checkpoint.read(name) for name in model.checkpoint.tensors}
    with pytest.raises(ArchitectureError, match="surprise"):
        _built({**state, "surprise": torch.zeros(3)}, model.checkpoint.config)
    with pytest.raises(ArchitectureError, match="there is no configuration"):
        _built(state, None)


def test_a_checkpoint_in_memory_shares_its_tensors():
    tensor = torch.ones(3)
    checkpoint = Checkpoint.of({"x": tensor})
    assert checkpoint.read("x").data_ptr() == tensor.data_ptr()
    assert checkpoint.auxiliary_files() == []
