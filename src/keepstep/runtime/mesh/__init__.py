"""What a keeper does with the keepers of other nodes."""
