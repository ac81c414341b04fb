"""The persister, a child of the keeper: writes checkpoints. `process.py` is its process main."""
