"""What turns bytes into proof: checksums."""
