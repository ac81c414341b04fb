"""A cluster that is not there: what a policy would be worth on it, drawn from one seed."""
