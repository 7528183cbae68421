"""α: a number, one for each layer, or the one that keeps the size of a change."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from small_models import CASES, finetuned
from transfusion.architecture.naming import block_of
from transfusion.errors import SettingError
from transfusion.model.model import Model
from transfusion.transport.alpha import Alpha, balanced_alpha
from transfusion.transport.transport import transport


def test_what_an_alpha_may_be(tmp_path):
    file = tmp_path / "alpha.json"
    file.write_text(json.dumps({"encoder.layer.0.*": 0.5, "encoder.*": 2, "default": 0.25}))
    for alpha in (Alpha.of(file), Alpha.of(str(file)), Alpha.of(json.loads(file.read_text()))):
        assert alpha.at("encoder.layer.0.attention.weight") == 0.5, "the first pattern that matches counts"
        assert alpha.at("encoder.layer.1.attention.weight") == 2
        assert alpha.at("embeddings.weight") == 0.25
    assert Alpha.of("0.5") == Alpha.of(0.5) == Alpha(0.5)
    assert Alpha.of(Alpha.of(file).as_json()) == Alpha.of(file)
    assert (str(Alpha(0.5)), str(Alpha.of(file))) == ("0.5", "0.25 to 2, by layer")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("-1", "alpha = -1.0: it must be a number of at least 0"),
        ("nan", "alpha = nan: it must be a number of at least 0"),
        ("half", "neither a number nor a file that exists"),
        ({"layer.*": "much"}, "alpha of layer.* is 'much', which is not a number"),
        ({"layer.*": True}, "which is not a number"),
        ({"layer.*": float("inf")}, "alpha = inf for layer"),
    ],
)
def test_what_it_may_not_be(value, message):
    with pytest.raises(SettingError) as caught:
        Alpha.of(value)
    assert message in str(caught.value)


def test_files_that_are_no_alphas_are_refused(tmp_path):
    for content in ("[1, 2]", "{", "1"):
        (tmp_path / "alpha.json").write_text(content)
        with pytest.raises(SettingError, match=r"an α file is JSON such as|was expected"):
            Alpha.of(tmp_path / "alpha.json")


def test_layers_have_names():
    assert block_of("encoder.layer.11.output.dense.weight") == "encoder.layer.11"
    assert block_of("blocks.3.mlp.fc1.bias") == "blocks.3"
    assert block_of("embeddings.word_embeddings.weight") == ""
    assert block_of("conv1.weight") == ""


def test_every_layer_gets_its_own(shuffled, tmp_path):
    a, b = shuffled("vit")
    tuned = finetuned(CASES["vit"], a, tmp_path / "tuned")
    one = {"base": a, "onto": b, "method": "naive", "dtype": "float64"}
    whole = transport(tuned, **one).state_dict()
    layered = transport(tuned, **one, alpha={"encoder.layer.1.*": 0.5, "default": 0}).state_dict()
    own = Model.open(b).checkpoint
    for name, found in layered.items():
        share = 0.5 if "layer.1." in name else 0.0
        wanted = own.read(name).double() + share * (whole[name] - own.read(name).double())
        assert torch.allclose(found, wanted, atol=1e-12), name


def test_patterns_that_mean_nothing_are_refused(made):
    with pytest.raises(SettingError, match=r"no tensor matches encoder\.layers\.\*"):
        transport(
            made("vit"),
            base=made("vit", 1),
            onto=made("vit", 2),
            method="naive",
            alpha={"encoder.layers.*": 1},
        )


def test_auto_keeps_the_size_of_a_change_relative_to_the_weights(shuffled, made, tmp_path):
    a, b = (Model.open(folder) for folder in shuffled("vit"))
    for value in (balanced_alpha(a, b).default, *balanced_alpha(a, b).patterns.values()):
        assert abs(value - 1) < 1e-5, "B is A in another order"
    state = load_file(made("vit") / "model.safetensors")
    grown = {name: one * 2 if "layer.1." in name else one for name, one in state.items()}
    (tmp_path / "grown").mkdir()
    save_file(grown, tmp_path / "grown" / "model.safetensors", {"format": "pt"})
    (tmp_path / "grown" / "config.json").write_text((made("vit") / "config.json").read_text())
    found = balanced_alpha(a, Model.open(tmp_path / "grown"))
    assert found.at("encoder.layer.1.output.dense.weight") == pytest.approx(2, abs=1e-5)
    assert found.at("encoder.layer.0.output.dense.weight") == pytest.approx(1, abs=1e-5)
    assert found.at("layernorm.weight") == pytest.approx(1, abs=1e-5)


def test_on_the_command_line(cli, shuffled, tmp_path):
    a, b = shuffled("vit")
    tuned = finetuned(CASES["vit"], a, tmp_path / "tuned")
    (tmp_path / "alpha.json").write_text('{"encoder.layer.0.*": 0.5}')
    arguments = ["transport", tuned, "--base", a, "--onto", b, "--method", "naive"]
    code, out, _ = cli(*arguments, "--alpha", tmp_path / "alpha.json", "-o", tmp_path / "layered")
    assert code == 0
    assert "with α = 0.5 to 1, by layer" in out
    metadata = json.loads((tmp_path / "layered" / "transfusion.json").read_text())
    assert metadata["alpha"] == {"default": 1.0, "encoder.layer.0.*": 0.5}
    code, _, _ = cli(*arguments, "--alpha", "auto", "-o", tmp_path / "auto")
    assert code == 0
    code, _, err = cli(*arguments, "--alpha", "much", "-o", tmp_path / "no")
    assert code == 2
    assert "neither a number nor a file" in err
