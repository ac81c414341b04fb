"""What a job is made of inside the trainer: one module for each thing it offers to the program, and
for each place where it hooks into the process. `runtime/rank/session.py` is their one public face;
none of them knows it."""
