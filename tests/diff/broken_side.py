"""A side whose import fails, as that of a release may with newer dependencies."""

raise ValueError("'qwen' is already used\nand more")
