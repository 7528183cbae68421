"""The notation: a layout names the axes of a tensor, dimension by dimension.

    (head qk) <- x                            a query projection, stored (out, in)
    x -> [(head qk)|(head qk)|(head vo)]      GPT-2's fused projection, stored (in, out)
    vocab -> x@first                          an embedding: from tokens to the stream
    x                                         a bias, or the weight of a norm
    _ position x@first                        position embeddings with a leading 1

One item per dimension. ``( a b )`` is a product, row-major; ``[ p | q ]`` a concatenation; ``_`` a
dimension that no map moves and whose size is not known beforehand. An optional arrow points from a
linear map's inputs to its outputs; it changes nothing about the order of the dimensions.

Three steps, none of which needs torch: `parse` a string, `solve_sizes` from a shape, and then
either `index_map` (where each position of a dimension comes from when its axes are permuted) or
`explode` (the tensor as pieces whose dimensions are single axes).
"""

from transfusion.architecture.layouts.axis_sizes import size_of, solve_sizes
from transfusion.architecture.layouts.index_maps import AxisFactor, Index, explode, index_map
from transfusion.architecture.layouts.notation import (
    ANONYMOUS,
    Concat,
    Item,
    Layout,
    Name,
    Product,
    names_in,
    parse,
)

__all__ = [
    "ANONYMOUS",
    "AxisFactor",
    "Concat",
    "Index",
    "Item",
    "Layout",
    "Name",
    "Product",
    "explode",
    "index_map",
    "names_in",
    "parse",
    "size_of",
    "solve_sizes",
]
