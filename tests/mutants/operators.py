"""What is changed in a module: small mistakes that somebody could make, one at a time.

Left alone are texts (docstrings, f-strings, what an error says), `__repr__`, annotations,
decorators, protocols, and what only asserts: assertions and `strict=`.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

BOUNDARY = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
NEGATION = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
COMPARISON = re.compile(r"is\s+not|not\s+in|<=|>=|==|!=|<|>|is|in")
ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.LShift, ast.RShift, ast.Pow)
UNORDERED_CALLS = ("min", "max", "minimum", "maximum")
DROPPED = (ast.AugAssign, ast.Delete, ast.Raise, ast.Break, ast.Continue)
ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Constant, ast.Subscript)
TESTED = (ast.If, ast.While, ast.IfExp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """`[start, end)` of a module's source becomes `text`, which has as many lines.

    `lines`: where it stands, and where its statement begins. `at_import`: it stands outside of
    functions, so that it acts when the module is imported.
    """

    path: str
    operator: str
    lines: tuple[int, int]
    start: int
    end: int
    text: str
    at_import: bool

    def applied(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]

    def change(self, source: str) -> tuple[str, str]:
        """The lines it stands in, before and after, each on one line."""
        first = source.rfind("\n", 0, self.start) + 1
        last = (source + "\n").find("\n", self.end)
        after = source[first : self.start] + self.text + source[self.end : last]
        return " ".join(source[first:last].split()), " ".join(after.split())


def mutants(path: str, source: str) -> list[Mutant]:
    """All mutants of a module. A constant has two: one more, and one less."""
    return list(_Finder(path, source).within(ast.parse(source)))


class _Finder:
    """Walks a module, and knows the function and the statement that it is in."""

    def __init__(self, path: str, source: str) -> None:
        self._path, self._source = path, source
        self._lines = source.splitlines(keepends=True)
        self._function: ast.FunctionDef | None = None
        self._statement_line = 1

    def within(self, node: ast.AST) -> Iterator[Mutant]:
        """Those of a node and of everything inside it."""
        if _is_left_alone(node):
            return
        if isinstance(node, ast.stmt):
            self._statement_line = node.lineno
        for operator, (start, end), text in self._changes(node):
            text += "\n" * (self._source[start:end].count("\n") - text.count("\n"))
            yield Mutant(
                path=self._path,
                operator=operator,
                lines=(self._source.count("\n", 0, start) + 1, self._statement_line),
                start=start,
                end=end,
                text=text,
                at_import=self._function is None,
            )
        if isinstance(node, ast.Raise):  # what an error says is text
            return
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            children = value if isinstance(value, list) else [value]
            outer = self._function
            if isinstance(node, ast.FunctionDef) and name == "body":
                self._function = node
            for child in children:
                if isinstance(child, ast.AST):
                    yield from self.within(child)
            self._function = outer

    def _changes(self, node: ast.AST) -> Iterator[tuple[str, tuple[int, int], str]]:
        match node:
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                for (a, b), op in zip(pairwise([left, *comparators]), ops, strict=True):
                    operator, table = (
                        ("boundary", BOUNDARY) if type(op) in BOUNDARY else ("negation", NEGATION)
                    )
                    span = self._span(a)[1], self._span(b)[0]
                    new = COMPARISON.sub(table[type(op)], self._text(span), count=1)
                    yield operator, span, new
            case ast.BoolOp(op=op, values=values):
                old, new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                start, end = self._span(node)
                text, done = "", start
                for a, b in pairwise(values):
                    gap = self._span(a)[1], self._span(b)[0]
                    text += self._text((done, gap[0]))
                    text += re.sub(rf"\b{old}\b", new, self._text(gap))
                    done = gap[1]
                yield "and_or", (start, end), f"({text}{self._text((done, end))})"
            case ast.BinOp(left=left, op=op, right=right) if isinstance(op, ORDERED):
                swapped = ast.unparse(ast.BinOp(left=right, op=op, right=left))
                yield "swap", self._span(node), f"({swapped})"
            case ast.Call(func=func, args=[a, b, *_]) if not _is_unordered(func, a, b):
                (start, middle), (rest, end) = self._span(a), self._span(b)
                swapped = self._text((rest, end)) + self._text((middle, rest))
                yield "swap", (start, end), swapped + self._text((start, middle))
            case ast.Constant(value=bool(value)):
                yield "negation", self._span(node), str(not value)
            case ast.Constant(value=int(value)):
                yield "off_by_one", self._span(node), str(value + 1)
                yield "off_by_one", self._span(node), str(value - 1)
            case ast.Slice(lower=lower, upper=upper):
                for bound in (lower, upper):
                    if bound is not None and not isinstance(bound, ast.Constant):
                        yield "off_by_one", self._span(bound), self._plus_one(bound)
            case ast.Return(value=value):
                yield from self._returns(node, value)
            case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Subscript(), *_]):
                yield "dropped", self._span(node), "pass"
            case ast.Assign(targets=[ast.Attribute(), *_]) if not self._in_init():
                yield "dropped", self._span(node), "pass"
            case _ if isinstance(node, DROPPED):
                yield "dropped", self._span(node), "pass"
        tests = [node.test] if isinstance(node, TESTED) else getattr(node, "ifs", [])
        for test in tests:
            if not _is_negated_already(test):
                yield "negation", self._span(test), f"not ({self._text(self._span(test))})"

    def _returns(
        self, node: ast.Return, value: ast.expr | None
    ) -> Iterator[tuple[str, tuple[int, int], str]]:
        if value is None:
            yield "dropped", self._span(node), "pass"
            return
        assert self._function is not None
        wanted = ast.unparse(self._function.returns) if self._function.returns else ""
        if wanted == "bool":
            if not _is_negated_already(value) and not isinstance(value, ast.Constant):
                yield "return", self._span(value), f"not ({self._text(self._span(value))})"
        elif wanted in ("int", "float"):
            if not isinstance(value, ast.Constant):
                yield "return", self._span(value), self._plus_one(value)
        elif not isinstance(value, ast.Constant) or value.value is not None:
            yield "return", self._span(value), "None"

    def _plus_one(self, node: ast.expr) -> str:
        text = self._text(self._span(node))
        return f"{text} + 1" if isinstance(node, ATOMS) else f"({text}) + 1"

    def _in_init(self) -> bool:
        return self._function is not None and self._function.name == "__init__"

    def _text(self, span: tuple[int, int]) -> str:
        return self._source[slice(*span)]

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        return self._offset(node.lineno, node.col_offset), self._offset(
            node.end_lineno, node.end_col_offset
        )

    def _offset(self, line: int, column: int) -> int:
        """In characters; columns count bytes."""
        before = sum(map(len, self._lines[: line - 1]))
        return before + len(self._lines[line - 1].encode()[:column].decode())


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr() | ast.Assert() | ast.keyword(arg="strict"):
            return True
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):  # what starts a program
            return True
        case ast.Raise(exc=ast.Call(func=ast.Name(id="AssertionError"))):
            return True
        case ast.ClassDef(bases=bases):
            return any(ast.unparse(base).startswith("Protocol") for base in bases)
        case ast.FunctionDef(name=name):
            return name in ("__repr__", "__str__")
    return False


def _is_unordered(func: ast.expr, a: ast.expr, b: ast.expr) -> bool:
    """Whether a call has no first two arguments, or says the same with them swapped."""
    if isinstance(a, ast.Starred) or isinstance(b, ast.Starred):
        return True
    is_symmetric = ast.unparse(func).rpartition(".")[2] in UNORDERED_CALLS
    return is_symmetric or ast.dump(a) == ast.dump(b)


def _is_negated_already(test: ast.expr) -> bool:
    """By another mutant, that turns its comparison round."""
    return isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in NEGATION
