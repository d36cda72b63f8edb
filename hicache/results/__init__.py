"""What a run leaves behind: records, metrics, report and tracking."""
