"""Checkpoints in a store (a disk, S3) and the files they are made of."""
