"""keepstep inside the trainer: captures, resumes, stays when a peer is lost. `session.py` is its
public face, and `job/` what that offers."""
