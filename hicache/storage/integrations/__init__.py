"""Our stores inside other systems."""
