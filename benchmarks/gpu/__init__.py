"""What is to be asked of keepstep on a device: `docs/gpu.md` has the commands and the answers."""
