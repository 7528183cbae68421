"""Drafts of tables: the same as those that people wrote, certified, or refused with a reason."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from cases import decoders, first
from small_models import CASES, often
from transfusion import families
from transfusion.architecture.naming import Naming
from transfusion.architecture.table import Family, Symmetry
from transfusion.cli import main
from transfusion.errors import ArchitectureError, VerificationError
from transfusion.families import all_families, register_file
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel
from transfusion.running.probes.inputs import random_inputs
from transfusion.verification.certify import certify
from transfusion.verification.drafting.analysis import find_stacks
from transfusion.verification.drafting.propose import KINDS, propose, propose_for
from transfusion.verification.drafting.trials import drawn

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_talker.py"
TRANSLATOR = EXAMPLE.with_name("small_translator.py")
FOUR = ("vit", "bert", "llama", "gpt2")
MORE = ("phi3", "falcon-40b")
TRANSLATORS = ("bart-generation", "mbart-generation", "marian", "t5-generation", "umt5", "whisper-generation")
"""Encoders with decoders; in T5 one table of distances serves all blocks."""
UNLIKE = {
    "vit-masked": "the mask token has no effect without a mask",
    "bert-untied": "the head keeps a bias that nothing reads",
    "gpt2-classifier": "without the tied head, the ends of the stream are apart",
}
"""Classes whose draft is certified and differs from the table, which knows the family's other classes."""
SINGLE = [case.name for case in (*first.CASES, *decoders.CASES) if case.family not in ("clip", "open_clip")]
"""Cases with one column of blocks."""


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(families, "_registered", [])


@pytest.fixture
def no_tables(monkeypatch):
    """A world in which nobody has written a table."""
    monkeypatch.setattr(families, "_installed", tuple)


def proposed(module):
    config = module.config.to_dict()
    kind = KINDS.get(module.main_input_name, "tokens")
    inputs = random_inputs(Family("any", "transformers", None, inputs=(kind,)), config)
    return propose(module, config, config["model_type"], inputs)


def assert_same_layouts(module, draft: Family, written: Family) -> None:
    """For every parameter: the same axes up to their names, with the same groups and parents.

    A draft knows of permutations only: what turns in pairs is fixed there, and may lie within nothing.
    """
    config = module.config.to_dict()
    sides = [LiveModel.from_module(module, family, config).architecture for family in (draft, written)]
    names = [Naming(family) for family in (draft, written)]
    there: dict[str, str] = {}
    for name, parameter in module.named_parameters():
        if names[1].canonical(name) in written.computed:
            assert names[0].canonical(name) in draft.computed
            continue
        ours, theirs = (s.tensors[n.canonical(name)] for s, n in zip(sides, names, strict=True))
        assert len(ours.names()) == len(theirs.names()), f"{name}: {ours} and {theirs}"
        for one, other in zip(ours.names(), theirs.names(), strict=True):
            assert there.setdefault(one, other) == other, f"{name}: {one} is both {there[one]} and {other}"
        assert str(ours.rename(there.__getitem__)) == str(theirs), f"{name} {tuple(parameter.shape)}"
        marks = {n.canonical(name) in s.scales for s, n in zip(sides, names, strict=True)}
        assert len(marks) == 1, f"{name} is a scale for one of them only"
    assert len(set(there.values())) == len(there), "two axes of ours are one of theirs"
    for one, other in there.items():
        mine, worker = sides[0].spaces[one], sides[1].spaces[other]
        group = Symmetry.FIXED if worker.group.rotates_pairs else worker.group
        assert (mine.group, mine.size, bool(mine.stream)) == (group, worker.size, bool(worker.stream)), one
        parents = (worker.parent, None) if worker.group.rotates_pairs else (worker.parent,)
        assert (there[mine.parent] if mine.parent else None) in parents, one
    assert {there[id] for id in sides[0].outputs.values()} <= set(sides[1].outputs.values())


def as_a_file(proposal, file: Path) -> Family:
    """The family that a draft's text defines as a file."""
    file.write_text(proposal.text, encoding="utf-8")
    (written,) = register_file(file).FAMILIES
    return written


def check(name: str) -> None:
    module = CASES[name].make()
    proposal = proposed(module).require()
    assert proposal.passed
    assert proposal.certificate.difference < 1e-9
    written = next(family for family in all_families() if family.name == CASES[name].family)
    assert_same_layouts(module, proposal.family, written)


