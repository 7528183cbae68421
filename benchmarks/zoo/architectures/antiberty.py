"""AntiBERTy: BERT of transformers with three heads more, for which a table of a few lines is enough.

transfusion verify --architecture benchmarks/zoo/architectures/antiberty.py --model AntiBERTy
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForPreTraining, BertModel

from transfusion.families import read_families

TABLE = """
family antiberty : bert
library mine
models bert
signature + cls.species.weight
heads
    cls.species.*   species <- pool
    cls.chain.*     chain <- pool
    cls.graft.*     graft <- pool
fixed species: the order of the species is the meaning of the output
fixed chain: heavy and light, in this order
fixed graft: grafted or not, in this order
"""


class AntiBERTy(nn.Module):
    """The model: an encoder, and what reads its tokens and its pooled state."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        config = BertConfig(**settings)
        whole = BertForPreTraining(config)
        self.bert: BertModel = whole.bert
        self.cls = nn.Module()
        self.cls.predictions = whole.cls.predictions
        for name, classes in (("species", 6), ("chain", 2), ("graft", 2)):
            self.cls.add_module(name, nn.Linear(config.hidden_size, classes))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        states, pooled = self.bert(input_ids, attention_mask, return_dict=False)[:2]
        found = {"logits": self.cls.get_submodule("predictions")(states)}
        return found | {
            f"{name}_logits": self.cls.get_submodule(name)(pooled) for name in ("species", "chain", "graft")
        }


def build(config: Mapping[str, Any]) -> AntiBERTy:
    """Return the module of a config.json."""
    return AntiBERTy(**config)


def make_inputs(config: Mapping[str, Any], count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return random chains of amino acids between the marks of their ends."""
    length = min(64, config["max_position_embeddings"])
    ids = torch.randint(5, config["vocab_size"], (count, length), generator=generator)
    ids[:, 0], ids[:, -1] = 2, 3
    return {"input_ids": ids}


FAMILIES = read_families(TABLE, __file__, build=build, make_inputs=make_inputs)

# All sizes differ, so that a mistake in the table cannot go unnoticed.
EXAMPLE = {
    **{"vocab_size": 25, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3},
    **{"intermediate_size": 20, "max_position_embeddings": 11, "type_vocab_size": 2},
}
