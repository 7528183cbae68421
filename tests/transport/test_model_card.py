"""Model cards: front matter that the hub understands, and a text that no name can break."""

from __future__ import annotations

import pytest
from huggingface_hub import ModelCard

from small_models import CASES, finetuned
from transfusion.transport.model_card import card, licence_of, pipeline_tag
from transfusion.transport.transport import transport

CACHE = "/home/me/.cache/huggingface/hub"
METADATA = {
    "transfusion": "0.1.0",
    "verb": "transport",
    "kind": "model",
    "finetuned": [{"name": "org/tuned", "fingerprint": "f" * 64, "licence": "mit"}],
    "base": {"name": "org/a", "fingerprint": "a" * 64},
    "onto": {"name": "org/b@main", "path": f"{CACHE}/models--org--b/snapshots/0123", "fingerprint": "b" * 64},
    "alignment": {
        "blake3": "c" * 64,
        "method": "guarded",
        "residual": "untied",
        "inner": "free",
        "heads": "matched",
        "seed": 3,
        "advice": {"verdict": "alignable", "text": "the units of A were found again in B"},
    },
    "alpha": 0.8,
    "dtype": None,
    "moved": 40,
    "unchanged": 2,
    "carried": ["classifier.weight", "classifier.bias"],
    "dropped": [],
    "library": "transformers",
}
SAME = {"org/tuned": "mit", "org/a": "mit", "org/b@main": "mit"}


def parsed(text: str) -> ModelCard:
    """As the hub's own library reads it; what it cannot read, it refuses."""
    return ModelCard(text)


def test_the_front_matter_is_what_the_hub_reads():
    data = parsed(card(METADATA, SAME)).data.to_dict()
    assert data == {
        "base_model": ["org/b"],
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "license": "mit",
        "tags": ["transfusion"],
    }


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        ({"kind": "adapter"}, "base_model_relation", "adapter"),
        ({"kind": "adapter"}, "library_name", "peft"),
        ({"verb": "merge"}, "base_model_relation", "merge"),
        ({"verb": "merge"}, "tags", ["transfusion", "merge"]),
        ({"library": "open_clip"}, "library_name", "open_clip"),
        ({"library": "timm"}, "library_name", "timm"),
        ({"library": "diffusers", "kind": "adapter", "file_format": "kohya"}, "library_name", "diffusers"),
        ({"kind": "adapter", "peft_type": "LORA"}, "tags", ["transfusion", "lora"]),
        ({"pipeline_tag": "fill-mask"}, "pipeline_tag", "fill-mask"),
    ],
)
def test_kinds_of_outputs(change, key, value):
    assert parsed(card({**METADATA, **change}, SAME)).data.to_dict()[key] == value


@pytest.mark.parametrize(
    ("name", "path", "repository"),
    [
        ("org/b@main", f"{CACHE}/models--org--b/snapshots/0123", "org/b"),
        ("gpt2", f"{CACHE}/models--gpt2/snapshots/0123", "gpt2"),
        ("org/b", f"{CACHE}/models--org--b/snapshots/0123/transformer", "org/b"),
        ("b.bin", f"{CACHE}/models--org--b/blobs/0123", "org/b"),
        ("org/b", "/home/me/org/b", None),
        ("no: [yes] # 'x'", "/home/me/no: [yes] # 'x'", None),
        ("a module in memory", "/home/me", None),
    ],
)
def test_only_a_base_that_came_from_the_hub_is_named_to_the_hub(name, path, repository):
    """A folder of one's own may be called as a stranger's repository is, and the hub refuses other names."""
    onto = {"name": name, "path": path, "fingerprint": ""}
    data = parsed(card({**METADATA, "onto": onto}, SAME)).data
    assert data.base_model == ([repository] if repository else None)
    assert ("base_model_relation" in data.to_dict()) == bool(repository)


