"""gpt.py on two nodes of a Ray cluster, protected. Start it where Ray is: a driver, or a job.

ray job submit --working-dir . -- python examples/ray/train.py --steps 300
"""

from __future__ import annotations

import sys

import ray

import keepstep.ray


def main() -> int:
    ray.init()
    return keepstep.ray.run(
        ["examples/gpt.py", *sys.argv[1:]],
        nodes=2,
        nproc_per_node=1,
        options=["--job", "gpt-on-ray", "--redundancy", "copies:2"],
    )


if __name__ == "__main__":
    sys.exit(main())
