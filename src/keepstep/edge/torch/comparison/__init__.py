"""Two saved states side by side: their bytes first, and numbers where bytes differ.

    saved.py     what a slot has, read and proven piece by piece
    records.py   the same of a checkpoint in a store
    tensors.py   two tensors, a pair of windows at a time
    numbers.py   what is said of values whose bytes differ

Nothing here makes an object that saved bytes name, and none of it holds a whole tensor.
"""
