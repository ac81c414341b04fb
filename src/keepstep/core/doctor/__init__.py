"""Whether a machine is fit for keepstep and training, and what to do where it is not."""
