"""How a run ends: the line that loads what it wrote, by library and kind."""

from __future__ import annotations

import pytest

from transfusion.transport.outcome import load_line

ONTO = {"onto": {"name": "models/b"}}


@pytest.mark.parametrize(
    ("record", "place", "line"),
    [
        ({"library": "transformers", "class": "BertModel", "kind": "model"}, "out", 'transformers.BertModel.from_pretrained("out")'),
        ({"library": "transformers", "class": None, "kind": "model"}, "out", 'transformers.AutoModel.from_pretrained("out")'),
        ({"library": "timm", "class": None, "kind": "adapter"}, "out", 'peft.PeftModel.from_pretrained(b, "out")'),
        ({"library": "diffusers", "class": "Unet", "kind": "adapter", "file_format": "kohya"}, "o.safetensors", 'pipeline.load_lora_weights("o.safetensors"), or as the file that was moved'),
        ({"library": "open_clip", "class": None, "kind": "model"}, "o.safetensors", 'model.load_state_dict(safetensors.torch.load_file("o.safetensors")), as B is loaded'),
    ],
)  # fmt: skip
def test_the_line_that_loads_an_output_is_of_its_library(record, place, line):
    assert load_line({**record, **ONTO}, place) == line
