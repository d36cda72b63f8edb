"""The static timing model of machine code, on short programs whose times are known formulas."""

import pytest
from sass import line, printed

from hicache.workbench import scoreboard
from hicache.workbench.scoreboard import GHZ, INDEX_NS, OTHER_CYCLES, SHARED_OF_SM

PAYLOAD_NS = 1000.0
PAYLOAD, INDEX = PAYLOAD_NS * GHZ, INDEX_NS * GHZ  # cycles


def read(*lines):
    return scoreboard.read(printed(*lines))


def looped(*lines):
    return read(".L_x_0", *lines, line("@P0 BRA `(.L_x_0)"), line("EXIT"))


def steady(instructions, num_warps=4, payload_ns=PAYLOAD_NS):
    payload = scoreboard.payload_of(instructions)
    return scoreboard.steady(instructions, payload, num_warps=num_warps, payload_ns=payload_ns)


LOAD = line("LDG.E.128 R4, desc[UR4][R2.64]", stall=2, lands_on=0)
STORE = line("STG.E.128 desc[UR4][R8.64], R4", waits_for=[0])


@pytest.mark.parametrize(
    ("opcode", "bits"),
    [("LDG.E.U8", 8), ("STG.E.S8", 8), ("LDG.E.U16", 16), ("LDG.E", 32), ("STG.E.64", 64),
     ("LDG.E.EF.128", 128)],
)  # fmt: skip
def test_the_width_of_a_memory_access_is_read_from_its_opcode(opcode, bits):
    assert scoreboard.bits_of(opcode) == bits


def nested(*inner, count="0x3"):
    """An endless loop around an inner loop whose counter runs from 0 to `count`, inclusive."""
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


def staged(num_groups):
    """A loop of copies into shared memory, of which `num_groups` groups may be in flight."""
    return looped(
        line("LDGSTS.E.128 [R6], desc[UR4][R2.64]", stall=2),
        line("LDGDEPBAR"),
        line(f"DEPBAR.LE SB0, 0x{num_groups:x}"),
        line("LDS.128 R4, [R6]", lands_on=0),
        STORE,
    )


