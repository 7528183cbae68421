"""In every family: what arrives is the moved fine-tune to the last bit, adapters arrive, and all comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from small_models import CASES, FIRST, OFTEN, finetuned, often
from transfusion.alignment.alignment import Alignment
from transfusion.errors import AdapterError
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel, largest_difference
from transfusion.running.probes.inputs import in_dtype, run_model
from transfusion.transport.adapters.settings import WRAPPED
from transfusion.transport.apply import apply
from transfusion.transport.output import Output
from transfusion.transport.task_vector import TaskVector
from transfusion.transport.transport import merge, transport

pytestmark = pytest.mark.filterwarnings(
    "ignore:fan_in_fan_out", "ignore:Unsupported layer type", "ignore:The following \\w+_pattern keys"
)

every_family = pytest.mark.parametrize("family", often(sorted(FIRST), OFTEN))


@dataclass(frozen=True)
class TransportPlan:
    """A, B that is A exactly moved, and a fine-tune and an adapter of A."""

    a: Path
    b: Path
    tuned: Path
    root: Path

    @cached_property
    def pi(self) -> Alignment:
        return align(self.a, self.b, residual="tied", advice=False)

    @cached_property
    def moved(self) -> Path:
        return transport(self.tuned, base=self.a, onto=self.b, via=self.pi).save(self.root / "moved")

    @cached_property
    def adapter(self) -> Path:
        return adapted(self.a, self.root / "adapter")

    @cached_property
    def foldable(self) -> Path:
        """The adapter, or one like it that leaves attentions alone which are wrapped as a whole."""
        wrapped = any(WRAPPED in key for key in stored(self.adapter))
        return adapted(self.a, self.root / "foldable", packed=False) if wrapped else self.adapter

    @cached_property
    def moved_adapter(self) -> Path:
        moved = transport(self.adapter, base=self.a, onto=self.b, via=self.pi)
        assert isinstance(moved, Output)
        moved.save(self.root / "moved-adapter")
        return self.root / "moved-adapter"

    def under(self, folder: Path) -> Model:
        return Model.open(folder).under(self.pi.provenance.policy)

    def expected(self, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What outputs of A's kind are at B."""
        return LiveModel.of(self.under(self.a)).expected(self.pi, outputs)


@pytest.fixture(scope="module")
def journeys(shuffled, tmp_path_factory) -> Callable[[str], TransportPlan]:
    done: dict[str, TransportPlan] = {}

    def find(family: str) -> TransportPlan:
        if family not in done:
            case, root = CASES[FIRST[family]], tmp_path_factory.mktemp(family)
            a, b = shuffled(case.name)
            done[family] = TransportPlan(a, b, finetuned(case, a, root / "tuned"), root)
        return done[family]

    return find


def apart(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> float:
    """The largest difference, in shares of the largest output."""
    return largest_difference(wanted, found) / max(float(value.abs().max()) for value in wanted.values())


# ── models ───────────────────────────────────────────────────────────────────────────────────


@every_family
def test_every_bit_is_that_of_the_moved_fine_tune(family, journeys):
    """Sums are rounded once, in a wider type, so that nothing is lost between π(A) and π(A_ft)."""
    plan = journeys(family)
    tuned, arrived = plan.under(plan.tuned), Model.open(plan.moved)
    assert tuned.checkpoint.tensors.keys() == arrived.checkpoint.tensors.keys()
    for name, layout in tuned.architecture.tensors.items():
        wanted, found = plan.pi.move(tuned.read(name), layout), arrived.read(name)
        assert wanted.dtype is found.dtype
        assert torch.equal(wanted, found), name
    assert any(not torch.equal(tuned.read(name), arrived.read(name)) for name in tuned.architecture.tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "open_clip", "vit"])
def test_every_bit_is_that_of_the_moved_fine_tune_in_half_the_digits(family, dtype, made, tmp_path):
    case = CASES[FIRST[family]]
    a = case.store(case.build(1), tmp_path / "a")
    tuned = finetuned(case, a, tmp_path / "tuned")
    for folder in (a, tuned):
        (file,) = folder.glob("*.safetensors")
        save_file(in_dtype(load_file(file), dtype), file, {"format": "pt"})
    pi = align(a, a, method="random", residual="tied", seed=3)
    b = apply(pi, a).save(tmp_path / "b")
    via = replace(pi, provenance=replace(pi.provenance, target_fingerprint=Model.open(b).fingerprint))
    moved = transport(tuned, base=a, onto=b, via=via).save(tmp_path / "moved")
    model, arrived = Model.open(tuned).under(pi.provenance.policy), Model.open(moved)
    for name, layout in model.architecture.tensors.items():
        assert arrived.read(name).dtype is dtype
        assert torch.equal(pi.move(model.read(name), layout), arrived.read(name)), name


