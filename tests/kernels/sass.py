"""Text of machine code (SASS) in the form in which `nvdisasm` prints it."""


def line(text, *, stall=1, lands_on=7, is_read_on=7, waits_for=()):
    """An instruction and its control codes: stall in cycles, numbers of scoreboards (7: none)."""
    bits = sum(1 << k for k in waits_for)
    return text, stall | lands_on << 5 | is_read_on << 8 | bits << 11


def printed(*lines):
    """The text that `nvdisasm` prints of instructions made by `line` and of labels (strings)."""
    text = ""
    for place, each in enumerate(lines):
        if isinstance(each, str):
            text += f"{each}:\n"
            continue
        text += f"        /*{16 * place:04x}*/  {each[0]} ; /* 0x{0:016x} */\n"
        text += f"                                 /* 0x{each[1] << 41:016x} */\n"
    return text