NEXT_LOAD = line("LDG.E.128 R12, desc[UR4][R2.64]", stall=5, lands_on=1)
NEXT_STORE = line("STG.E.128 desc[UR4][R8.64], R12", waits_for=[1])
IDS = line("LDG.E.64 R2, desc[UR4][R0.64]", lands_on=3)
BEHIND_IDS = line(LOAD[0], stall=2, lands_on=0, waits_for=[3])
OTHERS = [line("S2R R20, SR_TID.X", **{name: 2}) for name in ("lands_on", "is_read_on")]
WAIT, SKIPPED = line("NOP", waits_for=[2]), line("NOP", stall=15)
SLOW = [".L_x_1", LOAD, STORE, SKIPPED, line("@P1 BRA `(.L_x_1)")]
FAST = [".L_x_2", LOAD, STORE, line("@P2 BRA `(.L_x_2)"), ".L_x_3", line("NOP")]
YES, NO = (line(f"@{p}P1 LDG.E.128 R4, desc[UR4][R2.64]", lands_on=0) for p in ("", "!"))
COMPARE = line("ISETP.GE.AND P1, PT, R7, R8, PT")
GUARD = line("UISETP.LT.AND UP1, UPT, UR4, 0x2, UPT")
GUARDED = line("@UP1 LDG.E.128 R4, desc[UR4][R2.64]", stall=2, lands_on=0)
# the barrier, the load out of shared memory, two more
STAGED = 1 + OTHER_CYCLES + 2
TURNS = {  # code, payload bytes of a thread, cycles of a turn; bytes in flight, instructions
    "a load": (looped(LOAD, STORE), 16, PAYLOAD + 2, 16, 3),
    # the second load is issued 2 cycles after the first, its store leaves when it has landed
    "loads overlap": (looped(LOAD, NEXT_LOAD, STORE, NEXT_STORE), 32, PAYLOAD + 4, 32, 5),
    "loads apart": (looped(LOAD, STORE, NEXT_LOAD, NEXT_STORE), 32, 2 * PAYLOAD + 3, 16, 5),
    "ids are nearer": (looped(IDS, BEHIND_IDS, STORE), 16, INDEX + PAYLOAD + 2, 16, 4),
    "other results": (looped(LOAD, STORE, OTHERS[0], WAIT), 16, PAYLOAD + OTHER_CYCLES + 3, 16, 5),
    "other reads": (looped(LOAD, STORE, OTHERS[1], WAIT), 16, PAYLOAD + OTHER_CYCLES + 3, 16, 5),
    "a jump": (
        looped(LOAD, STORE, line("BRA `(.L_x_1)"), SKIPPED, ".L_x_1"), 16, PAYLOAD + 3, 16, 4
    ),
    "a possible jump": (
        looped(LOAD, STORE, line("@P1 BRA `(.L_x_1)"), SKIPPED, ".L_x_1"), 16, PAYLOAD + 18, 16, 5
    ),
    "four inner turns": (nested(LOAD, STORE), 64, 4 * (PAYLOAD + 5) + 2, 16, 26),
    "one inner turn": (nested(LOAD, STORE, count="0x0"), 16, PAYLOAD + 7, 16, 8),
    "inner turns of unknown number": (nested(LOAD, STORE, count="UR9"), 16, PAYLOAD + 5, 16, 6),
    "the slower inner loop": (looped(*SLOW, *FAST), 16, PAYLOAD + 17, 16, 4),
    "the slower inner loop, skipped": (
        looped(line("@PT BRA `(.L_x_3)"), *SLOW, *FAST), 16, PAYLOAD + 17, 16, 4
    ),
    "two of four turns load": (
        nested(GUARD, GUARDED, STORE), 32, 2 * (PAYLOAD + 6) + 2 * (OTHER_CYCLES + 6) + 2, 16, 30
    ),
    "opposite predicates": (looped(YES, NO, STORE), 16, PAYLOAD + 2, 16, 4),
    "shared memory, no group under way": (staged(0), 16, PAYLOAD + STAGED, 16, 6),
    "shared memory, no load is felt": (staged(63), 16, 3 + STAGED, None, 6),
}  # fmt: skip


@pytest.mark.parametrize(("code", "size", "cycles", "flight", "count"), TURNS.values(), ids=TURNS)
def test_the_time_of_a_turn_is_its_waits_plus_its_instructions(code, size, cycles, flight, count):
    found = steady(code)
    assert 32 * 4 * size * GHZ / found.gb_per_s == pytest.approx(cycles)
    assert flight is None or found.flight_bytes == 32 * 4 * flight
    assert found.turn_instructions == count


