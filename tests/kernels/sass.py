"""Machine code as `nvdisasm` prints it."""


def line(text, *, stall=1, lands_on=7, is_read_on=7, waits_for=()):
    """An instruction with its control codes; 7 is no scoreboard."""
    bits = sum(1 << k for k in waits_for)
    return text, stall | lands_on << 5 | is_read_on << 8 | bits << 11


def printed(*lines):
    """The text of instructions, and of labels, which are strings."""
    text = ""
    for place, each in enumerate(lines):
        if isinstance(each, str):
            text += f"{each}:\n"
            continue
        text += f"        /*{16 * place:04x}*/  {each[0]} ; /* 0x{0:016x} */\n"
        text += f"                                 /* 0x{each[1] << 41:016x} */\n"
    return text
