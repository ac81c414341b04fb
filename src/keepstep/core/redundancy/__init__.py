"""Who keeps whose snapshots, what that survives and what memory it takes."""
