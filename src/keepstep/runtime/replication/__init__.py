"""What keepers of several nodes do for each other: copies and parities sent, held, fetched and
mended."""
