"""What is learned, as a part of a recipe: its data, and how they are prepared."""

from __future__ import annotations

from dirprune.lab.tasks.images import Images

__all__ = ["TASKS", "Images"]

TASKS = {task.name: task for task in (Images,)}
"""The tasks by the names that files give them."""
