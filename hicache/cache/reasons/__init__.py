"""Why an admitted request computes what it computes: one reason for every token."""
