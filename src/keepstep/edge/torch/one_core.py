"""One core: a thread of keepstep's computes on one, whatever the program gave to its own.

Torch spreads an operator over a pool of threads, and each thread that calls one has a pool of its
own, whose threads wait for the next operator without sleeping. `torch.set_num_threads` holds for
the thread that calls it and for those that begin to compute later; the BLAS below asks nobody
before its first call. So a few small sums beside the trainer took a second core, or half of the
trainer's where it was pinned. Decides nothing.
"""

from __future__ import annotations

import threading

import torch


def compute_on_one_core() -> None:
    """From now on, on the calling thread. Threads that the program begins get as many as before: a
    thread that lives for that call alone puts their number back."""
    programs = torch.get_num_threads()
    if programs == 1:  # and asked for, it holds for the BLAS too
        return
    torch.set_num_threads(1)
    puts_back = threading.Thread(target=torch.set_num_threads, args=(programs,))
    puts_back.start()
    puts_back.join()
