"""Bytes that a kernel keeps in flight: a static model of its machine code, without a GPU.

Every instruction of sm_90 carries control codes: the delay before the next instruction, which of
six scoreboards a load holds until its data has landed, and the scoreboards that the instruction
waits for. The model runs one warp through the prologue and repeatedly through the main loop, in
program order. A load lands a fixed latency after its issue, an instruction waits for all loads of
its scoreboards, and the warps of a scheduler issue in turn. So the model shows, for example, loads
that the source overlaps but that a register move waits for.

Payload is the data moved: loads whose registers reach the data of a global store, followed through
control flow, registers, uniform registers and shared memory.

An inner loop runs as often as constants say (`scalars`); if that is unknown, its own iterations
count as the steady state. Of several such loops the slowest counts. A load with a false predicate
is skipped; of two loads with opposite predicates, one counts.

The model ignores bandwidth, caches and bank conflicts: it gives the limit set by latency. It
refuses transfers that pass through no register (TMA).
"""

import re
from typing import NamedTuple

from hicache.workbench.scalars import PREDICATE, Scalars

GHZ = 1.755  # H200, boost
INDEX_NS = 140.0  # latency of a load of ids or addresses from L2
OTHER_CYCLES = 30.0  # latency of other instructions with a scoreboard
NUM_SCHEDULERS = 4
WARM_TURNS, TURNS = 8, 24
MAX_STEPS = 100_000  # instructions, for long iterations
REGISTERS_OF_SM, WARPS_OF_SM, PROGRAMS_OF_SM = 65536, 64, 32
SHARED_OF_SM, SHARED_OF_PROGRAM = 228 << 10, 1 << 10  # bytes; the second is reserved per program

LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/")
CONTROL = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
LABEL = re.compile(r"^\s*(\.L_x_\d+):")
REGISTER = re.compile(r"\b(U?R)(\d+)\b")
BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}
SHARED = "shared memory"


class Instruction(NamedTuple):
    text: str
    opcode: str
    predicate: str  # its guard, such as !P0; empty if none
    stall: int  # cycles before the next instruction may issue
    lands_on: int | None  # the scoreboard held until its result arrives
    is_read_on: int | None  # the scoreboard held until its operands are read
    waits_for: tuple[int, ...]  # scoreboards
    target: int | None  # of a branch: index of the target instruction

    @property
    def is_load(self) -> bool:
        return self.opcode.split(".")[0] in ("LD", "LDG", "LDGSTS")

    @property
    def num_bytes(self) -> int:
        return bits_of(self.opcode) // 8


class Steady(NamedTuple):
    flight_bytes: int  # peak payload in flight
    turn_instructions: int
    gb_per_s: float
    drained_by: str  # the instruction with the longest wait for payload


def bits_of(opcode: str) -> int:
    """Return the width in bits of a memory access: 128 for the opcode `LDG.E.EF.128`.

    The width is 32 if the opcode names none.
    """
    return next((BITS[part] for part in opcode.split(".") if part in BITS), 32)


def read(sass: str) -> list[Instruction]:
    lines = sass.splitlines()
    found: list[tuple[str, str, int]] = []  # text, predicate, control codes
    places: dict[str, int] = {}
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        label = LABEL.match(line)
        if label is not None:
            places[label.group(1)] = len(found)
        instruction = LINE.match(line)
        if instruction is not None:
            control = CONTROL.match(following)
            assert control is not None, f"no control codes after {line!r}"
            predicate, text = instruction.groups()
            found.append((text, predicate or "", int(control.group(1), 16) >> 41))
    return [
        Instruction(
            text=text,
            opcode=text.split()[0],
            predicate=predicate,
            stall=control & 15,
            lands_on=_scoreboard(control >> 5),
            is_read_on=_scoreboard(control >> 8),
            waits_for=tuple(k for k in range(6) if control >> (11 + k) & 1),
            target=_target(text, places),
        )
        for text, predicate, control in found
    ]


