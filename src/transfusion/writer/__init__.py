"""Writing: everything goes to a temporary place first and appears whole, or not at all.

`places` says what may be written where, `workshop` makes an output beside its place and resumes what was
interrupted, `shards` streams tensors into files, and `models` puts a model together.
"""

from transfusion.writer.models import Files, complete_model, named, remarks_in, write_shards
from transfusion.writer.places import (
    beside,
    publish_file,
    require_writable,
    write_json,
    write_tensors,
    write_text,
)
from transfusion.writer.shards import Block, Parcel, write_shard
from transfusion.writer.workshop import TensorShape, Workshop, staged_folder, workshop

__all__ = [
    "Block",
    "Files",
    "Parcel",
    "TensorShape",
    "Workshop",
    "beside",
    "complete_model",
    "named",
    "publish_file",
    "remarks_in",
    "require_writable",
    "staged_folder",
    "workshop",
    "write_json",
    "write_shard",
    "write_shards",
    "write_tensors",
    "write_text",
]
