"""The vocabulary of breaking things: ``from faults import Kill, Hang, NaN, Raise``."""

from faults.base import Fault, Target
from faults.hang import Hang
from faults.kill import Kill
from faults.numeric import NaN
from faults.raising import Raise

#: Every fault there is, for catalogues and strategies.
CATALOGUE: tuple[type[Fault], ...] = (Kill, Hang, NaN, Raise)

__all__ = ["CATALOGUE", "Fault", "Hang", "Kill", "NaN", "Raise", "Target"]
