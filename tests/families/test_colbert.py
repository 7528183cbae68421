"""ColBERT: a linear map on top of an encoder, in a class that transformers does not have."""

from __future__ import annotations

import json

import pytest
import transformers
from safetensors.torch import save_file
from torch import nn

from cases.encoders import MODERNBERT
from cases.first import BERT
from transfusion.errors import ArchitectureError
from transfusion.families import all_families
from transfusion.matching.align import align
from transfusion.model.model import Model
from transfusion.running.live_model import LiveModel
from transfusion.transport.transport import transport
from transfusion.verification.certify import certify, randomise

ENCODERS = {"bert": (transformers.BertModel, BERT), "modernbert": (transformers.ModernBertModel, MODERNBERT)}


class ColBERT(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        made_by, settings = ENCODERS[kind]
        self.encoder = "bert" if kind == "bert" else "model"
        setattr(self, self.encoder, made_by(made_by.config_class(**settings)))
        self.config = getattr(self, self.encoder).config
        self.linear = nn.Linear(self.config.hidden_size, 11, bias=False)

    def forward(self, **inputs):
        return {"embeddings": self.linear(getattr(self, self.encoder)(**inputs).last_hidden_state)}


@pytest.mark.parametrize("kind", ENCODERS)
def test_its_embeddings_stay_where_they_are(kind):
    family = next(family for family in all_families() if kind in family.model_types)
    module = randomise(ColBERT(kind), 1).double().eval()
    certificate = certify(LiveModel.from_module(module, family, module.config.to_dict()))
    assert certificate.passed, "\n".join(map(str, certificate.failures))
    assert "the fixed axis match" in {check.what for check in certificate.checks}


def test_files_are_moved_and_not_run(tmp_path):
    for seed, name in enumerate(("a", "b", "tuned")):
        module = randomise(ColBERT("bert"), seed)
        (tmp_path / name).mkdir()
        save_file(module.state_dict(), tmp_path / name / "model.safetensors", {"format": "pt"})
        config = {**module.config.to_dict(), "architectures": ["HF_ColBERT"]}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    a, b = tmp_path / "a", tmp_path / "b"
    pi = align(a, b, advice=False)
    moved = transport(tmp_path / "tuned", base=a, onto=b, via=pi, trust_base=True)
    assert moved.state_dict()["linear.weight"].shape == (11, 24)
    with pytest.raises(ArchitectureError, match="a class HF_ColBERT that transformers"):
        LiveModel.of(Model.open(a))
