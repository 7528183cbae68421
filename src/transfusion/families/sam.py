"""Segment Anything (SAM) as in transformers: a ViT with windows, and a small decoder of masks.

Distances along rows and columns are learned vectors that all heads compare their queries with: units of
queries and keys move, in one order for all heads. Windows are cut out of the stream before the attention, so
that no module shows its output in the stream's places: the stream has one point per block.
"""

from __future__ import annotations

from typing import Any

from transfusion.architecture.table import Axis, Component, Config, Family, Stack, Table, fixed
from transfusion.families._composition import component_table
from transfusion.families._placeholders import Inputs
from transfusion.families._shared import HARMLESS, PATCH, PLAIN

ROWS = """
pos_embed                       _ _ _ x@first
patch_embed.projection.*        x@first <- channel row column
layers.{}.layer_norm1.*         scale x
layers.{}.attn.qkv.*            [(head qk)|(head qk)|(head vo)] <- x
layers.{}.attn.rel_pos_h?       _ qk
layers.{}.attn.rel_pos_w?       _ qk
layers.{}.attn.proj.*           x <- (head vo)
layers.{}.layer_norm2.*         scale x
layers.{}.mlp.lin1.*            ffn <- x
layers.{}.mlp.lin2.*            x@next <- ffn
neck.conv1.weight               neck <- x@last _ _
neck.layer_norm1.*              scale neck
neck.conv2.weight               embedding <- neck _ _
neck.layer_norm2.*              scale embedding
"""
SHORTCUTS = "layers.{}.layer_norm2   x -> x@next   layers.{}.mlp.lin2"
AXES = (
    Axis("head"),
    Axis("qk"),
    Axis("vo", within="head"),
    Axis("ffn"),
    *PATCH,
)
EMBEDDING = fixed("embedding", "prompts are placed in it by sines and cosines")


def vision(config: Config, names: frozenset[str]) -> Table:
    width = config.get("hidden_size", 768)
    ffn = config.get("mlp_dim") or int(width * config.get("mlp_ratio", 4.0))
    sizes = {"x": width, "head": config.get("num_attention_heads", 12), "ffn": ffn}
    depth = config.get("num_hidden_layers", 12)
    stack = Stack("vision", depth, ROWS, AXES, sizes, SHORTCUTS, points=("x",))
    return Table(stacks=(stack,), axes=(Axis("neck", scope="model"), EMBEDDING))


# ── the decoder of masks ─────────────────────────────────────────────────────────────────────


def _attention(module: str, kind: str) -> str:
    """Rows of an attention whose heads have a width of their own."""
    return f"""
    {module}.q_proj.*     ({kind}head {kind}qk) <- embedding
    {module}.k_proj.*     ({kind}head {kind}qk) <- embedding
    {module}.v_proj.*     ({kind}head {kind}vo) <- embedding
    {module}.out_proj.*   embedding <- ({kind}head {kind}vo)
    """


def _heads(kind: str) -> tuple[Axis, ...]:
    head, qk = f"{kind}head", f"{kind}qk"
    return (Axis(head), Axis(qk, within=head), Axis(f"{kind}vo", within=head, tied_with=qk))


LAYER = "mask_decoder.transformer.layers.{}"
DECODER = f"""
{_attention(f"{LAYER}.self_attn", "")}
{_attention(f"{LAYER}.cross_attn_token_to_image", "token_")}
{_attention(f"{LAYER}.cross_attn_image_to_token", "image_")}
{LAYER}.layer_norm1.*   scale embedding
{LAYER}.layer_norm2.*   scale embedding
{LAYER}.layer_norm3.*   scale embedding
{LAYER}.layer_norm4.*   scale embedding
{LAYER}.mlp.lin1.*      ffn <- embedding
{LAYER}.mlp.lin2.*      embedding <- ffn
"""
OTHERS = f"""
{_attention("mask_decoder.transformer.final_attn_token_to_image", "final_")}
mask_decoder.transformer.layer_norm_final_attn.*   scale embedding
mask_decoder.iou_token.weight                      _ embedding
mask_decoder.mask_tokens.weight                    _ embedding
mask_decoder.iou_prediction_head.proj_in.*         score_in <- embedding
mask_decoder.iou_prediction_head.layers.0.*        score_out <- score_in
mask_decoder.iou_prediction_head.proj_out.*        _ <- score_out
mask_decoder.upscale_conv1.weight                  embedding upscaled _ _
mask_decoder.upscale_conv1.bias                    upscaled
mask_decoder.upscale_layer_norm.*                  scale upscaled
mask_decoder.upscale_conv2.weight                  upscaled mask _ _
mask_decoder.upscale_conv2.bias                    mask
prompt_encoder.no_mask_embed.weight                _ embedding
prompt_encoder.not_a_point_embed.weight            _ embedding
prompt_encoder.mask_embed.conv1.weight             _ _ _ _
prompt_encoder.mask_embed.conv1.bias               _
prompt_encoder.mask_embed.layer_norm1.*            _
prompt_encoder.mask_embed.conv2.weight             _ _ _ _
prompt_encoder.mask_embed.conv2.bias               _
prompt_encoder.mask_embed.layer_norm2.*            _
prompt_encoder.mask_embed.conv3.weight             embedding _ _ _
prompt_encoder.mask_embed.conv3.bias               embedding
shared_image_embedding.positional_embedding        _ _
"""
MASKS = """
mask_decoder.output_hypernetworks_mlps.{i}.proj_in.*    first_{i} <- embedding
mask_decoder.output_hypernetworks_mlps.{i}.layers.0.*   second_{i} <- first_{i}
mask_decoder.output_hypernetworks_mlps.{i}.proj_out.*   mask <- second_{i}
"""


