"""Makes an environment for each peer, and says why where there can be none.

In comes a contender's name; out comes a Python that has it, or a reason. The environments stand in
`.venv/peers/`, so that `make clean` takes them along. torch.save, DCP and keepstep run in `.venv`
itself: all they need is there.

    python -m benchmarks.peers.environments torchsnapshot nvrx   # some
    python -m benchmarks.peers.environments                      # all

Invariant: torch comes first and alone, at the CPU build that `constraints.txt` beside this file
pins; no CUDA package can follow, because the same file pins those to versions that do not exist.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.saver import NAMES, NOT_BUILT

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".venv" / "peers"
CONSTRAINTS = Path(__file__).with_name("constraints.txt")
OWN = ("torch_save", "dcp_async", "keepstep")  # `.venv` has them
NEEDS = {
    "torchsnapshot": ("torchsnapshot",),
    "dlrover": ("dlrover", "grpcio"),  # which it imports and does not ask for
    "lm_resiliency": ("lm-resiliency",),
    "nvrx": ("nvidia-resiliency-ext",),
    "orbax": ("orbax-checkpoint", "jax"),
    "fastpersist": ("deepspeed",),
}


class Unavailable(Exception):
    """Why a contender cannot take part: the first line of what was in the way."""


def python_of(name: str) -> Path:
    """The Python to start it with. Raises Unavailable."""
    if name in OWN:
        return Path(sys.executable)
    if name in NOT_BUILT:
        raise Unavailable(NOT_BUILT[name])
    python = PLACE / name / "bin" / "python"
    refused = PLACE / f"{name}.why"
    if refused.exists():
        raise Unavailable(refused.read_text().strip())
    if not (PLACE / name / ".made").exists():
        raise Unavailable(f"not installed: python -m benchmarks.peers.environments {name}")
    return python


def first_error(output: str) -> str:
    """The first line that names an error, without pip's own word for it."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = [line for line in lines if "error" in line.lower()]
    return (told or lines or ["it failed and said nothing"])[0].removeprefix("ERROR: ")[:200]


def make(name: str) -> None:
    """Once; what failed is tried again. Raises Unavailable."""
    place, refused = PLACE / name, PLACE / f"{name}.why"
    if name in NOT_BUILT:
        raise Unavailable(NOT_BUILT[name])
    if name in OWN or (place / ".made").exists():
        return
    shutil.rmtree(place, ignore_errors=True)
    refused.unlink(missing_ok=True)
    PLACE.mkdir(parents=True, exist_ok=True)
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "-qq", "-c", str(CONSTRAINTS)]
    steps = [
        [sys.executable, "-m", "venv", str(place)],
        [*pip, "torch", "numpy", "setuptools", "wheel"],
        [*pip, *NEEDS[name]],
    ]
    for step in steps:
        done = subprocess.run(step, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            shutil.rmtree(place, ignore_errors=True)
            refused.write_text(first_error(done.stdout) + "\n")
            raise Unavailable(refused.read_text().strip())
    (place / ".made").touch()


def main() -> None:
    wanted = sys.argv[1:] or NAMES
    if unknown := set(wanted) - set(NAMES):
        sys.exit(f"nobody is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    for name in wanted:
        try:
            make(name)
            print(f"{name}: ready", flush=True)
        except Unavailable as error:
            print(f"{name}: not there: {error}", flush=True)


if __name__ == "__main__":
    main()
