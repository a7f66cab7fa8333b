"""What compilers make of the kernels: bits and speed of linear layers, and inner loops that keep
sums in registers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from edgeshard_agent.ops import native

import hatch_build
from tests.support import compiled_kernels
from tests.support.compiled_kernels import NAME
from tests.support.hot_loops import Loop, hottest

MACHINE = os.uname().machine
AVX2 = "avx2"
EMULATOR = ("qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu", "-cpu")
CROSS_COMPILER = "aarch64-linux-gnu-g++"
COMPILERS = ("gcc", "clang")
ROOT = Path(__file__).resolve().parents[3]
MAX_STACK_REFERENCES = 2
PRODUCTS_PER_REFERENCE = {"x86_64": 8, "aarch64": 6}
"""A loop that the compiler unrolls may refer to the stack once for so many products."""
MIN_SHARES = {
    1: {"bf16": 0.75, "int8": 0.75, "int4": 0.75},
    8: {"bf16": 0.6, "int8": 0.8, "int4": 1.0},
    64: {"bf16": 0.6, "int8": 0.7, "int4": 0.85},
    256: {"bf16": 0.6, "int8": 0.7, "int4": 0.85},
}
"""By rows and scheme: the share of the machine's read rate (one row) or FMA rate that an idle
machine reaches."""
ON_A_BUSY_MACHINE = 0.5
MIN_GCC_TO_CLANG = 0.8
TRIES = 3
COPIES = 8
"""Of the bench's matrices: 53 MB in int4, more than a core finds in its caches."""
MAX_TILE_ROWS = 6
FEWEST_PRODUCTS = 8
"""A loop of attention with as many is one of its two matrix products, whose rows may be tiled and
unrolled."""

# Two bits are for single experts: their loop handles 32 inputs in one piece, whose addresses do not
# fit registers.
_TILE = re.compile(r"run_tile<(FloatPolicy<\w+>|IntegerPolicy<[48]>), (\d+)>")
# Fewer rows wait for memory, not for their sums. Clang has all row counts in one function, where
# they look alike.
_ATTENTION = re.compile(r"AttentionItem<PlainPages<\w+> ?>::attend_rows<[4-6]>")
needs_x86 = pytest.mark.skipif(MACHINE != "x86_64", reason="AVX2 is of x86-64")
needs_avx2 = pytest.mark.skipif(AVX2 not in native.kernel_names(), reason="this CPU runs no AVX2")

CompileAvx2 = Callable[[str], Path]


def is_fused(name: str) -> bool:
    """True if the kernels of this name round a product and its sum once."""
    return name != "portable" or MACHINE == "aarch64"


