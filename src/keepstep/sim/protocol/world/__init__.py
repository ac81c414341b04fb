"""Virtual time, and what machines and processes of a simulated cluster are made of."""
