"""Policies compared on failures drawn from seeds: what a cluster of any size would gain and pay."""
