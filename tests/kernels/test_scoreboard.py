"""The static model of machine code, on short texts whose timing is a formula."""

import pytest

from hicache.workbench import scoreboard
from hicache.workbench.scoreboard import GHZ, INDEX_NS, OTHER_CYCLES, SHARED_OF_SM

PAYLOAD_NS = 1000.0
PAYLOAD, INDEX = PAYLOAD_NS * GHZ, INDEX_NS * GHZ  # cycles


def line(text, *, stall=1, lands_on=7, is_read_on=7, waits_for=()):
    """An instruction with its control codes; 7 is no scoreboard."""
    bits = sum(1 << k for k in waits_for)
    return text, stall | lands_on << 5 | is_read_on << 8 | bits << 11


def read(*lines):
    text = ""
    for place, each in enumerate(lines):
        if isinstance(each, str):
            text += f"{each}:\n"
            continue
        text += f"        /*{16 * place:04x}*/  {each[0]} ; /* 0x{0:016x} */\n"
        text += f"                                 /* 0x{each[1] << 41:016x} */\n"
    return scoreboard.read(text)


def looped(*lines):
    return read(".L_x_0", *lines, line("@P0 BRA `(.L_x_0)"), line("EXIT"))


def steady(instructions, num_warps=4):
    payload = scoreboard.payload_of(instructions)
    return scoreboard.steady(instructions, payload, num_warps=num_warps, payload_ns=PAYLOAD_NS)


def turn_cycles(instructions, payload_bytes, num_warps=4):
    """Cycles of a turn of the loop."""
    return 32 * num_warps * payload_bytes * GHZ / steady(instructions, num_warps).gb_per_s


LOAD = line("LDG.E.128 R4, desc[UR4][R2.64]", stall=2, lands_on=0)
STORE = line("STG.E.128 desc[UR4][R8.64], R4", waits_for=[0])


def test_an_instruction_is_read_with_its_control_codes():
    first, second, _ = read(
        line(
            "@!UP2 LD.E.S16 R3, [R2.64+0x4]", stall=13, lands_on=5, is_read_on=3, waits_for=[0, 5]
        ),
        line("BRA `(.L_x_7)"),
        ".L_x_7",
        line("EXIT"),
    )
    assert first == scoreboard.Instruction(
        text="LD.E.S16 R3, [R2.64+0x4]",
        opcode="LD.E.S16",
        predicate="!UP2",
        stall=13,
        lands_on=5,
        is_read_on=3,
        waits_for=(0, 5),
        target=None,
    )
    assert (first.is_load, first.num_bytes) == (True, 2)
    assert (second.is_load, second.is_predicated, second.lands_on) == (False, False, None)
    assert (second.is_read_on, second.waits_for, second.target) == (None, (), 2)


@pytest.mark.parametrize(
    ("opcode", "bits"),
    [("LDG.E.U8", 8), ("STG.E.S8", 8), ("LDG.E.U16", 16), ("LDG.E", 32), ("STG.E.64", 64),
     ("LDG.E.EF.128", 128)],
)  # fmt: skip
def test_the_width_of_an_access_is_in_its_name(opcode, bits):
    assert scoreboard.bits_of(opcode) == bits