def schemes_of(name: str) -> tuple[str, ...]:
    """The schemes whose sums have one definition; a bfloat16 product of AVX-512 has bits of its
    own."""
    return ("fp32", "int8", "int4", "int2") if name == "avx512bf16" else ()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The command of the scalar reference."""
    command = compiled_kernels.gcc() or ("c++",)
    if shutil.which(command[0]) is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("reference") / "linear_reference"
    compiled_kernels.compile_reference(command, program)
    return (str(program),)


@pytest.mark.parametrize("name", native.kernel_names())
def test_linear_layers_have_the_bits_of_scalar_code(name: str, reference: tuple[str, ...]) -> None:
    found, _ = compiled_kernels.differences(
        reference, native.LIBRARY, name, schemes_of(name), fused=is_fused(name)
    )
    assert found and not any(found.values()), found


def compiler(name: str) -> tuple[str, ...]:
    command = compiled_kernels.gcc() if name == "gcc" else compiled_kernels.clang(MACHINE)
    if command is None:
        pytest.skip(
            "no g++" if name == "gcc" else "the compiler of wheels cannot be installed: make wheels"
        )
    return command


@pytest.fixture(scope="module")
def compile_avx2(tmp_path_factory: pytest.TempPathFactory) -> CompileAvx2:
    """Compiles the AVX2 kernels by the compiler of this name, once."""
    folder = tmp_path_factory.mktemp("avx2")

    def compile_one(name: str) -> Path:
        library = folder / f"{name}.so"
        if not library.exists():
            flags = hatch_build.INSTRUCTION_SETS[MACHINE][AVX2]
            compiled_kernels.compile_alone(compiler(name), MACHINE, flags, library)
        return library

    return compile_one


@needs_x86
@needs_avx2
@pytest.mark.long
@pytest.mark.timeout(600)
def test_both_compilers_give_the_same_bits(
    compile_avx2: CompileAvx2, reference: tuple[str, ...]
) -> None:
    hashes = []
    for name in COMPILERS:
        found, outputs = compiled_kernels.differences(
            reference, compile_avx2(name), NAME, fused=True
        )
        assert found and not any(found.values()), (name, found)
        hashes.append(outputs)
    assert hashes[0] == hashes[1]


@needs_x86
@needs_avx2
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_compiler_that_fuses_by_itself_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: tuple[str, ...]
) -> None:
    """GCC may fuse the product and the sum that round a row to integers: some of them are then
    others."""
    fusing = tuple(
        flag.replace("-ffp-contract=off", "-ffp-contract=fast") for flag in hatch_build.FLAGS
    )
    assert fusing != hatch_build.FLAGS
    monkeypatch.setattr(hatch_build, "FLAGS", fusing)
    library = tmp_path / "fusing.so"
    flags = hatch_build.INSTRUCTION_SETS[MACHINE][AVX2]
    compiled_kernels.compile_alone(compiler("gcc"), MACHINE, flags, library)
    found, _ = compiled_kernels.differences(reference, library, NAME, fused=True)
    assert found["int8"] and found["int4"] and found["int2"], found


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which(EMULATOR[0]) is None, reason="no qemu-aarch64-static")
@pytest.mark.skipif(shutil.which(CROSS_COMPILER) is None, reason=f"no {CROSS_COMPILER}")
def test_emulated_aarch64_has_the_bits_of_scalar_code(tmp_path: Path) -> None:
    """By GCC, as a checkout has it: a Cortex-A72 has plain NEON, a Cortex-A76 dotprod as well."""
    library = tmp_path / "library.so"
    program = tmp_path / "linear_reference"
    built = hatch_build.compile_library((CROSS_COMPILER,), "aarch64", library)
    compiled_kernels.compile_reference((CROSS_COMPILER,), program)
    examined: set[str] = set()
    for cpu in ("cortex-a72", "cortex-a76"):
        command = (*EMULATOR, cpu, str(program))
        for name in compiled_kernels.names_of(command, library):
            found, _ = compiled_kernels.differences(command, library, name, fused=True)
            assert found and not any(found.values()), (cpu, name, found)
            examined.add(name)
    assert "portable" in examined
    assert examined == set(built) - {"i8mm"}, "neither of these processors has i8mm"


def spilling_tiles(loops: dict[str, list[Loop]], products_per_reference: int) -> dict[str, int]:
    """The tiles whose hottest loop refers to the stack too often, and how often it does."""
    return {
        name: loop.stack_references
        for name, loop in hot_tiles(loops).items()
        if loop.stack_references
        > max(MAX_STACK_REFERENCES, loop.products // products_per_reference)
    }


def hot_tiles(loops: dict[str, list[Loop]]) -> dict[str, Loop]:
    """The hottest loop of each tile of linear layers, and of attention's functions that with the
    most products."""
    tiles: dict[str, Loop] = {}
    for function, inner in loops.items():
        if match := _TILE.search(function):
            loop = hottest(inner)
            assert loop is not None, f"{function} multiplies nothing"
            tiles[f"{match[1]} of {match[2]} rows"] = loop
        elif _ATTENTION.search(function):
            products = [loop for loop in inner if loop.products >= FEWEST_PRODUCTS]
            if products:
                name = function.split("(")[0].removeprefix("void ")
                tiles[name] = max(products, key=lambda loop: loop.products)
    return tiles


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which(CROSS_COMPILER) is None, reason=f"no {CROSS_COMPILER}")
@pytest.mark.parametrize("name", hatch_build.INSTRUCTION_SETS["aarch64"])
def test_inner_loops_of_aarch64_keep_their_sums_in_registers(name: str, tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    flags = hatch_build.INSTRUCTION_SETS["aarch64"][name]
    compiled_kernels.compile_alone((CROSS_COMPILER,), "aarch64", flags, library)
    assert_tiles_are_fast(library, CROSS_COMPILER.replace("g++", "objdump"), "aarch64")


@needs_x86
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
@pytest.mark.parametrize("name", COMPILERS)
def test_inner_loops_keep_their_sums_in_registers(name: str, compile_avx2: CompileAvx2) -> None:
    assert_tiles_are_fast(compile_avx2(name), "objdump")


def assert_tiles_are_fast(library: Path, objdump: str, machine: str = MACHINE) -> None:
    loops = compiled_kernels.loops_of(library, objdump)
    tiles = hot_tiles(loops)
    kinds = {name.split(" of ")[0] for name in tiles if " of " in name}
    assert len(kinds) >= 4, f"fp32, bf16, int8 and int4 have tiles, but only {kinds} have names"
    if any("::attend_rows<" in function for function in loops):
        assert any("AttentionItem" in name for name in tiles)
    assert spilling_tiles(loops, PRODUCTS_PER_REFERENCE[machine]) == {}


def slow_rows(rows: list[dict[str, Any]]) -> list[str]:
    """The rows of `bench.kernels` below their shares, and those of GCC below clang's rate; empty if
    all are fast."""
    problems = []
    rates: dict[tuple[int, str], dict[str, float]] = {}
    for row in rows:
        if row["limit"] is None:
            continue
        share = row["share_of_read"] if row["rows"] == 1 else row["share_of_fma"]
        smallest = ON_A_BUSY_MACHINE * MIN_SHARES[row["rows"]][row["scheme"]]
        what = f"{row['scheme']} of {row['rows']} rows by {row['compiler']}"
        if share < smallest:
            problems.append(
                f"{what} reaches {share:.2f} of {row['limit']:.1f}, less than {smallest:.2f}"
            )
        compiler_name = row["compiler"].split()[0]
        rates.setdefault((row["rows"], row["scheme"]), {})[compiler_name] = row["gflop_per_s"]
    for (count, scheme), by_compiler in rates.items():
        ratio = by_compiler["gcc"] / by_compiler["clang"]
        if ratio < MIN_GCC_TO_CLANG:
            problems.append(f"{scheme} of {count} rows by GCC has {ratio:.2f} of clang's rate")
    return problems


def bench_row(compiler_name: str, share: float) -> dict[str, Any]:
    """A row of `bench.kernels` for bf16 and 8 rows."""
    return {
        "rows": 8,
        "scheme": "bf16",
        "compiler": compiler_name,
        "limit": 90.0,
        "gflop_per_s": 90 * share,
        "share_of_read": None,
        "share_of_fma": share,
    }


@pytest.mark.parametrize(
    ("gcc_share", "clang_share", "problems"),
    [(0.9, 0.9, 0), (0.31, 0.31, 0), (0.29, 0.31, 1), (0.6, 0.9, 1), (0.02, 0.6, 2)],
    ids=[
        "fast",
        "a busy machine",
        "one below its share",
        "GCC slower than clang",
        "the fault of old kernels",
    ],
)
def test_slow_rows_are_found(gcc_share: float, clang_share: float, problems: int) -> None:
    both = [bench_row("gcc 12.2.0", gcc_share), bench_row("clang 22.1.8", clang_share)]
    assert len(slow_rows(both)) == problems


@needs_x86
@needs_avx2
@pytest.mark.long
@pytest.mark.timing
@pytest.mark.timeout(2000)
def test_linear_layers_reach_the_limits_of_the_machine(
    compile_avx2: CompileAvx2, tmp_path: Path
) -> None:
    """At least half of what an idle machine reaches, by both compilers; one of three tries must
    do."""
    output = tmp_path / "rows.json"
    command = [
        sys.executable,
        "-m",
        "bench.kernels",
        "--linear",
        "--kernels",
        NAME,
        "-o",
        str(output),
    ]
    command += ["--copies", str(COPIES), "--rounds", "5", "--schemes", "bf16,int8,int4"]
    command += ["--rows", ",".join(map(str, MIN_SHARES))]
    for name in COMPILERS:
        command += ["--library", str(compile_avx2(name))]
    problems: list[str] = []
    for _ in range(TRIES):
        subprocess.run(command, cwd=ROOT, check=True, timeout=600, stdout=subprocess.DEVNULL)
        problems = slow_rows(json.loads(output.read_text())["rows"])
        if not problems:
            return
    pytest.fail("\n".join(problems))