def loaded(folder: Path) -> nn.Module:
    """What a library's own loader makes of a folder, and of nothing else."""
    model = Model.open(folder)
    match model.family.library:
        case "open_clip":
            import open_clip

            return open_clip.create_model(f"local-dir:{folder}").eval()
        case "timm":
            import timm

            return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        case "diffusers":
            import diffusers

            made_by = getattr(diffusers, model.config["_class_name"])
            module, output_record = made_by.from_pretrained(folder, output_loading_info=True)
            assert not any(output_record.values()), output_record
            return module.eval()
    import transformers

    (name,) = model.config["architectures"]
    module, output_record = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(output_record.values()), output_record
    return module.eval()


DELTA_NETS = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_5-vision", "qwen3_5_moe-vision")
WIDER = {"gemma": 2e-5, "paligemma": 2e-5, "sam3": 5e-5, **dict.fromkeys(DELTA_NETS, 2e-4)}
"""Their own outputs in float32 are 6e-6 to 8e-6 from those in float64, and in another order of units as much again.
Those of SAM 3 are 1e-5 away, and those of delta nets up to 7e-5: the first tokens' states may be small, and a norm
divides by their size."""


@every_family
def test_every_library_loads_it_and_computes_the_same_in_float32(family, journeys):
    plan = journeys(family)
    live = LiveModel.of(Model.open(plan.moved))
    inputs = in_dtype(live.inputs, torch.float32)
    wanted, found, bare = (
        run_model(loaded(folder), live.family, inputs, double=False)
        for folder in (plan.tuned, plan.moved, plan.b)
    )
    assert all(value.dtype is torch.float32 for value in found.values())
    wanted = plan.expected(wanted)
    assert apart(wanted, found) < WIDER.get(family, 1e-5)
    assert apart(wanted, bare) > 1e-2, "the fine-tune did nothing"


# ── adapters ─────────────────────────────────────────────────────────────────────────────────


WITH_EXPERTS_AS_PARAMETERS = ("mixtral", "qwen3_moe", "qwen3_next", "deepseek_v3", "glm4_moe", "minimax_m2")
"""Where PEFT understands "all-linear" as the stacked weights of experts, too."""
ATTENTION_ALONE = (*WITH_EXPERTS_AS_PARAMETERS, "olmoe", "llama4", "llama4_text", "phimoe")
"""Those, and where PEFT's "all-linear" wraps a router that gives a pair, and cannot run it."""
ATTENTION = [
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("in_proj_qkvz", "in_proj_ba", "out_proj"),
]


def targets(module: nn.Module, packed: bool) -> str | list[str]:
    """All linear maps; those within torch's own attention are PEFT's only with the attention as a whole."""
    whole = [name for name, part in module.named_modules() if isinstance(part, nn.MultiheadAttention)]
    kind = getattr(getattr(module, "config", None), "model_type", "")
    if kind in ATTENTION_ALONE:
        return ATTENTION
    if kind == "nemotron_h":  # PEFT refuses the last map of its state-space layers
        return [*ATTENTION[:4], "in_proj"]
    if kind == "deepseek_v4":  # PEFT cannot run the map that reads every lane of heads alone
        return ["q_a_proj", "q_b_proj", "kv_proj", "o_b_proj"]
    if kind == "mamba2":  # as in Nemotron-H
        return ["in_proj"]
    if kind == "mamba":  # as in both of the above
        return ["in_proj", "x_proj"]
    if kind == "jamba":  # the library multiplies by the weight of dt_proj, and passes by what PEFT adds to it
        return [*ATTENTION[:4], "in_proj", "x_proj", "out_proj", "gate_proj", "up_proj", "down_proj"]
    if not whole:
        return "all-linear"
    within = tuple(f"{name}." for name in whole)
    linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    return [*(whole if packed else ()), *(name for name in linear if not name.startswith(within))]


def adapted(base: Path, folder: Path, chosen: str = "", *, packed: bool = True) -> Path:
    """An adapter with random values, made by PEFT on all linear maps of a model."""
    import peft

    module = LiveModel.of(Model.open(base)).module.float()
    torch.manual_seed(4)
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=chosen or targets(module, packed), init_lora_weights=False
    )
    peft.get_peft_model(module, config).save_pretrained(folder)
    return folder


def with_adapter(adapter: Path, base: Path) -> dict[str, torch.Tensor]:
    """What a base computes with an adapter that PEFT loaded onto it, in float64."""
    import peft

    live = LiveModel.of(Model.open(base))
    module: Any = peft.PeftModel.from_pretrained(live.module.float(), adapter).double().eval()
    return run_model(module.get_base_model(), live.family, live.inputs)


