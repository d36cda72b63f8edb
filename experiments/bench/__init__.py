"""What a replay costs, beside what it cost before."""