def payload_of(instructions: list[Instruction]) -> set[int]:
    reached: list[dict[str, int]] = [{} for _ in instructions]  # register → bits: which loads
    found = 0
    pending = [0] if instructions else []
    visited = [False] * len(instructions)
    while pending:
        place = pending.pop()
        instruction = instructions[place]
        state, stored = _after(instruction, place, reached[place])
        found |= stored
        visited[place] = True
        for following in _successors(instructions, place):
            merged = dict(reached[following])
            for register, loads in state.items():
                merged[register] = merged.get(register, 0) | loads
            if merged != reached[following] or not visited[following]:
                reached[following] = merged
                pending.append(following)
    places = {place for place in range(len(instructions)) if found >> place & 1}
    # shared memory is one location here: ids and addresses that pass through it are narrower
    staged = [place for place in places if instructions[place].opcode.startswith("LDGSTS")]
    widest = max((instructions[place].num_bytes for place in staged), default=0)
    return {place for place in staged if instructions[place].num_bytes == widest} or places


def loops_of(instructions: list[Instruction], payload: set[int]) -> dict[range, int]:
    """Return the loops that load payload, as ranges of indices, and how many such loads each has.

    `payload` holds the indices of the loads that fetch the data to be copied.
    """
    ends = [(place, each.target) for place, each in enumerate(instructions)]
    loops = [range(start, place + 1) for place, start in ends if start is not None]
    counts = {loop: len(payload.intersection(loop)) for loop in loops}
    return {loop: count for loop, count in counts.items() if count}


def main_loop(instructions: list[Instruction], payload: set[int]) -> range:
    """Return the instructions of the loop with the most payload loads, as a range of indices.

    A kernel without a loop gives the whole kernel.
    """
    loops = loops_of(instructions, payload)
    if not loops:
        end = [place for place, each in enumerate(instructions) if each.opcode == "EXIT"]
        return range(end[-1] + 1 if end else len(instructions))
    return max(loops, key=lambda loop: (loops[loop], len(loop)))


