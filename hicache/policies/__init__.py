"""Built-in policies, and the information that every policy is built with."""
