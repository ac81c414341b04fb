"""NIXL for tests: over UCX's TCP on loopback, which needs no device, or a reason why not."""

from __future__ import annotations

import os

import pytest

from keepstep.edge.os.needs import has_nixl

# Before any keeper's process is started: nothing else can be had without a network card for RDMA.
os.environ.setdefault("UCX_TLS", "tcp")
os.environ.setdefault("UCX_NET_DEVICES", "lo")

needs_nixl = pytest.mark.skipif(
    not has_nixl(), reason="NIXL is not installed: pip install 'keepstep[nixl]' (68 MB)"
)
