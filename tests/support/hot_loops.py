"""The innermost loops of compiled kernels, and how often each refers to the stack, from a
disassembly.

objdump -d -C --no-show-raw-insn kernels.o | python -m tests.support.hot_loops      a table
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

_FUNCTION = re.compile(r"^[0-9a-f]+ <(?P<name>.*)>:$")
_INSTRUCTION = re.compile(r"^\s*(?P<address>[0-9a-f]+):\s+(?P<mnemonic>\S+)\s*(?P<operands>.*)$")
_JUMP = re.compile(r"j[a-z]+|b(\.[a-z]+)?|cbn?z|tbn?z")
_TARGET = re.compile(r"(?:^|[ ,])(?:0x)?([0-9a-f]+) <")
_PRODUCT = re.compile(
    r"vfn?m(add|sub)\w+|vpmaddubsw|vpmaddwd|vpdpbusds?|vdpbf16ps|mulps|pmaddwd|fml[as]"
    r"|[su]dot|usdot|[su]?mmla|[su]ml[as]l2?|[su]mull2?|mla|mul"
)
# The last operand of AT&T's syntax, the first one of aarch64: the register that an instruction
# writes.
_WRITTEN = re.compile(r"(?:^|,)%(?P<x86>\w+)$|^(?P<arm>[xw]\d+)(?:,|$)")
_WRITES_NOTHING = re.compile(r"cmp\w*|test\w*|push\w*|str\w*|stp|cbn?z|tbn?z|j\w+")
# An address on the stack that is loaded into a register, for example `lea 8(%rsp),%rax`, `mov
# %rsp,%rbp`, `add x5, sp, #0x40` or `mov x29, sp`.
_STACK_ADDRESS = re.compile(
    r"lea \S*\(%rsp\),%\w+|mov %rsp,%\w+|add [xw]\d+, sp, #\S+|mov [xw]\d+, sp"
)
# The base register of a memory operand: 8(%rax,%rcx,4) or [x5, #32].
_BASE = re.compile(r"\((%\w+)[,)]|\[(\w+)[,\]]")
_X86_PARTS = re.compile(r"^[er]?(?P<name>[a-ds][xpi]|[sb]p|[a-d]l)$")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a disassembly."""

    address: int
    mnemonic: str
    operands: str

    @property
    def written(self) -> str:
        """The whole general register that the instruction writes; "" if there is none or one of
        another kind."""
        match = None if _WRITES_NOTHING.fullmatch(self.mnemonic) else _WRITTEN.search(self.operands)
        return "" if match is None else _whole(match["x86"] or match["arm"])

    @property
    def bases(self) -> set[str]:
        """The registers with addresses of its memory operands."""
        pairs = _BASE.findall(self.operands)
        return {_whole((x86 or arm).removeprefix("%")) for x86, arm in pairs}

    @property
    def is_stack_address(self) -> bool:
        """True if the instruction puts an address on the stack into a register."""
        return _STACK_ADDRESS.fullmatch(f"{self.mnemonic} {self.operands}") is not None

    @property
    def jump_target(self) -> int | None:
        """The address that a jump leads to; None if it is another instruction or a jump through a
        register."""
        if not _JUMP.fullmatch(self.mnemonic):
            return None
        match = _TARGET.search(self.operands)
        return None if match is None else int(match[1], 16)


@dataclass(frozen=True, slots=True)
class Loop:
    """An innermost loop: no other loop lies within it. `stack_registers` have addresses on the
    stack all the time."""

    instructions: tuple[Instruction, ...]
    stack_registers: frozenset[str]

    @property
    def products(self) -> int:
        """Instructions that multiply and add, of floats or of integers."""
        return sum(_PRODUCT.fullmatch(one.mnemonic) is not None for one in self.instructions)

    @property
    def stack_references(self) -> int:
        """Instructions with an operand on the stack."""
        return sum(
            bool(one.bases & self.stack_registers)
            for one in self.instructions
            if one.mnemonic != "lea"
        )


def innermost_loops(disassembly: str) -> dict[str, list[Loop]]:
    """The innermost loops of each function, by its name without namespaces."""
    return {name: _loops(body) for name, body in _functions(disassembly)}


def hottest(loops: list[Loop]) -> Loop | None:
    """The loop with the most products; None if no loop multiplies."""
    best = max(loops, key=lambda loop: loop.products, default=None)
    return best if best is not None and best.products else None


def _functions(disassembly: str) -> Iterator[tuple[str, list[Instruction]]]:
    name = ""
    body: list[Instruction] = []
    for line in disassembly.splitlines():
        if match := _FUNCTION.match(line):
            if body:
                yield name, body
            name = match["name"].replace("(anonymous namespace)::", "")
            body = []
        elif match := _INSTRUCTION.match(line):
            operands = re.sub(r"\s+(#|//) .*$", "", match["operands"]).strip()
            body.append(Instruction(int(match["address"], 16), match["mnemonic"], operands))
    if body:
        yield name, body


def _loops(body: list[Instruction]) -> list[Loop]:
    index_of = {one.address: index for index, one in enumerate(body)}
    spans = []
    for index, one in enumerate(body):
        first = index_of.get(one.jump_target) if one.jump_target is not None else None
        if first is not None and first <= index:
            spans.append((first, index))
    innermost = [span for span in spans if not any(_is_within(other, span) for other in spans)]
    return [_loop(body, first, last) for first, last in innermost]


def _loop(body: list[Instruction], first: int, last: int) -> Loop:
    instructions = tuple(body[first : last + 1])
    writes_of_loop = {one.written for one in instructions}
    stack_registers = {"rsp", "sp"}
    for one in body[:first]:  # in the order of the text: the last write before the loop counts
        if one.is_stack_address:
            stack_registers.add(one.written)
        elif one.written not in ("rsp", "sp"):
            stack_registers.discard(one.written)
    return Loop(instructions, frozenset(stack_registers - writes_of_loop | {"rsp", "sp"}))


def _whole(register: str) -> str:
    """The 64-bit register that this one is or is a part of."""
    if match := _X86_PARTS.fullmatch(register):
        return "r" + match["name"].replace("l", "x")
    if re.fullmatch(r"w\d+", register):
        return "x" + register[1:]
    return re.sub(r"^(r\d+)[dwb]$", r"\1", register)


def _is_within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]


def main() -> int:
    """Print the innermost loops that multiply: products, instructions, stack references,
    function."""
    for name, loops in innermost_loops(sys.stdin.read()).items():
        for loop in loops:
            if loop.products:
                sizes = f"{loop.products:4} {len(loop.instructions):4} {loop.stack_references:4}"
                sys.stdout.write(f"{sizes}  {name.split('(')[0]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
