"""PEFT adapters read from their own files, without PEFT: same kind in, same kind out.

`kinds` says what each kind stores and what it does to a weight, `changes` has the formulas, `refused` the
reasons why other kinds stay behind, `settings` what a configuration says about one module, and `reading`
brings them together with a base.
"""

from transfusion.adapter.kinds import Kind, Part, Reference
from transfusion.adapter.reading import CONFIG, Adapter, Factor, is_adapter
from transfusion.adapter.settings import Settings

__all__ = ["CONFIG", "Adapter", "Factor", "Kind", "Part", "Reference", "Settings", "is_adapter"]