@pytest.mark.parametrize("num_warps", [1, 4, 16])
def test_the_warps_of_a_scheduler_issue_in_turn(num_warps):
    found = steady(looped(LOAD, STORE), num_warps)
    cycles = PAYLOAD + 2 * max(num_warps // 4, 1)
    assert 32 * num_warps * 16 * GHZ / found.gb_per_s == pytest.approx(cycles)
    assert found.flight_bytes == 32 * num_warps * 16
    assert found.drained_by == STORE[0]


def test_a_second_group_of_copies_in_flight_halves_the_time_of_a_turn():
    found = steady(staged(1))
    cycles = 32 * 4 * 16 * GHZ / found.gb_per_s
    assert cycles == pytest.approx((PAYLOAD + STAGED + 3) / 2, rel=0.02)
    assert found.flight_bytes == 32 * 4 * 32


def test_loads_whose_predicates_may_both_hold_count_twice():
    assert steady(looped(COMPARE, YES, COMPARE, NO, STORE)).flight_bytes == 2 * 32 * 4 * 16


def test_a_turn_is_drained_by_its_wait_for_payload_even_if_another_wait_is_longer():
    assert steady(looped(IDS, BEHIND_IDS, STORE), payload_ns=INDEX_NS / 2).drained_by == STORE[0]


def test_the_main_loop_is_the_widest_loop_with_the_most_payload_loads():
    inner = [".L_x_1", LOAD, STORE, line("@P1 BRA `(.L_x_1)")]
    code = read(line("NOP"), ".L_x_0", line("NOP"), *inner, line("@P0 BRA `(.L_x_0)"), line("EXIT"))
    assert scoreboard.main_loop(code, scoreboard.payload_of(code)) == range(1, 6)
    two = read(".L_x_0", *inner, LOAD, STORE, line("@P0 BRA `(.L_x_0)"), line("EXIT"))
    assert scoreboard.main_loop(two, scoreboard.payload_of(two)) == range(6)
    straight = read(LOAD, STORE, line("EXIT"), line("BRA `(.L_x_2)"))
    assert scoreboard.main_loop(straight, {0}) == range(3)


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
def test_constants_in_registers_and_predicates_are_computed(before, text, known):
    warp = scoreboard._Warp(read(line(before), line(text)), set(), 0.0, share=1)
    warp.walk(range(2))
    for name, value in known.items():
        if "P" in name:
            assert warp.scalars.holds(name) is value
        else:
            assert warp.scalars._value(name) == value


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
        *(([end], "R4", False) for end in ("EXIT", "RET", "BRA `(.L_x_9)")),
        *(([f"@P0 {end}"], "R4", True) for end in ("EXIT", "RET", "BRA `(.L_x_9)")),
    ],
)  # fmt: skip
def test_payload_is_followed_from_a_load_to_a_store(between, stored, is_payload):
    store = line(f"STG.E.64 desc[UR4][R30.64], {stored}")
    code = read(LOAD, *map(line, between), store, ".L_x_9", line("EXIT"))
    assert scoreboard.payload_of(code) == ({0} if is_payload else set())


def test_payload_is_followed_around_a_loop_and_through_shared_memory():
    moves = [line(f"MOV R{4 + k}, R{8 + k}", waits_for=[0]) for k in range(4)]
    carried = looped(STORE, line("LDG.E.128 R8, desc[UR4][R2.64]", lands_on=0), *moves)
    assert scoreboard.payload_of(carried) == {1}
    ids = line("LDGSTS.E.64 [R6+0x80], desc[UR4][R0.64]")
    words = line("LDGSTS.E.128 [R6], desc[UR4][R2.64], P3")
    through = [line("LDGDEPBAR"), line("DEPBAR.LE SB0, 0x0"), line("LDS.128 R4, [R6]", lands_on=0)]
    assert scoreboard.payload_of(looped(ids, words, *through, STORE)) == {1}


def test_addresses_are_no_payload_and_tma_is_refused():
    code = read(line("LDG.E.64 R30, desc[UR4][R2.64]"), line("STG.E [R30.64], R9"), line("EXIT"))
    assert scoreboard.payload_of(code) == set()
    assert steady(code) is None
    with pytest.raises(ValueError, match="the model knows no UTMALDG"):
        steady(read(line("UTMALDG.2D [UR8], [UR4]"), line("EXIT")))


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
def test_programs_per_sm_are_limited_by_registers_warps_and_shared_memory(
    registers, num_warps, shared_bytes, wanted
):
    sizes = {"registers": registers, "num_warps": num_warps, "shared_bytes": shared_bytes}
    assert scoreboard.programs_of_sm(**sizes) == wanted


def test_loads_issued_before_the_loop_are_not_counted_in_its_turns():
    before = [line(f"LDG.E.128 R{4 * k}, desc[UR4][R2.64]", lands_on=k) for k in range(3, 6)] + [
        line(f"STG.E.128 desc[UR4][R8.64], R{4 * k}", waits_for=[k]) for k in range(3, 6)
    ]
    turn = [".L_x_0", LOAD, STORE, line("@P0 BRA `(.L_x_0)"), line("EXIT")]
    code = read(*before, *turn)
    assert scoreboard.payload_of(code) == {0, 1, 2, 6}
    assert steady(code).flight_bytes == 32 * 4 * 16
    assert steady(read(*before, line("EXIT"))).flight_bytes == 32 * 4 * 48
