"""What a machine is like: read, never changed."""
