"""The names in files of Stable Diffusion 1.5, 2 and XL as their authors distribute them."""

from __future__ import annotations

from collections.abc import Iterator

# Their blocks are numbered through: two layers and a change of resolution at a time, or three layers.
RESNET_THERE = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
PLACES = {
    **{f"input_blocks.{1 + 3 * i + j}": f"down_blocks.{i} {j}" for i in range(4) for j in range(2)},
    **{f"output_blocks.{3 * i + j}": f"up_blocks.{i} {j}" for i in range(4) for j in range(3)},
}
TRANSFORMER = """
norm proj_in proj_out
transformer_blocks.{}.norm1 transformer_blocks.{}.norm2 transformer_blocks.{}.norm3
transformer_blocks.{}.attn1.to_q transformer_blocks.{}.attn1.to_k transformer_blocks.{}.attn1.to_v
transformer_blocks.{}.attn2.to_q transformer_blocks.{}.attn2.to_k transformer_blocks.{}.attn2.to_v
transformer_blocks.{}.attn1.to_out.0 transformer_blocks.{}.attn2.to_out.0
transformer_blocks.{}.ff.net.0.proj transformer_blocks.{}.ff.net.2
"""
ENDS_THERE = """
input_blocks.0.0   conv_in
time_embed.0       time_embedding.linear_1
time_embed.2       time_embedding.linear_2
label_emb.0.0      add_embedding.linear_1
label_emb.0.2      add_embedding.linear_2
out.0              conv_norm_out
out.2              conv_out
"""


def _original() -> Iterator[str]:
    """Yield the authors' name of every module, and ours."""
    resnets = {"middle_block.0": "mid_block.resnets.0", "middle_block.2": "mid_block.resnets.1"}
    attentions = {"middle_block.1": "mid_block.attentions.0"}
    for there, here in PLACES.items():
        block, layer = here.split()
        resnets[f"{there}.0"] = f"{block}.resnets.{layer}"
        attentions[f"{there}.1"] = f"{block}.attentions.{layer}"
    for there, here in resnets.items():
        yield from (f"{there}.{theirs}   {here}.{ours}" for theirs, ours in RESNET_THERE.items())
    for there, here in attentions.items():
        yield from (f"{there}.{name}   {here}.{name}" for name in TRANSFORMER.split())
    for level in range(3):
        yield f"input_blocks.{3 * level + 3}.0.op   down_blocks.{level}.downsamplers.0.conv"
        for place in (1, 2):
            yield f"output_blocks.{3 * level + 2}.{place}.conv   up_blocks.{level}.upsamplers.0.conv"
    yield from ENDS_THERE.strip().splitlines()


ORIGINAL = "\n".join(_original())
