"""How the work of a step is shared among ranks, and what is done about one that is slow."""
