"""What is learned, as a part of a recipe: its data, and how they are prepared."""

from __future__ import annotations

from dirprune.lab.tasks.images import Images
from dirprune.lab.tasks.measure import Measure
from dirprune.lab.tasks.text import Text

__all__ = ["TASKS", "Images", "Measure", "Task", "Text"]

Task = Images | Text

TASKS: dict[str, type[Task]] = {task.name: task for task in (Images, Text)}
"""The tasks by the names that files give them."""
