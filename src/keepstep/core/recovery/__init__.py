"""What follows a failure: restarts and their budgets, attempts of agents, who leads, when a job is
over."""
