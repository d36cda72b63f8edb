"""Built-in policies, and the information that every policy gets about its engine."""
