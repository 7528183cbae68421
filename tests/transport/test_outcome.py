"""How a run ends: the line that loads what it wrote, by library and kind."""

from __future__ import annotations

import pytest

from transfusion.transport.outcome import load_line

ONTO = {"onto": {"name": "models/b"}}


@pytest.mark.parametrize(
    ("record", "place", "line"),
    [
        ({"library": "transformers", "class": "BertModel", "kind": "model"}, "out", 'import transformers; model = transformers.BertModel.from_pretrained("out")'),
        ({"library": "transformers", "class": None, "kind": "model"}, "out", 'import transformers; model = transformers.AutoModel.from_pretrained("out")'),
        ({"library": "timm", "class": None, "kind": "adapter"}, "out", 'import peft; model = peft.PeftModel.from_pretrained(b, "out")  # b: the new base, as you load it'),
        ({"library": "diffusers", "class": "Unet", "kind": "adapter", "file_format": "kohya"}, "o.safetensors", 'pipeline.load_lora_weights("o.safetensors")  # or as the file that was moved'),
        ({"library": "open_clip", "class": None, "kind": "model"}, "o.safetensors", 'import safetensors.torch; model.load_state_dict(safetensors.torch.load_file("o.safetensors"))  # model: made as B is'),
    ],
)  # fmt: skip
def test_the_line_that_loads_an_output_is_of_its_library(record, place, line):
    assert load_line({**record, **ONTO}, place) == line
    compile(line, "pasted", "exec")