@pytest.mark.parametrize(
    ("library", "config", "tag"),
    [
        ("transformers", {"architectures": ["LlamaForCausalLM"]}, "text-generation"),
        ("transformers", {"architectures": ["ViTForImageClassification"]}, "image-classification"),
        ("transformers", {"architectures": ["BertForSequenceClassification"]}, "text-classification"),
        ("transformers", {"architectures": ["HubertForSequenceClassification"]}, "audio-classification"),
        ("transformers", {"architectures": ["Wav2Vec2ForCTC"]}, "automatic-speech-recognition"),
        (
            "transformers",
            {"architectures": ["WhisperForConditionalGeneration"]},
            "automatic-speech-recognition",
        ),
        (
            "transformers",
            {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}},
            "image-text-to-text",
        ),
        ("transformers", {"architectures": ["T5ForConditionalGeneration"]}, None),
        ("transformers", {"architectures": ["BertModel"]}, None),
        ("transformers", {"architectures": [5]}, None),
        ("transformers", {}, None),
        ("open_clip", None, "zero-shot-image-classification"),
        ("timm", {"architecture": "vit_tiny", "num_classes": 10}, "image-classification"),
        ("timm", {"architecture": "vit_tiny", "num_classes": 0}, "image-feature-extraction"),
        ("diffusers", {"_class_name": "FluxTransformer2DModel"}, None),
        ("peft", {"task_type": "SEQ_CLS"}, "text-classification"),
        ("peft", {"task_type": None}, None),
    ],
)
def test_what_a_model_is_for_is_known_from_its_configuration_or_not_said(library, config, tag):
    assert pipeline_tag(library, config) == tag


def test_the_text_says_what_was_done_and_how_to_repeat_it():
    text = card(
        {**METADATA, "command": "transfusion transport org/tuned --base org/a --onto org/b@main -o out"}, SAME
    )
    assert "# tuned on b@main\n" in text
    assert "The fine-tune org/tuned of org/a, moved onto org/b@main" in text
    assert "```console\ntransfusion transport org/tuned --base org/a --onto org/b@main -o out\n```" in text
    assert f"| fine-tune | org/tuned | `{'f' * 64}` |" in text
    assert f"| the new base, B | org/b@main | `{'b' * 64}` |" in text
    assert "| method | guarded |" in text
    assert "| policy | residual untied, inner free, heads matched |" in text
    assert "| seed | 3 |" in text
    assert f"| BLAKE3 of π | `{'c' * 64}` |" in text
    assert "| α | 0.8 |" in text
    assert "*alignable: the units of A were found again in B*" in text
    assert "- 40 changed by the fine-tune, moved" in text
    assert "- 2 copied from the fine-tune" in text
    assert "`classifier.weight`, `classifier.bias`" in text
    assert "dropped" not in text
    assert "transfusion transport --from transfusion.json -o ../again" in text
    assert "## Licence" not in text


@pytest.mark.parametrize("start", ["moved", "base"])
def test_a_refinement_that_started_from_b_has_no_moved_change(start):
    shares = {"synthetic": 0.5}
    found = {"start": start, "measure": "answers", "before": shares, "after": shares, "kept": 0.5, "steps": 3}
    text = card({**METADATA, "refinement": found}, SAME)
    assert ("moved onto org/b@main: B + α·π(τ), made by" in text) == (start == "moved")
    assert ("onto org/b@main: B, trained to answer like the fine-tune, made by" in text) == (start == "base")
    assert ("The advice about this π" in text) == (start == "moved")


def test_several_fine_tunes_and_an_alpha_for_each_layer():
    two = [{"name": f"org/{one}", "fingerprint": "0" * 64} for one in ("one", "two")]
    text = card({**METADATA, "verb": "merge", "how": "sum", "finetuned": two, "alpha": {"default": 1, "x.0.*": 0.5}}, SAME)  # fmt: skip
    assert "# one + two on b@main" in text
    assert "The fine-tunes org/one and org/two of org/a, moved onto org/b@main, combined by sum" in text
    assert '| α | `{"default": 1, "x.0.*": 0.5}` |' in text
    assert "transfusion merge --from transfusion.json -o ../again" in text


def test_names_that_mean_something_in_markdown_are_only_names():
    hostile = "a|b `c` *d* <img src=x> [e](f)\n## g"
    text = card(
        {**METADATA, "finetuned": [{"name": hostile, "fingerprint": "`|`"}], "command": "run ```x"},
        {hostile: "mit", "org/b": None},
    )
    body = parsed(text).text
    assert r"a\|b \`c\` \*d\* \<img src=x\> \[e\](f) \#\# g" in body
    assert "<img" not in body.replace(r"\<img", "")
    assert "\n## g" not in body
    assert "````console\nrun ```x\n````" in body
    assert all(
        line.count("|") - line.count(r"\|") == 4 for line in body.splitlines() if "fine-tune |" in line
    )


