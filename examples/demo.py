"""`keepstep demo`, in a checkout: what `make demo` runs."""

import sys

from keepstep.testing.demo import demonstrate

if __name__ == "__main__":
    sys.exit(demonstrate())