@pytest.mark.parametrize("name", FOUR + MORE)
def test_a_draft_says_what_the_table_that_people_wrote_says(name):
    check(name)


@pytest.mark.parametrize("name", often(TRANSLATORS, ["bart-generation", "t5-generation"]))
def test_so_it_is_for_an_encoder_with_a_decoder(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in SINGLE if n not in (*FOUR, *MORE, *UNLIKE)])
def test_so_it_is_for_every_class_with_one_column_of_blocks(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNLIKE)
def test_a_class_that_shows_less_than_its_family_is_certified_all_the_same(name):
    assert proposed(CASES[name].make()).passed


@pytest.mark.parametrize("name", often(FOUR, ["llama"]))
def test_no_table_is_needed(name, no_tables, tmp_path):
    """And the file of a draft is certified with the same numbers as the objects were."""
    assert all_families() == ()
    module = CASES[name].make()
    proposal = proposed(module)
    assert proposal.passed
    written = as_a_file(proposal, tmp_path / "draft.family")
    live = LiveModel.from_module(drawn(module, seed=1), written, module.config.to_dict())
    assert certify(replace(live, inputs=proposal.inputs)) == proposal.certificate


SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 31}
STRANGERS = {
    "RobertaModel": {**SMALL, "intermediate_size": 20, "max_position_embeddings": 19},
    "DistilBertModel": {"dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 20, "vocab_size": 31},
    "ElectraModel": {**SMALL, "intermediate_size": 20, "embedding_size": 15},
    "AlbertModel": {**SMALL, "intermediate_size": 20, "embedding_size": 15},
    "Dinov2Model": {**SMALL, "mlp_ratio": 2, "image_size": 12, "patch_size": 4},
    "CohereForCausalLM": {**SMALL, "intermediate_size": 20},
    "GPTBigCodeForCausalLM": {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_inner": 20, "vocab_size": 31},
    "MptForCausalLM": {"d_model": 24, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2, "vocab_size": 31},
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", STRANGERS)
def test_families_as_if_they_had_no_table(name, no_tables):
    import transformers

    made_by = getattr(transformers, name)
    module = made_by(made_by.config_class(**STRANGERS[name], pad_token_id=0, bos_token_id=1, eos_token_id=2))
    assert proposed(module).require().passed


def test_every_fixed_axis_of_a_draft_has_a_reason():
    proposal = proposed(CASES["llama"].make())
    axes = [axis for stack in proposal.table.stacks for axis in stack.axes] + list(proposal.table.axes)
    assert all(axis.why for axis in axes if axis.group == "fixed")
    assert "as with rotary positions" in next(axis.why for axis in axes if axis.name == "qk")


# ── models of nobody's library ───────────────────────────────────────────────────────────────


def test_the_example_of_one_s_own_model():
    """The bare scale on a branch, the bare places, and the fused projection are all found."""
    talker = register_file(EXAMPLE)
    module = talker.TinyTalker(**talker.EXAMPLE)
    proposal = propose(
        module, talker.EXAMPLE, "tiny_talker", random_inputs(talker.FAMILIES[0], talker.EXAMPLE)
    )
    rows = proposal.require().table.stacks[0].rows
    assert rows["blocks.{}.ask_and_answer.*"] == "[(head qk)|(head qk)|(head vo)] <- x"
    assert rows["blocks.{}.volume"] == "scale x@next"
    assert rows["places"] == "places x@first"
    assert list(proposal.table.stacks[0].shortcuts.values())[1][-1] == "blocks.{}"
    assert proposal.table.stacks[0].depth == 3


class Scale(nn.Module):
    """A norm of somebody's own, with a weight of an odd name."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.gain * x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()


class Mill(nn.Module):
    """Both branches start from one norm; k and v share a projection; the MLP is gated; names are odd."""

    ramp = False

    def __init__(self, width, voices, sluice):
        super().__init__()
        self.voices = voices
        self.sieve = Scale(width)
        self.asks = nn.Linear(width, width, bias=False)
        self.holds = nn.Linear(width, 2 * width)
        self.tells = nn.Linear(width, width)
        self.gate, self.flow = nn.Linear(width, sluice), nn.Linear(width, sluice, bias=False)
        self.wheel = nn.Linear(sluice, width, bias=False)

    def forward(self, x):
        inside = self.sieve(x)
        batch, length, width = x.shape
        q = self.asks(inside).view(batch, length, self.voices, -1).transpose(1, 2)
        k, v = self.holds(inside).view(batch, length, self.voices, -1).transpose(1, 2).chunk(2, -1)
        if self.ramp:
            v = v * torch.arange(1.0, v.shape[-1] + 1).to(v)
        seen = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        heard = self.tells(seen.transpose(1, 2).reshape(batch, length, width))
        return x + heard + self.wheel(torch.sigmoid(self.gate(inside)) * self.flow(inside))


class Mills(nn.Module):
    block = Mill

    def __init__(self, grains=29, width=24, voices=3, sluice=10, mills=2):
        super().__init__()
        self.pour = nn.Embedding(grains, width)
        self.mills = nn.ModuleList(self.block(width, voices, sluice) for _ in range(mills))
        self.sack = nn.Linear(width, 5)

    def forward(self, grain):
        x = self.pour(grain)
        for mill in self.mills:
            x = mill(x)
        return self.sack(x.mean(1))


GRAIN = {"grain": torch.randint(0, 29, (3, 7), generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("config", [{}, {"num_heads": 3}])
def test_a_model_nobody_has_seen(config):
    """Without a head count in the configuration, every divisor is tried."""
    proposal = propose(Mills(), {"mills": 2, **config}, "mills", GRAIN).require()
    (stack,) = proposal.table.stacks
    rows = stack.rows
    assert rows == {
        "pour.weight": "pour -> x@first",
        "mills.{}.sieve.gain": "scale x",
        "mills.{}.asks.weight": "(head qk) <- x",
        "mills.{}.holds.*": "(head [qk|vo]) <- x",
        "mills.{}.tells.*": "x@next <- (head vo)",
        "mills.{}.gate.*": "ffn <- x",
        "mills.{}.flow.weight": "ffn <- x",
        "mills.{}.wheel.weight": "x@next <- ffn",
        "sack.*": "sack <- x@last",
    }
    assert stack.sizes == {"head": 3}


def test_the_text_of_a_draft_is_a_file_that_certifies(tmp_path, capsys):
    """Also one with inputs of its own."""
    file, settings = tmp_path / "mills.family", tmp_path / "mills.json"
    as_a_file(propose(Mills(), {"mills": 2}, "mills", GRAIN), file)
    settings.write_text('{"mills": 2}')
    with pytest.raises(SystemExit) as exit:
        main(
            ["verify", "--architecture", str(file), "--model", f"{__name__}:Mills", "--config", str(settings)]
        )
    assert exit.value.code == 0
    assert "✗" not in capsys.readouterr().out


# ── encoders with decoders, and torch's own layers ───────────────────────────────────────────


def axes_of(module, family: Family, config) -> Counter:
    """How many spaces there are of each kind."""
    spaces = LiveModel.from_module(module, family, config).architecture.spaces.values()
    return Counter((one.group, one.size, bool(one.parent), bool(one.stream)) for one in spaces)


def test_a_translator_of_torch_s_own_layers():
    """The example's table, which a person wrote, has the same axes."""
    mine = register_file(TRANSLATOR)
    config, module = mine.EXAMPLE, mine.build(mine.EXAMPLE)
    inputs = mine.make_inputs(config, 2, torch.Generator().manual_seed(0))
    proposal = propose(module, config, "small_translator", inputs).require()
    assert axes_of(module, proposal.family, config) == axes_of(module, mine.FAMILIES[0], config)
    encoder, decoder = proposal.table.stacks
    assert (encoder.name, encoder.depth, decoder.name, decoder.depth) == ("encoder", 3, "decoder", 2)
    cross = "decoder.layers.{}.multihead_attn"
    assert decoder.rows[f"{cross}.q_proj.*"] == "(head2 qk2) <- y"
    assert decoder.rows[f"{cross}.v_proj.*"] == "(head2 vo2) <- encoder.x@last"
    assert [cut[0] for cut in decoder.shortcuts.values()][1] == cross
    assert f"{cross}.in_proj_weight" in proposal.text


class Chorus(nn.Module):
    """One embedding for both texts, norms before every branch and none at the ends, time before batch."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(29, 24)
        self.later = nn.Parameter(torch.zeros(7, 24))
        sizes = {"dim_feedforward": 10, "dropout": 0.0, "norm_first": True}
        self.ears = nn.ModuleList(nn.TransformerEncoderLayer(24, 3, **sizes) for _ in range(2))
        self.throats = nn.ModuleList(nn.TransformerDecoderLayer(24, 4, **sizes, bias=False) for _ in range(3))
        self.song = nn.Linear(24, 5)

    def forward(self, heard, sung):
        seen, x = self.words(heard), self.words(sung) + self.later[:, None]
        for ear in self.ears:
            seen = ear(seen)
        for throat in self.throats:
            x = throat(x, seen)
        return self.song(x)


def test_streams_that_begin_in_one_embedding_part_there():
    inputs = {name: torch.randint(0, 29, (7, 3)) for name in ("heard", "sung")}
    proposal = propose(Chorus(), {"ear_heads": 3, "throat_heads": 4}, "chorus", inputs).require()
    ears, throats = proposal.table.stacks
    assert (ears.name, throats.name) == ("ears", "throats")
    assert proposal.table.rows["words.weight"] == "words -> ears.x@first"
    assert proposal.table.rows["song.*"] == "song <- throats.x@last"
    assert list(proposal.table.unified) == [("ears.x@first", "throats.x@first")]
    assert throats.rows["throats.{}.multihead_attn.k_proj.weight"] == "(head2 qk2) <- ears.x@last"
    assert (ears.sizes, throats.sizes) == ({"head": 3}, {"head": 4, "head2": 4})


def test_stacks_are_named_by_the_words_that_tell_them_apart():
    names = [
        f"model.{side}.layers.{i}.{part}.weight" for side in ("en", "de") for i in (0, 1) for part in "qkvo"
    ]
    leaves = [f"head.{i}.{part}" for i in (0, 2) for part in ("weight", "bias", "scale", "shift")]
    found = find_stacks([*names, "model.en.conv.0.conv.weight", *leaves])
    assert [(one.name, one.prefix, one.depth) for one in found] == [
        ("en", "model.en.layers", 2),
        ("de", "model.de.layers", 2),
    ]
    odd = find_stacks(["a.b.0.q.weight", "b.a.0.q.weight", "1.a.b.0.q.weight"])
    assert [one.name for one in odd] == ["stack_0", "stack_1", "stack_2"]


# ── what is not understood ───────────────────────────────────────────────────────────────────


class Uneven(Mills):
    """Attention whose units have a weight each that is nobody's parameter: they cannot move."""

    class block(Mill):  # noqa: N801
        ramp = True


def test_an_attention_that_is_not_understood_is_named():
    proposal = propose(Uneven(), {"num_heads": 3}, "uneven", GRAIN)
    assert not proposal.passed
    message = r"tensor\(s\) were not understood: mills.0.tells.weight, .*mills.0.asks.weight"
    with pytest.raises(VerificationError, match=message) as caught:
        proposal.require()
    assert caught.value.exit_code == 3
    assert "write a table by hand" in caught.value.hint


def test_a_model_without_a_stream_is_refused():
    plain = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)))
    with pytest.raises(VerificationError, match="no residual stream was found"):
        propose(plain, {}, "plain", {"input": torch.randn(4, 6, dtype=torch.float64)})


