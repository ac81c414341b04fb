"""The agent, one a node: starts, watches and replaces ranks. `supervisor.py` and `agent.py` are its
process mains."""
