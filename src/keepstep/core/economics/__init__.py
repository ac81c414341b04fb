"""What protection costs and what it saves: expectations, plans, accounts of time, checkpoints worth
keeping."""
