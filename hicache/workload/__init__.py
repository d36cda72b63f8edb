"""Where requests come from: recorded traces and generators."""
