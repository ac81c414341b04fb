"""What follows a failure: restarts and their budgets, rounds of agents, who leads, when a job is
over."""
