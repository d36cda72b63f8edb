"""Speed of a replay, compared with an earlier commit."""
