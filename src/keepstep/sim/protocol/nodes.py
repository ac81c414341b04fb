"""Nodes: what keepstep runs on one simulated machine: its supervised agent, its keeper, the ranks,
and how they find each other.

`AgentProcess` and `KeeperProcess` run the product's `Agent` and `Keeper` on the ports of this
simulation; they stand in for `runtime/agent/process.py` and `runtime/keeper/process.py`, which make
the real ones. Here nothing is decided.
"""

from __future__ import annotations
