"""Sockets: unix sockets within a node, TCP between nodes, etcd, the metrics endpoint."""
