"""A job on a simulated cluster: keepstep's own ranks, agents and keepers, and a training."""