# The first mask is the answer to a prompt that is not ambiguous. Probes show the others, so its units stay.
FIRST_MASK = MASKS.format(i=0).replace("first_0", "_").replace("second_0", "_")


def whole(config: Config, names: frozenset[str]) -> Table:
    tower = component_table(FAMILY, config, names, "vision_config")
    decoder = {"num_hidden_layers": 2, "num_attention_heads": 8, **config.get("mask_decoder_config", {})}
    prompts = config.get("prompt_encoder_config", {})
    masks = range(decoder.get("num_multimask_outputs", 3) + 1)
    points = range(prompts.get("num_point_embeddings", 4))
    heads = decoder["num_attention_heads"]
    stack = Stack(
        "decoder",
        decoder["num_hidden_layers"],
        DECODER,
        (*_heads(""), *_heads("token_"), *_heads("image_"), Axis("ffn")),
        {"head": heads, "token_head": heads, "image_head": heads},
    )
    own = ["score_in", "score_out", "upscaled", "mask"]
    own += [f"{place}_{i}" for i in masks[1:] for place in ("first", "second")]
    rows = [
        OTHERS,
        FIRST_MASK,
        *(MASKS.format(i=i) for i in masks[1:]),
        *(f"prompt_encoder.point_embed.{i}.weight   _ embedding" for i in points),
    ]
    return Table(
        stacks=(*tower.stacks, stack),
        axes=(*tower.axes, *_heads("final_"), *(Axis(name) for name in own)),
        rows="\n".join(row.strip() for row in rows),
        sizes={"final_head": heads},
        ties={"prompt_encoder.shared_embedding.positional_embedding": POSITIONS},
    )


POSITIONS = "shared_image_embedding.positional_embedding"


def inputs(config: Config, given: Inputs) -> Inputs:
    """Every image is asked about with one point."""
    pixels = given["pixel_values"]
    side = pixels.shape[-1]
    return {**given, "input_points": pixels.new_tensor([[[[side / 3, side / 2]]]] * len(pixels))}


KEYS = HARMLESS | {
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "mlp_dim", "mlp_ratio", "output_channels"),
    *("image_size", "patch_size", "num_channels", "qkv_bias", "use_abs_pos", "use_rel_pos", "window_size"),
    *("global_attn_indexes", "num_pos_feats", "scale"),
}


def _part(name: str, table: Any, keys: frozenset[str], **required: tuple[Any, ...]) -> Family:
    needs = {**PLAIN, **required}
    return Family(name=name, library="transformers", table=table, known_keys=keys, required=needs)


def _none(config: Config, names: frozenset[str]) -> Table:
    raise NotImplementedError("described with the whole model")


FAMILY = Family(
    name="sam",
    library="transformers",
    table=whole,
    signature=(
        "vision_encoder.patch_embed.projection.weight",
        "vision_encoder.layers.0.attn.qkv.weight",
        "mask_decoder.iou_token.weight",
        "prompt_encoder.no_mask_embed.weight",
    ),
    model_types=("sam",),
    inputs=("image",),
    arrange=inputs,
    components={
        "vision_config": Component("vision_encoder.", family=_part("sam-tower", vision, KEYS)),
        "mask_decoder_config": Component(
            "mask_decoder.",
            family=_part(
                "sam-decoder",
                _none,
                HARMLESS
                | {"hidden_size", "mlp_dim", "num_hidden_layers", "num_attention_heads"}
                | {"attention_downsample_rate", "num_multimask_outputs", "iou_head_hidden_dim"},
                iou_head_depth=(3,),
            ),
        ),
        "prompt_encoder_config": Component(
            "prompt_encoder.",
            family=_part(
                "sam-prompts",
                _none,
                HARMLESS
                | {"hidden_size", "image_size", "patch_size", "image_embedding_size"}
                | {"mask_input_channels", "num_point_embeddings"},
            ),
        ),
    },
    known_keys=HARMLESS,
    required=PLAIN,
)

FAMILIES = (
    FAMILY,
    Family(
        name="sam-vision",
        library="transformers",
        table=vision,
        signature=(
            "patch_embed.projection.weight",
            "layers.0.attn.qkv.weight",
            "layers.0.mlp.lin1.weight",
            "neck.conv1.weight",
        ),
        model_types=("sam_vision_model",),
        inputs=("image",),
        prefixes=("vision_encoder.",),
        known_keys=KEYS,
        required=PLAIN,
    ),
)
