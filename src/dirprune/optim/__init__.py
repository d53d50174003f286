"""gRDA as torch optimizers. Start with ``reference.py``, the paper's update as it stands: all paths repeat it."""

from dirprune.optim.adam import AdamGRDA
from dirprune.optim.grda import GRDA
from dirprune.optim.groups import prunable_groups

__all__ = ["GRDA", "AdamGRDA", "prunable_groups"]
