"""The verb evaluate: its table, its file, and what it says when it cannot go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import save_file

from making import case
from small_models import VIT
from transfusion.report import views

TWO = case("vit-two", "vit", "ViTForImageClassification", "ViTConfig", {**VIT, "num_labels": 2})


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("two")
    return TWO.save(root / "b", 1), TWO.save(root / "tuned", 2)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    for number in range(6):
        folder = root / ("dark", "light")[number % 2]
        folder.mkdir(exist_ok=True)
        shade = 40 * number
        Image.new("RGB", (16, 14), (shade, 255 - shade, shade)).save(folder / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def tensors(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("tensors") / "support.safetensors"
    images = torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    save_file({"pixel_values": images, "labels": torch.arange(8) % 2}, file)
    return file


def test_task_and_support_in_one_table(cli, models, pictures, tensors, tmp_path):
    b, tuned = models
    file = tmp_path / "result.json"
    command = ["evaluate", tuned, "--data", pictures, "--support", tensors, "--against", b]
    code, out, err = cli(*command, "-o", file)
    assert code == 0, err
    assert f"warning: {b}: nothing in its folder says how images are prepared" in err
    assert "Task: class of every example of 2, on 6 examples" in out
    assert out.endswith(f"\nwritten to {file}\n")
    assert f"Gains are over {b}, in points for rates." in out
    result = json.loads(file.read_text())
    assert result["verb"] == "evaluate"
    assert result["command"].startswith("transfusion evaluate ")
    assert set(result["run"]) == {"seconds", "memory", "machine"}
    assert result["against"] == str(b)
    assert [row["model"] for row in result["models"]] == [str(b), str(tuned)]
    for part in ("task", "support"):
        first, second = (row[part]["value"] for row in result["models"])
        assert result["models"][1]["gain"][part] == pytest.approx(100 * (second - first))
        assert f"{100 * second:.2f}" in out
        low, high = result["models"][1][part]["interval"]
        assert low <= second <= high
        assert f"{100 * low:.1f}–{100 * high:.1f}" in out
        low, high = result["models"][1]["gain_interval"][part]
        assert f"{low:+.1f} to {high:+.1f}" in out
    assert result["models"][0]["gain_interval"] is None
    assert "95 % confidence interval" in out
    code, out, _ = cli(*command, "--json")
    again = json.loads(out)
    assert {key: again[key] for key in ("task", "support", "against", "models")} == {
        key: result[key] for key in ("task", "support", "against", "models")
    }
    code, _, err = cli(*command, "-o", file)
    assert code == 1
    assert "--force" in err
    assert cli(*command, "-o", file, "--force")[0] == 0
    code, _, err = cli(*command, "-o", b / "config.json", "--force")
    assert code == 1
    assert "is, or holds, an input" in err


def test_no_input_is_overwritten(cli, models, pictures, tmp_path):
    names, head = tmp_path / "classes.json", tmp_path / "head.json"
    listed = tmp_path / "data.json"
    for file in (names, head, listed):
        file.write_text("mine")
    common = ["evaluate", models[1], "--data", pictures, "--support", pictures, "--force"]
    for more, file in (
        ([], models[1] / "config.json"),
        (["--against", models[0]], models[0] / "config.json"),
        (["--classes", names], names),
        (["--support-classes", names], names),
        (["--head", head], head),
        (["--support-head", head], head),
        (["--data", listed], listed),
        (["--support", listed], listed),
    ):
        before = file.read_text()
        code, _, err = cli(*common, *more, "-o", file)
        assert (code, "is, or holds, an input" in err) == (1, True), more
        assert file.read_text() == before


def test_a_loss_as_the_headline(cli, models, pictures):
    b, tuned = models
    code, out, _ = cli(
        "evaluate", b, tuned, "--data", pictures, "--metric", "loss", "--against", b, "--limit", "2", "-q"
    )
    assert code == 0
    assert "on 2 examples" in out
    assert "Of a loss and a perplexity less is better" in out
    assert "in points for rates" not in out
    code, out, _ = cli("evaluate", b, "--data", pictures, "--metric", "loss", "--limit", "1", "-q")
    assert code == 0
    assert "on 1 example of" in out
    assert "negative gain" not in out
    assert "Gains" not in out


def test_the_colours_of_gains():
    def shown(metric: str, gain: float) -> str:
        task = {"data": "d", "examples": 1, "question": "q", "metric": metric, "classes": 2}
        rows = [{"model": "b", "task": {"value": 0.5}, "gain": {"task": 0.0}}]
        rows.append({"model": "m", "task": {"value": 0.5}, "gain": {"task": gain}})
        result = {"task": task, "support": None, "against": "b", "models": rows}
        console = Console(color_system="standard", force_terminal=True, width=90, record=True)
        with console.capture() as captured:
            console.print(views.evaluation(result))
        return captured.get()

    green, red = "\x1b[32m", "\x1b[31m"
    assert f"{green}+2.00" in shown("accuracy", 2.0)
    assert f"{red}-2.00" in shown("accuracy", -2.0)
    assert f"{green}-0.2000" in shown("loss", -0.2)
    assert f"{red}+0.2000" in shown("loss", 0.2)
    assert green not in shown("accuracy", 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--support-classes", "dtd"], "there is no support"),
        (["--metric", "bleu"], "is not one of accuracy"),
        (["-o", "result.txt"], "result.txt: not a file of JSON"),
        (["--split", "dev"], "no split dev; it has no splits hint: leave --split out"),
        (["--device", "moon"], "device 'moon' cannot be used here ("),
        (["--device", "meta"], "device 'meta' cannot be used here ("),
        pytest.param(
            ["--device", "cuda"],
            "device 'cuda' cannot be used here (",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        (["--classes", "eurosat"], "eurosat: 10 classes, and"),
        (["--classes", "nowhere"], "nowhere: no file of classes"),
    ],
)
def test_what_is_refused(arguments, message, cli, models, pictures):
    code, _, err = cli("evaluate", models[0], "--data", pictures, *arguments)
    assert code in (1, 2)
    assert message in " ".join(err.split())


def test_examples_that_are_not_there(cli, models, tmp_path):
    code, _, err = cli("evaluate", models[0], "--data", tmp_path / "none.csv")
    assert (code, "no such file or folder" in err, "hint:" in err) == (1, True, True)
    (tmp_path / "a.csv").write_text("image,label\nx.png,0\n")
    code, _, err = cli("evaluate", models[0], "--data", tmp_path / "a.csv", "--label", "class")
    assert code == 1
    assert "no column class; there are image, label" in err


def test_an_adapter_with_its_base(cli, models, tensors, tmp_path):
    import peft

    from tests.transport.test_folded_adapters import adapted

    b, tuned = models
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    lora = adapted(b, tmp_path / "lora", config, into="ViTForImageClassification")
    code, out, err = cli("evaluate", lora, "--data", tensors, "--against", b, "--json")
    assert code == 0, err
    found = json.loads(out)["models"]
    assert [row["model"] for row in found] == [str(b), str(lora)]
    assert found[0]["task"]["loss"] != found[1]["task"]["loss"]
    code, out, _ = cli("evaluate", lora, "--base", b, "--data", tensors, "--json")
    assert json.loads(out)["models"][0]["task"] == found[1]["task"]
    code, _, err = cli("evaluate", tuned, "--base", b, "--data", tensors)
    assert (code, "none of the models is an adapter" in err) == (2, True)
    code, _, err = cli("evaluate", lora, "--base", b, "--data", tensors, "-o", b / "config.json", "--force")
    assert (code, "is, or holds, an input" in err) == (1, True)
    code, out, err = cli(
        "sweep", lora, "--onto", tuned, "--data", tensors, "--alphas", "1", "--method", "naive", "--no-naive",
        "--json",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["base"] == str(b)
    code, _, err = cli("sweep", tuned, "--onto", b, "--data", tensors)
    assert (code, "give A as --base" in err) == (2, True)
