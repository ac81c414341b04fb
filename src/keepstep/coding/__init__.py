"""What turns bytes into proof and into parity: checksums, XOR, Reed-Solomon; each fast one tested
against a slow one."""
