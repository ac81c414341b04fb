"""DCP: one generation's state to a checkpoint in PyTorch's Distributed Checkpoint format, and back.

`tree` names the values of a rank, `plan` decides which rank writes which of them, `write` writes a
node's part and publishes the whole, `read` reads it, `files` is what PyTorch sees of the store.

`torch.distributed.checkpoint.load` and `dcp_to_torch_save` read such a checkpoint without keepstep:
the names are DCP's own, the plans go through its planner, the files through its writer. Beside the
state's own names it holds `keepstep.tree` (the tree's shape: DCP forgets empty containers and turns
keys into text) and, for a value that differs between ranks, `ranks.<r>.<name>` with each rank's
own; the plain name then holds that of the lowest rank.
"""