def test_a_card_tells_no_absolute_path():
    place = {"name": "/home/me/my models/b", "path": "/home/me/my models/b", "fingerprint": "0" * 64}
    command = "transfusion transport '/home/me/my models/tuned' --onto='/home/me/my models/b' -o /home/me/out"
    text = card({**METADATA, "onto": place, "command": command}, {**SAME, place["name"]: None})
    assert "/home" not in text
    assert "my models" not in text
    assert "transfusion transport 'tuned' --onto='b' -o out" in text
    assert "moved onto b" in text
    assert "0" * 64 in text


def test_licences_that_differ_are_the_readers_business():
    text = card(METADATA, {"org/tuned": "mit", "org/a": "apache-2.0", "org/b": None})
    assert parsed(text).data.license == "other"
    assert "Check what their combination allows" in text
    assert "| org/a | apache-2.0 |" in text
    assert "| org/b | not stated |" in text


def test_the_licence_is_that_of_b_if_no_other_one_differs():
    text = card(METADATA, {"org/tuned": None, "org/a": None, "org/b@main": "apache-2.0"})
    assert parsed(text).data.license == "apache-2.0"
    assert "| org/tuned | not stated |" in text
    text = card(METADATA, {"org/tuned": "mit", "org/a": "mit", "org/b@main": None})
    assert "license" not in parsed(text).data.to_dict()  # and not that of another model


def test_no_licence_at_all():
    text = card(METADATA, dict.fromkeys(SAME))
    assert "license" not in parsed(text).data.to_dict()
    assert "None of the inputs states a licence" in text


def test_a_licence_with_a_name_of_its_own():
    data = parsed(card(METADATA, dict.fromkeys(SAME, "other (gemma-terms)"))).data.to_dict()
    assert (data["license"], data["license_name"]) == ("other", "gemma-terms")


@pytest.mark.parametrize(
    ("readme", "licence"),
    [
        ("---\nlicense: apache-2.0\n---\n# x", "apache-2.0"),
        ("---\nlicense: other\nlicense_name: gemma-terms\n---\n", "other (gemma-terms)"),
        ("---\nlicense: [mit, apache-2.0]\n---\n", "mit, apache-2.0"),
        ("---\ntags: [x]\n---\n", None),
        ("# no front matter", None),
        ("---\nlicense: [\n---\n", None),
        ("---\n- a list\n---\n", None),
        (None, None),
    ],
)
def test_the_licence_of_a_folder(readme, licence, tmp_path):
    if readme is not None:
        (tmp_path / "README.md").write_text(readme)
    assert licence_of(tmp_path) == licence
    (tmp_path / "unet").mkdir()
    assert licence_of(tmp_path / "unet") == licence  # of its pipeline
    (tmp_path / "model").mkdir()
    assert licence_of(tmp_path / "model") is None


def test_a_base_from_the_hub_is_named_with_its_licence(made, tmp_path, monkeypatch):
    """In the hub's cache as its library lays it out: a README.md among links to blobs."""
    repository = tmp_path / "hub" / "models--org--b"
    snapshot, blobs = repository / "snapshots" / ("0" * 40), repository / "blobs"
    for folder in (snapshot, blobs, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(snapshot.name)
    files = {path.name: path.read_bytes() for path in made("vit", 2).iterdir()}
    files["README.md"] = b"---\nlicense: apache-2.0\n---\n# B\n"
    for number, (name, content) in enumerate(files.items()):
        (blobs / str(number)).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    tuned = finetuned(CASES["vit"], made("vit", 1), tmp_path / "tuned")
    transport(tuned, base=made("vit", 1), onto="org/b", method="naive", output=tmp_path / "moved")
    data = ModelCard.load(tmp_path / "moved" / "README.md").data
    assert (data.base_model, data.base_model_relation) == (["org/b"], "finetune")
    assert data.license == "apache-2.0"
