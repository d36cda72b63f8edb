"""Programs that each answer one question."""
