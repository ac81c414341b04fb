"""The network of a simulated cluster: bytes between machines, and what happens to them."""
