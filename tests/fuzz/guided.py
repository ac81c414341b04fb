"""`python -m tests.fuzz.guided NAME [libFuzzer's options]`: one decoder under inputs that look for
ways through its code that none has gone yet, by atheris (`pip install 'keepstep[fuzz]'`).

    python -m tests.fuzz.guided layout -runs=1000000 -max_len=4096
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["keepstep"]):
    from tests.fuzz.decoders import all_decoders


def main() -> None:
    name = sys.argv.pop(1)
    decoder = all_decoders()[name]

    def one(said: bytes) -> None:
        said = decoder.seal(said)
        try:
            found = decoder.read(said)
        except decoder.refuses:
            return
        decoder.same(found, said)

    with tempfile.TemporaryDirectory(prefix="keepstep-fuzz-") as corpus:
        for number, seed in enumerate(decoder.seeds):
            (Path(corpus) / str(number)).write_bytes(seed)
        atheris.Setup([*sys.argv, corpus], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
