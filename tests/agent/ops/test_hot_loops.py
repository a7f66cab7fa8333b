"""References to the stack are found in a disassembly: that of a loop whose sums a compiler keeps in
memory."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.hot_loops import Loop, hottest, innermost_loops

# Sixteen lanes as one vector of 64 bytes, by GCC 12 for AVX2: the fault that kernels of a checkout
# had.
IN_MEMORY = """
0000000000000000 <(anonymous namespace)::tile(char const*, float const*, float*, long)>:
   0:	push   %rbp
   4:	mov    %rsp,%rbp
   b:	sub    $0x28,%rsp
  40:	vaddss (%rsi),%xmm2,%xmm0
  44:	vmovups (%rdi),%ymm3
  48:	add    $0x4,%rsi
  4c:	add    $0x40,%rdi
  50:	vmovaps 0x8(%rsp),%ymm4
  56:	vbroadcastss %xmm0,%ymm0
  5b:	vfmadd213ps -0x18(%rsp),%ymm0,%ymm3
  62:	vfmadd132ps -0x20(%rdi),%ymm4,%ymm0
  68:	vmovaps %ymm3,-0x78(%rsp)
  6e:	mov    -0x78(%rsp),%rax
  c8:	cmp    %rsi,%rcx
  cb:	jne    40 <(anonymous namespace)::tile(char const*, float const*, float*, long)+0x40>
  d1:	vzeroupper
 104:	ret
"""
BY_FRAME = IN_MEMORY.replace("(%rsp)", "(%rbp)")
WITHOUT_FRAME = BY_FRAME.replace("mov    %rsp,%rbp", "mov    %rdx,%rbp")
IN_REGISTERS = """
0000000000000000 <tile(char const*, float const*, float*, long)>:
   0:	mov    %rsp,%rbp
   8:	mov    %rdx,%rbp
  10:	vbroadcastss (%rsi),%ymm0
  18:	vfmadd231ps (%rdi),%ymm0,%ymm1
  20:	vfmadd231ps 0x20(%rdi,%rbp,4),%ymm0,%ymm2
  28:	mov    0x8(%rsp),%rax
  30:	add    $0x4,%rsi
  38:	jne    10 <tile(char const*, float const*, float*, long)+0x10>
  40:	mov    %rbp,0x18(%rsp)
  48:	jmp    0 <tile(char const*, float const*, float*, long)>
"""
OF_AARCH64 = """
0000000000000000 <tile(char const*, float const*, float*, long)>:
   4:	sub	sp, sp, #0x80
   8:	add	x5, sp, #0x40
  18:	mov	x6, sp
  2c:	ldr	s0, [x1, x4, lsl #2]
  34:	ldp	q3, q4, [sp, #64]
  44:	ldp	q16, q6, [x7, #16]
  50:	fmla	v4.4s, v16.4s, v0.s[0]
  60:	stp	q3, q4, [sp]
  64:	ldp	q0, q3, [x6]
  6c:	stp	q0, q3, [x5]
  7c:	b.ne	2c <tile(char const*, float const*, float*, long)+0x2c>  // b.any
  94:	ret
"""


def hot_loop(disassembly: str) -> Loop:
    ((name, loops),) = innermost_loops(disassembly).items()
    loop = hottest(loops)
    assert name.startswith("tile(") and loop is not None
    return loop


@pytest.mark.parametrize(
    ("disassembly", "products", "references"),
    [
        (IN_MEMORY, 2, 4),
        (BY_FRAME, 2, 4),
        (WITHOUT_FRAME, 2, 0),
        (IN_REGISTERS, 2, 1),
        (OF_AARCH64, 1, 4),
    ],
    ids=["stack pointer", "frame pointer", "rbp of something else", "registers", "aarch64"],
)
def test_references_to_the_stack_are_counted(
    disassembly: str, products: int, references: int
) -> None:
    loop = hot_loop(disassembly)
    assert (loop.products, loop.stack_references) == (products, references)


def test_the_loop_around_another_is_not_the_innermost() -> None:
    (loops,) = innermost_loops(IN_REGISTERS).values()
    assert [loop.instructions[0].address for loop in loops] == [0x10]


def test_a_function_without_a_product_has_no_hot_loop() -> None:
    (loops,) = innermost_loops(IN_REGISTERS.replace("vfmadd231ps", "vaddps")).values()
    assert hottest(loops) is None


@pytest.mark.skipif(
    shutil.which("g++") is None or shutil.which("objdump") is None, reason="no g++ or no objdump"
)
def test_sums_that_every_step_writes_are_caught(tmp_path: Path) -> None:
    source = """
        void tile(const float* w, const float* x, float* volatile* sums, long n) {
            volatile float own[4] = {};
            for (long k = 0; k < n; k++)
                for (int i = 0; i < 4; i++) own[i] = own[i] + w[4 * k + i] * x[k];
            for (int i = 0; i < 4; i++) *sums[i] = own[i];
        }"""
    (tmp_path / "tile.cpp").write_text(source)
    made = tmp_path / "tile.o"
    subprocess.run(
        ["g++", "-O3", "-funroll-loops", "-c", tmp_path / "tile.cpp", "-o", made],
        check=True,
        timeout=60,
    )
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(made)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (loops,) = innermost_loops(text).values()
    assert max(loop.stack_references for loop in loops) > 2
