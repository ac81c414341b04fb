"""Kubernetes, as far as a job needs it: its pods, read and deleted; and whom an agent asks for
another one. The client is an extra, and only `pods_api.py` imports it."""