def steady(
    instructions: list[Instruction], payload: set[int], *, num_warps: int, payload_ns: float
) -> Steady | None:
    """Simulate one warp of a copy kernel until its loop iterations repeat.

    The result describes these iterations: bandwidth, bytes in flight and more. It is None if the
    kernel copies no data.

    Args:
        instructions: the machine code of the kernel.
        payload: the loads that fetch the data to be copied, as returned by `payload_of`.
        num_warps: warps per Triton program.
        payload_ns: latency of a load in nanoseconds, such as 700 from device and 1300 from host
            memory.

    Raises:
        ValueError: the kernel uses TMA, which the simulation does not support.
    """
    for instruction in instructions:
        if instruction.opcode.startswith(("UTMA", "UBLKCP", "TMA")):
            raise ValueError(f"the model knows no {instruction.opcode}: bytes pass no register")
    if not payload:
        return None
    share = max(num_warps // NUM_SCHEDULERS, 1)
    pending, found = [main_loop(instructions, payload)], list[Steady]()
    while pending:
        loop = pending.pop()
        warp, turns = _walked(instructions, payload, loop, payload_ns, share)
        inner = warp.endless
        if not inner and not any(turn.num_bytes for turn in turns):  # no branch to it was taken
            inner = {each for each in loops_of(instructions, payload) if set(each) < set(loop)}
        pending += inner
        if not inner:
            found.append(_steady(turns, 32 * num_warps))
    return min(found, key=lambda each: each.gb_per_s)


def _steady(turns: list["_Turn"], threads: int) -> Steady:
    turns = turns[min(WARM_TURNS, len(turns) // 2) :]
    num_bytes, cycles = (sum(each) for each in zip(*(turn[:2] for turn in turns), strict=True))
    return Steady(
        flight_bytes=threads * max(turn.peak for turn in turns),
        turn_instructions=turns[-1].num_instructions,
        gb_per_s=threads * num_bytes * GHZ / cycles,
        drained_by=turns[-1].drained_by,
    )


class _Turn(NamedTuple):
    num_bytes: int
    cycles: float
    peak: int
    drained_by: str
    num_instructions: int


def _walked(
    instructions: list[Instruction], payload: set[int], loop: range, payload_ns: float, share: int
) -> tuple["_Warp", list[_Turn]]:
    warp = _Warp(instructions, payload, payload_ns, share=share)
    warp.walk(range(loop.start))
    warp.endless = set()
    turns: list[_Turn] = []
    while len(turns) < TURNS and (
        len(turns) < 4 or turns[0].num_instructions * len(turns) < MAX_STEPS
    ):
        cycle, num_bytes = warp.cycle, warp.num_bytes
        warp.peak = warp.in_flight()
        warp.longest = (0.0, "")
        count = warp.walk(loop)
        moved = warp.num_bytes - num_bytes
        turns.append(_Turn(moved, warp.cycle - cycle, warp.peak, warp.longest[1], count))
    return warp, turns


def programs_of_sm(*, registers: int, num_warps: int, shared_bytes: int) -> int:
    of_warp = -(-registers * 32 // 256) * 256
    return min(
        REGISTERS_OF_SM // (max(of_warp, 1) * num_warps),
        WARPS_OF_SM // num_warps,
        SHARED_OF_SM // (shared_bytes + SHARED_OF_PROGRAM),
        PROGRAMS_OF_SM,
    )


class _Warp:
    # `cycle` never falls; landed loads are forgotten
    def __init__(
        self, instructions: list[Instruction], payload: set[int], payload_ns: float, *, share: int
    ) -> None:
        self._instructions = instructions
        operands = [_operands(each.text) for each in instructions]
        self._parsed = list(zip(operands, map(_targets, instructions, operands), strict=True))
        self._payload = payload
        self._latency = {True: payload_ns * GHZ, False: INDEX_NS * GHZ}
        self._share = share  # warps per scheduler
        self._lands: dict[int, list[float]] = {k: [] for k in range(6)}
        self._flight: list[tuple[float, int]] = []  # landing time of payload, bytes
        self._groups: list[float] = []  # landing times of groups of copies into shared memory
        self._group = 0.0  # landing time of the open group
        self.scalars = Scalars()
        self.endless = set[range]()  # inner loops with an unknown number of iterations
        self.cycle = 0.0
        self.num_bytes = 0  # payload bytes so far
        self.peak = 0
        self.longest = (0.0, "")  # longest wait for payload in cycles, and its instruction

    def in_flight(self) -> int:
        self._flight = [(lands, size) for lands, size in self._flight if lands > self.cycle]
        return sum(size for _, size in self._flight)

    def walk(self, places: range) -> int:
        # issues the instructions once, with inner loops repeated; a branch with an unknown
        # condition is not taken. Returns the number of instructions issued
        place, count = places.start, 0
        while place in places:
            instruction = self._instructions[place]
            guard = self.scalars.holds(instruction.predicate)
            self._issue(place, instruction)
            operands, targets = self._parsed[place]
            self.scalars.step(instruction.opcode, operands, targets, guard=instruction.predicate)
            count += 1
            following, target = place + 1, instruction.target
            if target is not None and following in places:
                if guard:
                    following = target
                elif guard is None and target <= place:
                    turn = range(target, place + 1)
                    if not self._payload.isdisjoint(turn):
                        self.endless.add(turn)
            place = following
        return count

    def _issue(self, place: int, instruction: Instruction) -> None:
        self._wait(instruction)
        is_payload = place in self._payload
        lands = self.cycle + OTHER_CYCLES
        happens = instruction.is_load and self._happens(instruction)
        if happens:
            lands = self.cycle + self._latency[is_payload]
        if is_payload and happens:
            self._flight.append((lands, instruction.num_bytes))
            self.num_bytes += instruction.num_bytes
            self.peak = max(self.peak, self.in_flight())
        if instruction.opcode.startswith("LDGSTS"):
            self._group = max(self._group, lands)
        elif instruction.opcode.startswith("LDGDEPBAR"):
            self._groups.append(self._group)
        elif instruction.lands_on is not None:
            self._lands[instruction.lands_on].append(lands)
        if instruction.is_read_on is not None:
            self._lands[instruction.is_read_on].append(self.cycle + OTHER_CYCLES)
        self.cycle += max(instruction.stall, self._share)

    def _happens(self, instruction: Instruction) -> bool:
        last = _operands(instruction.text)[-1]
        guards = [instruction.predicate, last if PREDICATE.match(last) else ""]
        return all(self.scalars.assume(guard) for guard in guards)

    def _wait(self, instruction: Instruction) -> None:
        until = [lands for k in instruction.waits_for for lands in self._lands[k]]
        for k in instruction.waits_for:
            self._lands[k] = []
        if instruction.opcode.startswith("DEPBAR"):
            least = re.search(r"SB0, (0x[0-9a-f]+)", instruction.text)
            keep = int(least.group(1), 16) if least else 0
            until += self._groups[: max(len(self._groups) - keep, 0)]
        if not until or max(until) <= self.cycle:
            return
        waited, before = max(until) - self.cycle, self.in_flight()
        self.cycle = max(until)
        if self.in_flight() < before:
            self.longest = max(self.longest, (waited, instruction.text))


def _scoreboard(bits: int) -> int | None:
    return None if bits & 7 == 7 else bits & 7


def _target(text: str, places: dict[str, int]) -> int | None:
    label = re.search(r"\.L_x_\d+", text)
    return places.get(label.group()) if label and text.startswith("BRA") else None


def _successors(instructions: list[Instruction], place: int) -> list[int]:
    instruction = instructions[place]
    goes_on = bool(instruction.predicate) or instruction.opcode not in ("BRA", "EXIT", "RET")
    following = [place + 1] if goes_on and place + 1 < len(instructions) else []
    if instruction.target is not None and instruction.target < len(instructions):
        following.append(instruction.target)
    return following


def _after(
    instruction: Instruction, place: int, state: dict[str, int]
) -> tuple[dict[str, int], int]:
    # after the instruction: which loads each register's data comes from; and those stored by it
    opcode, operands = instruction.opcode, _operands(instruction.text)
    width = max(bits_of(opcode), 32) // 32
    if opcode.startswith("STG"):
        return state, _union(state, _registers(operands[-1], width))
    if opcode.startswith("STS"):
        return _with(state, [SHARED], _union(state, _registers(operands[-1], width)), keeps=True), 0
    if opcode.startswith("LDGSTS"):
        return _with(state, [SHARED], 1 << place, keeps=True), 0
    if not operands or REGISTER.match(operands[0]) is None:
        return state, 0
    if instruction.is_load:
        loads = 1 << place
    elif opcode.startswith("LDS"):
        loads = state.get(SHARED, 0)
    else:
        width = 2 if _is_wide(opcode) else 1
        sources = [name for operand in operands[1:] for name in _registers(operand, width)]
        loads = _union(state, sources)
    targets = _targets(instruction, operands)
    return _with(state, targets, loads, keeps=bool(instruction.predicate)), 0


def _targets(instruction: Instruction, operands: list[str]) -> list[str]:
    if not operands or REGISTER.match(operands[0]) is None:
        return []
    if instruction.is_load or instruction.opcode.startswith("LDS"):
        return _registers(operands[0], max(bits_of(instruction.opcode), 32) // 32)
    return _registers(operands[0], 2 if _is_wide(instruction.opcode) else 1)


def _operands(text: str) -> list[str]:
    return [operand.strip() for operand in text.partition(" ")[2].split(",") if operand.strip()]


def _registers(operand: str, width: int) -> list[str]:
    return [
        f"{kind}{int(number) + k}"
        for kind, number in REGISTER.findall(operand)
        for k in range(width)
    ]


def _is_wide(opcode: str) -> bool:
    return (
        ".WIDE" in opcode or ".64" in opcode or opcode == "CS2R" or opcode[:4] in ("DADD", "DMUL")
    )


def _union(state: dict[str, int], registers: list[str]) -> int:
    loads = 0
    for register in registers:
        loads |= state.get(register, 0)
    return loads


def _with(
    state: dict[str, int], registers: list[str], loads: int, *, keeps: bool
) -> dict[str, int]:
    # a predicated write `keeps` the old loads too
    state = dict(state)
    for register in registers:
        state[register] = loads | (state.get(register, 0) if keeps else 0)
    return state