def test_towers_with_sections_of_the_configuration_are_refused():
    module = CASES["clip"].make()
    inputs = {"input_ids": GRAIN["grain"], "pixel_values": torch.randn(3, 3, 12, 12, dtype=torch.float64)}
    with pytest.raises(
        VerificationError, match=r"text_model.*vision_model.* a section .* vision_config"
    ) as at:
        propose(module, module.config.to_dict(), "clip", inputs)
    assert "a line 'part'" in at.value.hint


class Opaque(nn.Module):
    """Its projections are no modules that could be watched, and it adds a key and a value of its own."""

    def __init__(self, width, voices, sluice):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, voices, batch_first=True, add_bias_kv=True)
        self.between = Scale(width)
        self.wide, self.narrow = nn.Linear(width, sluice), nn.Linear(sluice, width)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.narrow(torch.relu(self.wide(self.between(x))))


def test_a_stream_that_is_lost_is_refused_with_the_place():
    module = Mills()
    module.mills = nn.ModuleList(Opaque(24, 3, 10) for _ in range(2))
    with pytest.raises(VerificationError, match=r"the residual stream is lost at mills.0.between"):
        propose(module, {"num_heads": 3}, "opaque", GRAIN)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(VerificationError, match="no numbered blocks"):
        propose(nn.Linear(6, 8), {}, "plain", {"input": torch.randn(4, 6, dtype=torch.float64)})


