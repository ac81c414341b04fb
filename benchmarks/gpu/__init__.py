"""What is to be asked of keepstep on a device: `docs/gpu.md` has the commands. Nothing here has
run on one."""
