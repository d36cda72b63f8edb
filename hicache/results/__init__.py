"""The results of a run: records, metrics, report and tracking."""