def test_inputs_that_the_model_does_not_take_are_refused():
    with pytest.raises(ArchitectureError, match=r"the model does not run on corn \(TypeError"):
        propose(Mills(), {}, "mills", {"corn": GRAIN["grain"]})


def test_blocks_that_differ_are_refused():
    module = Mills()
    module.mills[1].flow.bias = nn.Parameter(torch.zeros(10))
    with pytest.raises(VerificationError, match=r"the blocks differ from each other in mills.\{\}.flow.bias"):
        propose(module, {}, "mills", GRAIN)


# ── the command ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def cli(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as exit:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return exit.value.code or 0, captured.out, captured.err

    return run


@pytest.mark.parametrize("name", often(["llama", "gpt2", *TRANSLATORS], ["llama", "bart-generation"]))
def test_a_draft_replaces_the_table_in_every_verb(name, made, cli, tmp_path, no_tables):
    folder, file = made(name), tmp_path / "draft.family"
    code, out, err = cli("inspect", folder, "--propose", "-o", file)
    assert (code, err) == (0, "")
    assert "✗" not in out
    assert "certified on all 3 blocks" in out
    code, out, err = cli("inspect", folder, "--architecture", file)
    assert (code, err) == (0, "")
    assert "axes that may move" in out
    pi = tmp_path / "pi.safetensors"
    code, *_ = cli("align", folder, made(name, 2), "--architecture", file, "-o", pi, "--no-advice")
    assert code == 0
    assert cli("verify", folder, "--via", pi, "--architecture", file)[0] == 0


