"""Known values of a warp's counters and predicates in the static model of machine code.

Constants, and sums, comparisons and selections of known values are computed; everything else is
unknown. So iterations of a loop with a constant count can be counted, and a load whose predicate is
false in the last iteration is left out.
"""

import re
from itertools import product
from operator import eq, ge, gt, le, lt, ne

PREDICATE = re.compile(r"!?U?P(\d|T)$")
COMPARISONS = {"GE": ge, "GT": gt, "LE": le, "LT": lt, "EQ": eq, "NE": ne}
WORD = 1 << 32


class Scalars:
    """Registers and predicates of a GPU warp with values that a static analysis can compute.

    `assumed` holds predicates with unknown values, and the value that was assumed for each.
    """

    def __init__(self) -> None:
        self._registers = {"RZ": 0, "URZ": 0}
        self._predicates = {"PT": True, "UPT": True}
        self.assumed: dict[str, bool] = {}

    def holds(self, predicate: str) -> bool | None:
        """Return the value of a predicate such as `P0` or `!P0`; None if the value is unknown.

        An empty string stands for an instruction without a predicate, and gives True.
        """
        if not predicate:
            return True
        value = self._predicates.get(predicate.lstrip("!"))
        return None if value is None else value != predicate.startswith("!")

    def assume(self, predicate: str) -> bool:
        # of two accesses with opposite unknown predicates, only the first counts
        known = self.holds(predicate)
        if known is not None:
            return known
        name, wanted = predicate.lstrip("!"), not predicate.startswith("!")
        return self.assumed.setdefault(name, wanted) == wanted

    def step(self, opcode: str, operands: list[str], targets: list[str], *, guard: str) -> None:
        """Execute one machine instruction on the registers and predicates whose values are known.

        A result that depends on an unknown value becomes unknown. `targets` are the registers that
        the instruction writes. `guard` is the predicate that decides whether it takes effect.
        """
        if self.holds(guard) is False:
            return
        operation, *modifiers = opcode.split(".")
        # the second operand may also be an output, and so may the third of a sum
        heads = operands[: 3 if operation in ("IADD3", "UIADD3") else 2]
        outputs = [each for each in heads if PREDICATE.match(each)]
        values = self._computed(operation, modifiers, operands)
        for name in targets:
            self._registers.pop(name, None)
        for name in outputs:
            self._predicates.pop(name, None)
            self.assumed.pop(name, None)
        if operation == "R2P":
            self._predicates = {"PT": True, "UPT": True}
        self._predicates |= {"PT": True, "UPT": True}
        if self.holds(guard) is None:
            return
        for name, value in values.items():
            if name in ("RZ", "URZ", "PT", "UPT"):
                continue
            if PREDICATE.match(name):
                self._predicates[name] = bool(value)
            else:
                self._registers[name] = value % WORD

    def _computed(
        self, operation: str, modifiers: list[str], operands: list[str]
    ) -> dict[str, int]:
        name, sources = operands[0] if operands else "", operands[1:]
        operation = operation.removeprefix("U")
        if operation in ("IADD3", "VIADD", "MOV"):
            return self._sum(name, sources)
        if operation == "IMAD" and "WIDE" not in modifiers:
            a, b, *rest = map(self._value, sources[:3])
            scaled = 0 if 0 in (a, b) else None if a is None or b is None else a * b
            carries = [self.holds(carry) for carry in sources[3:]]
            terms = [scaled, *rest, *carries]
            return {} if None in terms else {name: sum(t for t in terms if t is not None)}
        if operation == "SEL" and self.holds(sources[2]) is not None:
            chosen = self._value(sources[0 if self.holds(sources[2]) else 1])
            return {} if chosen is None else {name: chosen}
        if operation == "ISETP":
            return self._compared(name, modifiers, sources)
        if operation == "PLOP3":
            table = int(sources[-2], 16)
            inputs = [[False, True] if (v := self.holds(s)) is None else [v] for s in sources[1:4]]
            results = {table >> (4 * a + 2 * b + c) & 1 for a, b, c in product(*inputs)}
            return {name: results.pop()} if len(results) == 1 else {}
        return {}

    def _sum(self, name: str, sources: list[str]) -> dict[str, int]:
        carries = [s for s in sources if PREDICATE.match(s)]
        first = next((n for n, s in enumerate(sources) if not PREDICATE.match(s)), 0)
        outputs, inputs = sources[:first], carries[first:]
        terms = [self._value(s) for s in sources if not PREDICATE.match(s)]
        terms += [self.holds(each) for each in inputs]
        if None in terms:
            return {}
        total = sum(term for term in terms if term is not None)
        return {name: total} | {p: total // WORD > n for n, p in enumerate(outputs)}

    def _compared(self, name: str, modifiers: list[str], sources: list[str]) -> dict[str, int]:
        _, first, second, combined, *low = sources
        a, b, also = self._value(first), self._value(second), self.holds(combined)
        if a is None or b is None or also is None or "OR" in modifiers:
            return {}
        if "U32" not in modifiers:
            a, b = ((each + WORD // 2) % WORD for each in (a, b))
        result = COMPARISONS[modifiers[0]](a, b)
        if "EX" in modifiers and a == b:
            below = self.holds(low[0])
            if below is None:
                return {}
            result = below
        return {name: result and also}

    def _value(self, operand: str) -> int | None:
        sign, text = (-1, operand[1:]) if operand.startswith("-") else (1, operand)
        text = text.removesuffix(".reuse")
        value = int(text, 16) if text.startswith("0x") else self._registers.get(text)
        return None if value is None else sign * value % WORD