def stored(adapter: Path) -> dict[str, torch.Tensor]:
    return load_file(adapter / "adapter_model.safetensors")


@every_family
def test_an_adapter_on_all_linear_maps_does_on_b_what_it_did_on_a(family, journeys):
    plan = journeys(family)
    wanted = plan.expected(with_adapter(plan.adapter, plan.a))
    assert apart(wanted, with_adapter(plan.moved_adapter, plan.b)) < 1e-5
    assert apart(wanted, LiveModel.of(Model.open(plan.b)).outputs()) > 1e-2, "the adapter did nothing"
    was, is_now = stored(plan.adapter), stored(plan.moved_adapter)
    assert {key: value.shape for key, value in was.items()} == {k: v.shape for k, v in is_now.items()}
    assert all(3 in value.shape for value in is_now.values())


@every_family
def test_folded_into_the_model_the_adapter_does_the_same(family, journeys, tmp_path):
    plan = journeys(family)
    full = transport(plan.foldable, base=plan.a, onto=plan.b, via=plan.pi, full=True)
    module = loaded(full.save(tmp_path / "full")).double()
    live = LiveModel.of(Model.open(plan.b))
    wanted = plan.expected(with_adapter(plan.foldable, plan.a))
    assert apart(wanted, run_model(module, live.family, live.inputs)) < WIDER.get(family, 1e-5)
    assert apart(wanted, live.outputs()) > 1e-2, "the adapter did nothing"


@pytest.mark.parametrize("family", ["open_clip", "siglip-vision"])
def test_an_attention_that_is_wrapped_as_a_whole_is_not_folded(family, journeys):
    """PEFT 0.21 adds the change of ``out_proj`` twice, to a model that it runs and one that it merges."""
    plan = journeys(family)
    with pytest.raises(AdapterError, match=r"changes \S+out_proj\.weight within an attention"):
        transport(plan.adapter, base=plan.a, onto=plan.b, via=plan.pi, full=True)


def test_two_adapters_of_an_attention_as_a_whole_make_one_that_peft_loads(journeys, tmp_path):
    """The adapter together with itself, halved, is the adapter."""
    plan = journeys("open_clip")
    both = [plan.adapter, plan.adapter]
    joined = merge(both, base=plan.a, onto=plan.b, via=plan.pi, weights=[0.5, 0.5])
    joined.save(tmp_path / "joined")
    wanted = plan.expected(with_adapter(plan.adapter, plan.a))
    assert apart(wanted, with_adapter(tmp_path / "joined", plan.b)) < 1e-5


@pytest.mark.parametrize("family", WITH_EXPERTS_AS_PARAMETERS)
def test_an_adapter_on_stacked_experts_is_refused_by_their_names(family, journeys, tmp_path):
    plan = journeys(family)
    adapter = adapted(plan.a, tmp_path / "adapter", "all-linear")
    with pytest.raises(AdapterError, match=r"target_parameters=\[.*'gate_up_proj'") as refusal:
        transport(adapter, base=plan.a, onto=plan.b, via=plan.pi)
    assert "merge the adapter into its base" in str(refusal.value)


# ── there and back ───────────────────────────────────────────────────────────────────────────


@every_family
def test_a_task_vector_comes_back_bit_for_bit(family, journeys, made):
    """By any π between any bases; the sums that are written come back where B is A, moved."""
    plan = journeys(family)
    a, tuned = plan.under(plan.a), plan.under(plan.tuned)
    pi = align(plan.a, made(FIRST[family], 2), method="random", seed=5, advice=False)
    vector, back = TaskVector.between(tuned, a), pi.inverse()
    tensors = a.under(pi.provenance.policy).architecture.tensors
    assert pi.maps
    for name, layout in tensors.items():
        tau = vector.difference(name)
        assert torch.equal(back.move(pi.move(tau, layout), layout), tau), name
    returned = transport(plan.moved, base=plan.b, onto=plan.a, via=plan.pi.inverse())
    found = returned.state_dict()
    assert all(torch.equal(tuned.checkpoint.read(name), value) for name, value in found.items())


@every_family
def test_an_adapter_comes_back_bit_for_bit(family, journeys):
    plan = journeys(family)
    was, there = stored(plan.adapter), stored(plan.moved_adapter)
    returned = transport(plan.moved_adapter, base=plan.b, onto=plan.a, via=plan.pi.inverse()).state_dict()
    assert was.keys() == returned.keys()
    assert all(torch.equal(value, returned[key]) for key, value in was.items())
    assert not all(torch.equal(value, there[key]) for key, value in was.items())
