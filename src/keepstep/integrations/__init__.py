"""Other people's training loops, protected. Each module needs the library it is named after, and is
imported by nobody but the program: `from keepstep.integrations.hf import ProtectedTrainer`."""
