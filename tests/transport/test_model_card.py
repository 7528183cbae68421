"""Model cards: front matter that the hub understands, and a text that no name can break."""

from __future__ import annotations

import pytest
from huggingface_hub import ModelCard

from transfusion.transport.model_card import card, licence_of

METADATA = {
    "transfusion": "0.1.0",
    "verb": "transport",
    "kind": "model",
    "finetuned": [{"name": "org/tuned", "fingerprint": "f" * 64, "licence": "mit"}],
    "base": {"name": "org/a", "fingerprint": "a" * 64},
    "onto": {"name": "org/b@main", "fingerprint": "b" * 64},
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
SAME = {"org/tuned": "mit", "org/a": "mit", "org/b": "mit"}


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
        ({"onto": {"name": "no: [yes] # 'x'", "fingerprint": ""}}, "base_model", ["no: [yes] # 'x'"]),
        ({"onto": {"name": "1.0", "fingerprint": ""}}, "base_model", ["1.0"]),
    ],
)
def test_kinds_of_outputs(change, key, value):
    assert parsed(card({**METADATA, **change}, SAME)).data.to_dict()[key] == value


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
    place = {"name": "/home/me/my models/b", "fingerprint": "0" * 64}
    command = "transfusion transport '/home/me/my models/tuned' --onto='/home/me/my models/b' -o /home/me/out"
    text = card({**METADATA, "onto": place, "command": command}, {**SAME, place["name"]: None})
    assert "/home" not in text
    assert "my models" not in text
    assert "transfusion transport 'tuned' --onto='b' -o out" in text
    assert "moved onto b" in text
    assert parsed(text).data.base_model == ["b"]
    assert "0" * 64 in text


def test_licences_that_differ_are_the_readers_business():
    text = card(METADATA, {"org/tuned": "mit", "org/a": "apache-2.0", "org/b": None})
    assert parsed(text).data.license == "other"
    assert "Check what their combination allows" in text
    assert "| org/a | apache-2.0 |" in text
    assert "| org/b | not stated |" in text


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