def test_without_a_place_the_draft_is_printed(made, cli):
    code, out, err = cli("inspect", made("bert"), "--propose")
    assert code == 0
    assert out.startswith("# bert, as in BertModel: a draft")
    assert families.read_families(out, "draft")[0].name == "bert"
    assert err.count("✓") > 4


def test_a_draft_as_json(made, cli):
    code, out, _ = cli("inspect", made("vit"), "--propose", "--json")
    info = json.loads(out)
    assert code == 0
    assert all(check["passed"] for check in info["checks"])
    assert "(head qk) <- x" in info["text"]


def test_a_draft_does_not_replace_a_file_unasked(made, cli, tmp_path):
    file = tmp_path / "draft.family"
    file.write_text("mine")
    code, _, err = cli("inspect", made("bert"), "--propose", "-o", file)
    assert code == 1
    assert "exists already" in err
    assert file.read_text() == "mine"
    assert cli("inspect", made("bert"), "--propose", "-o", file, "--force")[0] == 0
    assert file.read_text().startswith("# bert")


def test_a_draft_that_is_not_certified_exits_with_3(made, cli, tmp_path, monkeypatch):
    monkeypatch.setattr("transfusion.verification.drafting.analysis.find_attention", lambda *_: None)
    file = tmp_path / "draft.family"
    code, out, err = cli("inspect", made("bert"), "--propose", "-o", file)
    assert (code, out) == (3, "")
    assert "were not understood: encoder.layer.0.attention.output.dense.weight" in err
    assert not file.exists()


def test_failed_checks_are_named(made, cli, monkeypatch):
    from transfusion.verification.drafting.analysis import Analysis

    honest = Analysis._find_ends

    def forgetful(found):
        honest(found)
        group = copy.copy(found.inner[0][1])
        group.slots, group.outputs = {("embeddings.word_embeddings.weight", 0): 0}, {}
        found.inner.append((found.inner[0][0], group))

    monkeypatch.setattr(Analysis, "_find_ends", forgetful)
    code, out, err = cli("inspect", made("bert"), "--propose")
    assert (code, out) == (3, "")
    assert "the draft is wrong about the model" in err
    assert "all free axes" in err


def test_a_place_goes_with_a_proposal(made, cli, tmp_path):
    code, _, err = cli("inspect", made("bert"), "-o", tmp_path / "x.family")
    assert code == 2
    assert "--output goes with --propose" in err


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ArchitectureError, match=r"there is no config.json to make a draft from"):
        propose_for(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["NobodyModel"]}')
    with pytest.raises(
        ArchitectureError, match=r"names a class NobodyModel that transformers .* does not have"
    ):
        propose_for(tmp_path)


# ── a class in a file ────────────────────────────────────────────────────────────────────────


