"""The protocol simulator: the real keepers on a simulated cluster, in virtual time, from one seed
(docs/simulation.md)."""
