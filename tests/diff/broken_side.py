"""A side whose import fails, as a release may with dependencies it does not know."""

raise ValueError("'qwen' is already used\nand more")