@pytest.fixture
def own(tmp_path):
    """The example's translator without its table, and a folder with its configuration."""
    text = TRANSLATOR.read_text(encoding="utf-8")
    model, rest = text.split("# ── the table")
    functions = rest.split("# ── the model and its inputs")[1].split("\n", 1)[1]
    file, folder = tmp_path / "own.py", tmp_path / "model"
    file.write_text(model + re.sub(r"FAMILIES = .*", "", functions), encoding="utf-8")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(register_file(TRANSLATOR).EXAMPLE))
    (folder / "modeling.py").write_text("raise SystemExit('run')")
    return file, folder


def test_a_class_in_a_file_gets_a_table_and_then_runs(own, cli, tmp_path, monkeypatch):
    """Also where config.json names neither a class nor a family."""
    from safetensors.torch import save_file

    monkeypatch.setattr(families, "_registered", [])
    file, folder = own
    draft = tmp_path / "draft.family"
    code, out, err = cli("inspect", folder, "--propose", "--architecture", file, "-o", draft)
    assert (code, err) == (0, "")
    assert "certified on all 3 blocks" in out
    _, _, use = out.partition(f"to use it, end {file} with:\n")
    assert use.splitlines()[-1].endswith(f"{str(draft)!r}, build=build, make_inputs=make_inputs)")
    file.write_text(file.read_text(encoding="utf-8") + use, encoding="utf-8")
    module = families.python_module(file)
    save_file(module.build(module.EXAMPLE).state_dict(), folder / "model.safetensors")
    pi = tmp_path / "pi.safetensors"
    assert cli("align", folder, folder, "--architecture", file, "-o", pi)[0] == 0
    code, out, err = cli("verify", folder, "--via", pi, "--architecture", file)
    assert (code, err) == (0, "")
    assert "over logits" in out


def test_a_class_in_a_file_from_python(own):
    file, folder = own
    proposal = propose_for(folder, architecture=file)
    assert proposal.passed
    assert proposal.family.name == "own"
    module = proposal.family.build(json.loads((folder / "config.json").read_text()))
    assert type(module).__name__ == "SmallTranslator"


def test_a_class_without_inputs_reads_ids_of_its_vocabulary(tmp_path):
    """And one that needs values while it is built is built with values."""
    file, folder = tmp_path / "mills.py", tmp_path
    source = f"import torch\nfrom {__name__} import Mills\n\n\nclass Reader(Mills):\n    def forward(self, input_ids):\n"
    source += "        return super().forward(input_ids)\n\n\ndef build(config):\n"
    source += "    torch.linspace(0, 1, 2).tolist()\n    return Reader()\n"
    file.write_text(source)
    (folder / "config.json").write_text('{"vocab_size": 29}')
    proposal = propose_for(folder, architecture=file)
    assert proposal.passed
    assert proposal.use(Path("d.family")).endswith("'d.family', build=build)")


@pytest.mark.parametrize(
    ("source", "message", "hint"),
    [
        ("", r"own.py: it defines no build", r"build\(config\)"),
        ("def build(config): return config['no']", r"own.py with .*config.json: .* cannot build", "configur"),
        (
            "from torch.nn import Linear\ndef build(config): return Linear(2, 2)",
            "no make_inputs",
            "add make_in",
        ),
        ("1 / 0", r"own.py: running it failed \(ZeroDivisionError", "traceback"),
    ],
)
def test_a_file_without_a_class_is_refused_with_the_next_step(own, source, message, hint):
    file, folder = own
    file.write_text(source)
    with pytest.raises(ArchitectureError, match=message) as caught:
        propose_for(folder, architecture=file)
    assert re.search(hint, caught.value.hint)


def test_a_table_is_no_class(own, tmp_path):
    table = tmp_path / "own.family"
    table.write_text("family own")
    with pytest.raises(ArchitectureError, match="own.family: it defines no build"):
        propose_for(own[1], architecture=table)


def test_a_configuration_without_a_class_asks_for_a_file(own):
    with pytest.raises(ArchitectureError, match="it names no class") as caught:
        propose_for(own[1])
    assert "`architecture`" in caught.value.hint


def test_a_draft_needs_no_weights(made, tmp_path):
    (tmp_path / "config.json").write_text((made("llama") / "config.json").read_text())
    assert propose_for(tmp_path).passed
    assert Model.open(made("llama")).family.name == "llama"
