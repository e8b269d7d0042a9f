"""The source of `csrc/hopper_gemm.cu` for one cut of a product, and its machine code by NVRTC."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

Kind = Literal["bf16", "e4m3", "int8"]

SOURCE = Path(__file__).parent / "csrc" / "hopper_gemm.cu"
STEP_BYTES = 128
"""Of a row of weight or input, in one step."""

_KINDS: tuple[Kind, ...] = ("bf16", "e4m3", "int8")
_INSTRUCTIONS = {
    "bf16": ("k16.f32.bf16.bf16", "p, 1, 1, 0, 0", "f"),
    "e4m3": ("k32.f32.e4m3.e4m3", "p, 1, 1", "f"),
    "int8": ("k32.s32.s8.s8", "p", "r"),
}
# Registers of a block's threads: what the groups that multiply take from the one that copies, by their number.
_REGISTERS = {1: None, 2: (24, 240), 3: (24, 160)}
# Rows of an instruction: more, and the compiler waits for each instruction, for want of registers.
_WIDEST = {1: 256, 2: 128, 3: 128}
_ALIGNMENT, _PADDING = 1024, 16


class CompilerMissing(RuntimeError):
    """NVRTC is not installed, or refuses the source."""


@dataclass(frozen=True)
class Cut:
    """How a product of a few rows is cut.

    Attributes:
        groups: of 64 outputs that a block of threads owns, 1 to 3.
        rows: of the input, which a block multiplies at a time: 16, 32, 64, 128 or 256.
        splits: parts of the inputs, each of which a block of a cluster multiplies: 1, 2 or 4.
        stages: steps of 128 bytes a row that are in flight, 2 or more.
    """

    groups: int
    rows: int
    splits: int
    stages: int

    def __post_init__(self) -> None:
        if self.groups not in _REGISTERS or self.rows not in (16, 32, 64, 128, 256) or self.splits not in (1, 2, 4):
            raise ValueError(f"{self} is not a cut that the kernel knows")
        if self.stages < 2:
            raise ValueError(f"{self} has no stage to fill while one is multiplied: take 2 or more")
        if self.rows // self.splits % 16:
            raise ValueError(f"{self} leaves a block less than 16 rows to finish: take fewer splits")

    @property
    def outputs(self) -> int:
        """That a block owns."""
        return 64 * self.groups

    @property
    def shared_bytes(self) -> int:
        """Of shared memory that a block takes: stages, or what it gives to others and its results."""
        sums = self.outputs * self.rows * 4
        after = max(sums - sums // self.splits, self.rows // self.splits * (2 * self.outputs + _PADDING))
        return _ALIGNMENT + max(self.stages * (self.outputs + self.rows) * STEP_BYTES, after)


def source(kind: Kind, cut: Cut, gated: bool = False) -> str:
    """CUDA C++ of the kernel; ``gated``: for a gate and what it multiplies."""
    shape, flags, register = _INSTRUCTIONS[kind]
    width = min(cut.rows, _WIDEST[cut.groups])
    n = width // 2
    sums = ", ".join(f"%{i}" for i in range(n))
    outputs = ", ".join(f'"+{register}"(d[{i}])' for i in range(n))
    registers = _REGISTERS[cut.groups]
    fewer, more = ("", "") if registers is None else (_limit("dec", registers[0]), _limit("inc", registers[1]))
    values = {"GROUPS": cut.groups, "ROWS": cut.rows, "SPLITS": cut.splits, "STAGES": cut.stages}
    defines = {
        **values,
        "WIDTH": width,
        "GATED": int(gated),
        "KIND": _KINDS.index(kind),
        "FEWER_REGISTERS": fewer,
        "MORE_REGISTERS": more,
    }
    to_bits, from_bits = ("x", "x") if kind == "int8" else ("__float_as_uint(x)", "__uint_as_float(x)")
    prelude = f"""
typedef {"int" if kind == "int8" else "float"} Sum;
__device__ __forceinline__ unsigned bits(Sum x) {{ return {to_bits}; }}
__device__ __forceinline__ Sum from_bits(unsigned x) {{ return {from_bits}; }}
__device__ __forceinline__ void settled(Sum& x) {{ asm volatile("" : "+{register}"(x)::"memory"); }}
__device__ __forceinline__ void wgmma(Sum* d, unsigned long long a, unsigned long long b, int add) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{n + 2}, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{width}{shape} {{{sums}}}, %{n}, %{n + 1}, {flags};\\n}}"
    : {outputs} : "l"(a), "l"(b), "r"(add));
}}
"""
    return "".join(f"#define {key} {value}\n" for key, value in defines.items()) + prelude + SOURCE.read_text()


def _limit(way: str, registers: int) -> str:
    return f'asm volatile("setmaxnreg.{way}.sync.aligned.u32 {registers};")'


@functools.cache
def _nvrtc() -> ModuleType:
    try:
        return importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise CompilerMissing(
            f"NVRTC is missing ({error}): pip install cuda-bindings, which torch brings on CUDA"
        ) from error


def machine_code(kind: Kind, cut: Cut, gated: bool = False, options: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """The kernel for compute capability 9.0, and what the compiler says.

    Args:
        kind: of weight and input.
        cut: of the product.
        gated: for a gate and what it multiplies.
        options: more of NVRTC's.

    Raises:
        CompilerMissing: see there.
    """
    nvrtc = _nvrtc()
    text = source(kind, cut, gated).encode()

    def ask(name: str, *arguments: object) -> list[object]:
        try:
            code, *values = getattr(nvrtc, name)(*arguments)
        except (RuntimeError, OSError, AttributeError) as error:  # the library is found at the first call
            raise CompilerMissing(f"NVRTC is missing ({error}): pip install nvidia-cuda-nvrtc") from error
        if int(code):
            raise CompilerMissing(f"NVRTC: {name}: {code.name}; {said() if name == 'nvrtcCompileProgram' else ''}")
        return values

    def read(what: str) -> bytes:
        (size,) = ask(f"nvrtcGet{what}Size", program)
        buffer = bytearray(int(size))  # pyright: ignore[reportArgumentType]
        ask(f"nvrtcGet{what}", program, buffer)  # not into bytes: short ones are shared by the whole process
        return bytes(buffer)

    def said() -> str:
        return read("ProgramLog").decode(errors="replace").strip("\0 \n")

    (program,) = ask("nvrtcCreateProgram", text, b"hopper_gemm.cu", 0, [], [])
    flags = ["-arch=sm_90a", "-std=c++17", "--device-as-default-execution-space", *options]
    ask("nvrtcCompileProgram", program, len(flags), [flag.encode() for flag in flags])
    code, log = read("CUBIN"), said()
    ask("nvrtcDestroyProgram", program)
    return code, log
