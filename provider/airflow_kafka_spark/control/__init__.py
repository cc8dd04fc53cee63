"""What users ask of a pipeline: show it, preview it, move it, pause it, replay a window, rename it, forget it."""
