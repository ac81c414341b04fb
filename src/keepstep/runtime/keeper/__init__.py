"""The keeper, one a node: outlives the trainers and answers for their memory. `process.py` is its
process main."""
