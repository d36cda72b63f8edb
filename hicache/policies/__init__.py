"""What a policy of the user's own is built with."""
