"""What the tasks of a sweep do, by phase (stages.task.Phase), and what their rows give."""
