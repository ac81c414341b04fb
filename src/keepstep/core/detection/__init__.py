"""What is slow, stopped or dead, and who is at fault: decided from samples, with no clock of its
own."""
