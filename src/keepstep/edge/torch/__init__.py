"""The only place that imports torch: capture, restore, random states, checkpoint format."""
