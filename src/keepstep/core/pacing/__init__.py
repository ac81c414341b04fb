"""When copies may use the network: how fast it is, when it is idle, which bytes go now."""
