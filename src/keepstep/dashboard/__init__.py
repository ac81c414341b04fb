"""What people see: job directory and journal -> view -> terminal."""
