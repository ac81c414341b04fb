"""What decides: pure functions and state machines without clock, random, IO or torch."""