@pytest.mark.parametrize("num_warps", [1, 4, 16])
def test_a_turn_takes_its_load_and_what_is_issued_behind_it(num_warps):
    issue = max(num_warps // 4, 1)  # cycles: the warps of a scheduler take turns
    turn = looped(LOAD, STORE)
    assert turn_cycles(turn, 16, num_warps) == pytest.approx(PAYLOAD + 2 * issue)
    found = steady(turn, num_warps)
    assert found.flight_bytes == 32 * num_warps * 16
    assert found.turn_instructions == 3
    assert found.drained_by == "STG.E.128 desc[UR4][R8.64], R4"


def test_loads_that_follow_each_other_overlap():
    second = line("LDG.E.128 R12, desc[UR4][R2.64]", stall=5, lands_on=1)
    other = line("STG.E.128 desc[UR4][R8.64], R12", waits_for=[1])
    turn = looped(LOAD, second, STORE, other)
    # the second is issued 2 cycles after the first, its store leaves when it has landed
    assert turn_cycles(turn, 32) == pytest.approx(2 + PAYLOAD + 2)
    assert steady(turn).flight_bytes == 32 * 4 * 32
    apart = looped(LOAD, STORE, second, other)
    assert turn_cycles(apart, 32) == pytest.approx(2 * PAYLOAD + 1 + 2)
    assert steady(apart).flight_bytes == 32 * 4 * 16


def test_ids_are_nearer_than_payload():
    ids = line("LDG.E.64 R2, desc[UR4][R0.64]", lands_on=3)
    turn = looped(ids, line(LOAD[0], stall=2, lands_on=0, waits_for=[3]), STORE)
    assert turn_cycles(turn, 16) == pytest.approx(INDEX + PAYLOAD + 2)
    assert steady(turn).flight_bytes == 32 * 4 * 16


@pytest.mark.parametrize("codes", [{"lands_on": 2}, {"is_read_on": 2}])
def test_other_scoreboards_are_waited_for(codes):
    other = line("S2R R20, SR_TID.X", **codes)
    turn = looped(LOAD, STORE, other, line("NOP", waits_for=[2]))
    assert turn_cycles(turn, 16) == pytest.approx(PAYLOAD + 1 + OTHER_CYCLES + 2)


def test_a_jump_forwards_skips_what_lies_between():
    skipped = line("NOP", stall=15)
    jump = looped(LOAD, STORE, line("BRA `(.L_x_1)"), skipped, ".L_x_1")
    assert turn_cycles(jump, 16) == pytest.approx(PAYLOAD + 3)
    may = looped(LOAD, STORE, line("@P1 BRA `(.L_x_1)"), skipped, ".L_x_1")
    assert turn_cycles(may, 16) == pytest.approx(PAYLOAD + 3 + 15)


def test_the_main_loop_is_the_widest_with_the_most_payload():
    inner = [".L_x_1", LOAD, STORE, line("@P1 BRA `(.L_x_1)")]
    code = read(line("NOP"), ".L_x_0", line("NOP"), *inner, line("@P0 BRA `(.L_x_0)"), line("EXIT"))
    assert scoreboard.main_loop(code, scoreboard.payload_of(code)) == range(1, 6)
    two = read(".L_x_0", *inner, LOAD, STORE, line("@P0 BRA `(.L_x_0)"), line("EXIT"))
    assert scoreboard.main_loop(two, scoreboard.payload_of(two)) == range(6)
    straight = read(LOAD, STORE, line("EXIT"), line("BRA `(.L_x_2)"))
    assert scoreboard.main_loop(straight, {0}) == range(3)


def nested(*inner, count="0x3"):
    """A loop without an end around one of `count` turns."""
    return read(
        ".L_x_0",
        line("UMOV UR4, 0xffffffff"),
        ".L_x_1",
        line("UIADD3 UR4, UR4, 0x1, URZ"),
        *inner,
        line(f"UISETP.GE.AND UP0, UPT, UR4, {count}, UPT"),
        line("PLOP3.LUT P5, PT, PT, PT, UP0, 0x80, 0x0"),
        line("@!P5 BRA `(.L_x_1)"),
        line("@P0 BRA `(.L_x_0)"),
        line("EXIT"),
    )


def test_a_loop_in_the_loop_is_walked_as_often_as_it_turns():
    for count, turns in (("0x3", 4), ("0x0", 1)):
        code = nested(LOAD, STORE, count=count)
        wanted = 1 + turns * (PAYLOAD + 5) + 1
        assert turn_cycles(code, 16 * turns) == pytest.approx(wanted)
        assert steady(code).turn_instructions == 2 + 6 * turns


def test_a_loop_whose_turns_nothing_tells_is_steady_by_itself():
    code = nested(LOAD, STORE, count="UR9")
    assert turn_cycles(code, 16) == pytest.approx(PAYLOAD + 5)
    assert steady(code).turn_instructions == 6


@pytest.mark.parametrize("before", [(), (line("@PT BRA `(.L_x_3)"),)], ids=["passed", "skipped"])
def test_of_two_inner_loops_the_slower_counts(before):
    slow = [".L_x_1", LOAD, STORE, line("NOP", stall=15), line("@P1 BRA `(.L_x_1)")]
    fast = [".L_x_2", LOAD, STORE, line("@P2 BRA `(.L_x_2)")]
    code = looped(*before, *slow, *fast, ".L_x_3", line("NOP"))
    assert turn_cycles(code, 16) == pytest.approx(PAYLOAD + 15 + 2)
    assert steady(code).turn_instructions == 4


def test_a_load_with_a_false_predicate_does_not_happen():
    wanted = line("UISETP.LT.AND UP1, UPT, UR4, 0x2, UPT")
    guarded = line("@UP1 LDG.E.128 R4, desc[UR4][R2.64]", stall=2, lands_on=0)
    code = nested(wanted, guarded, STORE)  # two of four turns load
    wanted = 1 + 2 * (PAYLOAD + 6) + 2 * (OTHER_CYCLES + 6) + 1
    assert turn_cycles(code, 2 * 16) == pytest.approx(wanted)


def test_of_two_loads_with_opposite_predicates_one_happens():
    yes = line("@P1 LDG.E.128 R4, desc[UR4][R2.64]", lands_on=0)
    no = line("@!P1 LDG.E.128 R4, desc[UR4][R6.64]", lands_on=0)
    once = looped(yes, no, STORE)
    assert steady(once).flight_bytes == 32 * 4 * 16
    other = line("ISETP.GE.AND P1, PT, R7, R8, PT")
    both = looped(other, yes, other, no, STORE)
    assert steady(both).flight_bytes == 2 * 32 * 4 * 16


def test_ids_that_pass_shared_memory_are_no_payload():
    staged = [
        line("LDGSTS.E.64 [R6+0x80], desc[UR4][R0.64]"),
        line("LDGSTS.E.128 [R6], desc[UR4][R2.64], P3"),
    ]
    through = [line("LDGDEPBAR"), line("DEPBAR.LE SB0, 0x0"), line("LDS.128 R4, [R6]", lands_on=0)]
    code = looped(*staged, *through, STORE)
    assert scoreboard.payload_of(code) == {1}


@pytest.mark.parametrize(
    ("before", "text", "known"),
    [
        ("UMOV UR4, 0xffffff80", "UIADD3 UR4, UP0, UR4, 0x80, URZ", {"UR4": 0, "UP0": True}),
        ("UMOV UR4, 0xffffff80", "UIADD3 UR4, UP0, UR4, 0x7f, URZ", {"UP0": False}),
        ("UMOV UR4, 0x1", "UIADD3.X UR4, URZ, UR4, URZ, UPT, !UPT", {"UR4": 2}),
        ("MOV R4, 0x5", "IMAD.X R4, RZ, RZ, R4.reuse, PT", {"R4": 6}),
        ("MOV R4, 0x5", "IMAD R4, R4, 0x3, -0x1", {"R4": 14}),
        ("MOV R4, 0x5", "IMAD R4, R4, R9, RZ", {"R4": None}),
        ("MOV R4, -0x1", "ISETP.LT.AND P0, PT, R4, RZ, PT", {"P0": True}),
        ("MOV R4, -0x1", "ISETP.LT.U32.AND P0, PT, R4, RZ, PT", {"P0": False}),
        ("MOV R4, RZ", "ISETP.GE.U32.AND.EX P0, PT, R4, RZ, PT, !PT", {"P0": False}),
        ("MOV R4, 0x2", "USEL UR4, UR6, 0x7, !UPT", {"UR4": 7}),
        ("MOV R4, 0x2", "PLOP3.LUT P1, PT, P0, PT, !PT, 0x80, 0x0", {"P1": False}),
        ("MOV R4, 0x2", "PLOP3.LUT P1, PT, P0, PT, PT, 0x80, 0x0", {"P1": None}),
        ("MOV R4, 0x2", "LOP3.LUT R4, R4, R5, RZ, 0xc0, !PT", {"R4": None}),
        ("MOV R4, 0x2", "@P0 MOV R4, 0x3", {"R4": None}),
        ("MOV R4, 0x2", "@!PT MOV R4, 0x3", {"R4": 2}),
    ],
)
def test_constants_are_followed(before, text, known):
    warp = scoreboard._Warp(read(line(before), line(text)), set(), 0.0, share=1)
    warp.walk(range(2))
    for name, value in known.items():
        if "P" in name:
            assert warp.scalars.holds(name) is value
        else:
            assert warp.scalars._value(name) == value


def test_copies_into_shared_memory_are_waited_for_by_group():
    def staged(kept):
        return looped(
            line("LDGSTS.E.128 [R6], desc[UR4][R2.64]", stall=2),
            line("LDGDEPBAR"),
            line(f"DEPBAR.LE SB0, 0x{kept:x}"),
            line("LDS.128 R4, [R6]", lands_on=0),
            STORE,
        )

    after_the_wait = 1 + OTHER_CYCLES + 2  # the barrier, the load out of shared memory, two more
    assert turn_cycles(staged(0), 16) == pytest.approx(PAYLOAD + after_the_wait)
    # with one group on its way a turn takes half as long, and with enough of them no load is felt
    assert turn_cycles(staged(1), 16) == pytest.approx((PAYLOAD + after_the_wait + 3) / 2, rel=0.02)
    assert turn_cycles(staged(63), 16) == pytest.approx(3 + after_the_wait)
    assert steady(staged(1)).flight_bytes == 32 * 4 * 32


@pytest.mark.parametrize(
    ("between", "stored", "is_payload"),
    [
        (["MOV R8, R7"], "R5", True),  # a load fills four registers, two of which are stored
        (["MOV R8, R7"], "R8", True),
        (["MOV R5, RZ", "MOV R6, RZ"], "R5", False),
        (["@P0 MOV R5, RZ"], "R5", True),
        (["MOV R5, RZ"], "R5", True),  # R6 is stored as well, and still holds what was loaded
        (["IMAD.WIDE R8, R6, R10, R12"], "R8", True),  # pairs: R7 reaches R9
        (["DADD R8, R6, R10"], "R9", True),
        (["CS2R R4, SRZ", "CS2R R6, SRZ"], "R4", False),
        (["R2UR UR8, R4", "MOV R9, UR8"], "R9", True),
        (["STS.128 [R20], R4", "LDS.64 R8, [R20]"], "R8", True),
        (["LDS.64 R8, [R20]", "STS.128 [R20], R4"], "R8", False),
        (["FADD R8, R20, R4"], "R8", True),
        (["ST.E [R8.64], R4"], "R20", False),
    ],
)  # fmt: skip
def test_payload_is_followed_from_a_load_to_a_store(between, stored, is_payload):
    store = line(f"STG.E.64 desc[UR4][R30.64], {stored}")
    code = read(LOAD, *map(line, between), store, line("EXIT"))
    assert scoreboard.payload_of(code) == ({0} if is_payload else set())


def test_an_address_is_no_payload():
    code = read(line("LDG.E.64 R30, desc[UR4][R2.64]"), line("STG.E [R30.64], R9"), line("EXIT"))
    assert scoreboard.payload_of(code) == set()
    assert steady(code) is None


def test_nothing_is_followed_past_an_exit_or_a_jump():
    for end in ("EXIT", "RET", "BRA `(.L_x_9)"):
        code = read(LOAD, line(end), STORE, ".L_x_9", line("EXIT"))
        assert scoreboard.payload_of(code) == set(), end
        code = read(LOAD, line(f"@P0 {end}"), STORE, ".L_x_9", line("EXIT"))
        assert scoreboard.payload_of(code) == {0}, end


@pytest.mark.parametrize(
    ("registers", "num_warps", "shared_bytes", "wanted"),
    [
        (1, 1, 0, 32),  # no more than 32 programs
        (32, 2, 0, 32),
        (33, 2, 0, 25),  # registers are given 8 a thread
        (16, 4, SHARED_OF_SM // 3 - 1024, 3),
        (16, 4, SHARED_OF_SM // 3 - 1023, 2),
        (0, 64, 0, 1),
    ],
)
def test_programs_fit_by_registers_warps_and_shared_memory(
    registers, num_warps, shared_bytes, wanted
):
    sizes = {"registers": registers, "num_warps": num_warps, "shared_bytes": shared_bytes}
    assert scoreboard.programs_of_sm(**sizes) == wanted


def test_a_turn_is_drained_by_what_waits_for_payload_and_not_by_a_longer_wait():
    ids = line("LDG.E.64 R2, desc[UR4][R0.64]", lands_on=3)
    turn = looped(ids, line(LOAD[0], stall=2, lands_on=0, waits_for=[3]), STORE)
    found = scoreboard.steady(
        turn, scoreboard.payload_of(turn), num_warps=4, payload_ns=INDEX_NS / 2
    )
    assert found.drained_by == STORE[0]


def test_what_is_on_its_way_before_the_loop_is_not_of_a_turn():
    before = [line(f"LDG.E.128 R{4 * k}, desc[UR4][R2.64]", lands_on=k) for k in range(3, 6)] + [
        line(f"STG.E.128 desc[UR4][R8.64], R{4 * k}", waits_for=[k]) for k in range(3, 6)
    ]
    turn = [".L_x_0", LOAD, STORE, line("@P0 BRA `(.L_x_0)"), line("EXIT")]
    code = read(*before, *turn)
    assert scoreboard.payload_of(code) == {0, 1, 2, 6}
    assert steady(code).flight_bytes == 32 * 4 * 16
    assert steady(read(*before, line("EXIT"))).flight_bytes == 32 * 4 * 48
