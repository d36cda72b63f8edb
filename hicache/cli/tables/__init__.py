"""Stored runs side by side: groups, tables, figures, paired comparisons."""
