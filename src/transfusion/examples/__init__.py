"""Raw examples from anywhere: pictures and texts, as people keep them, and what they should be called."""

from transfusion.examples.pictures import PICTURES, Picture, pictures_below
from transfusion.examples.raw import Columns, Examples
from transfusion.examples.reading import read
from transfusion.examples.tables import TABLES, lines

__all__ = ["PICTURES", "TABLES", "Columns", "Examples", "Picture", "lines", "pictures_below", "read"]
