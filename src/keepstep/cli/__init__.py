"""Arguments and wiring."""
