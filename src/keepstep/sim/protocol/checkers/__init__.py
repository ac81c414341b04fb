"""What must hold in every run, one property a file; each says what it does not verify."""
