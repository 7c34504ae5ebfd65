"""Compile every Triton kernel for a Hopper GPU, at the sizes of Pro, on any machine; print what came out as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from diptych.attention import bounded_kernel, merge_kernel, short_kernel
from diptych.attention import quantise as attention
from diptych.codecs import conv3d, group_norm
from diptych.model.kernels import adaln, quantise, rotate

HALF, WIDE, FP8 = "*bf16", "*fp32", "*fp8e4nv"


def pointers(**of: str) -> dict[str, str]:
    """Arguments by type: `bf16="x y"`."""
    return {name: f"*{kind}" for kind, names in of.items() for name in names.split()}


def integers(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), "i32")


TOKENS = 51_840  # of 864x480, 125 frames
ADALN = (
    pointers(bf16="x_ptr y_ptr", fp32="gate_ptr shift_ptr scale_ptr")
    | pointers(bf16="sum_ptr normed_ptr", fp32="rows_ptr")
    | integers("gate_stride shift_stride scale_stride S")
)


def adaln_case(D: int, *, gated: bool = True, normed: bool = True, rows: bool = False) -> tuple:
    tune = adaln.tuning(TOKENS, D, gated=gated, normed=normed, rows=rows)
    warps = tune.pop("num_warps")
    what = {"D": D, "GATED": gated, "NORMED": normed, "ROWWISE": rows, "BLOCK": triton.next_power_of_2(D)}
    return adaln._adaln, ADALN | ({"normed_ptr": FP8} if rows else {}), what | tune, warps


def rotate_case(H: int, K: int) -> tuple:
    tune = rotate.tuning(TOKENS, H * K)
    warps = tune.pop("num_warps")
    what = {"H": H, "K": K, "HEADS": triton.next_power_of_2(H), "ROTATE": True}
    pointed = pointers(bf16="q_ptr k_ptr q_weight_ptr k_weight_ptr q_out_ptr k_out_ptr", fp32="cos_ptr sin_ptr")
    return (
        rotate._norm_rotate,
        pointed | integers("batch_stride token_stride S") | {"q_scale": "fp32"},
        what | tune,
        warps,
    )


def merge_case(K: int, *, first: bool = False, last: bool = False) -> tuple:
    tune = merge_kernel.tuning(K)
    warps = tune.pop("num_warps")
    what = {"H": 32, "K": K, "LAST": last, "BLOCK": K}
    what |= {"weight_ptr": None} if first else {}
    what |= {"out_weight_ptr": None} if last else {}
    halves = "part_ptr" + " old_ptr" * first + " out_ptr" * last
    wides = "max_ptr lse_ptr out_max_ptr" + " old_ptr weight_ptr" * (not first) + " out_ptr out_weight_ptr" * (not last)
    strides = " ".join(
        f"{of}_{axis}_stride" for of in ("old", "max", "part", "lse") for axis in ("batch", "token", "head")
    )
    return merge_kernel._add, pointers(bf16=halves, fp32=wides) | integers("rows " + strides), what | tune, warps


CASES = {
    "adaln": adaln_case(4096),
    "adaln of Lite": adaln_case(1792),
    "adaln rows": adaln_case(4096, rows=True),
    "adaln rows of Lite": adaln_case(1792, rows=True),
    "scale and shift": adaln_case(4096, gated=False),
    "scale and shift of Lite": adaln_case(1792, gated=False),
    "rotate": rotate_case(32, 128),
    "rotate of Lite": rotate_case(28, 64),
    "gelu": (quantise._gelu_in_place, {"x_ptr": HALF, "values": "i32"}, {"BLOCK": 4096}, 4),
    "gelu rows": (
        quantise._rows,
        {"x_ptr": HALF, "out_ptr": FP8, "scale_ptr": WIDE, "S": "i32"},
        {"D": 16384, "GELU": True, "BLOCK": 16384, "ROWS": 1, "STEPS": 1},
        16,
    ),
    "turned and rounded": (
        attention._blocks,
        {"x_ptr": HALF, "signs_ptr": HALF, "out_ptr": "*i8", "scale_ptr": WIDE}
        | integers("batch_stride token_stride S")
        | {"root": "fp32"},
        {"H": 32, "K": 128, "ROWS": 64, "HEADS": 8},
        4,
    ),
    "moments": (
        group_norm._moments,
        pointers(fp16="x_ptr", fp32="mean_ptr square_ptr") | integers("rows"),
        {"C": 128, "GROUPS": 32, "ROWS": 32, "LOOP": 16},
        4,
    ),
    "scale and silu": (
        group_norm._scale_silu,
        {"x_ptr": "*fp16", "scale_ptr": WIDE, "shift_ptr": WIDE, "out_ptr": "*fp16", "values": "i32"},
        {"C": 128, "SILU": True, "BLOCK": 4096},
        8,
    ),
    "convolution": (
        conv3d._conv,
        {"x_ptr": "*fp16", "w_ptr": "*fp16", "bias_ptr": WIDE, "residual_ptr": "*fp16", "out_ptr": "*fp16"}
        | integers("T Y X out_T"),
        {"C": 256, "N": 256, "TAPS_T": 2, "TAPS_S": 2, "UP_T": 2, "UP_S": 2, "RESIDUAL": False, "WIDE": False}
        | {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64},
        8,
    ),
}


def compiled(function, arguments: dict[str, str], constants: dict[str, object], warps: int) -> dict[str, int]:
    plain = {"S", "T", "Y", "X", "out_T", "rows"}  # lengths, which need not be multiples of 16
    plain |= {f"{of}_{axis}_stride" for of in ("max", "lse") for axis in ("batch", "token", "head")}
    kinds = arguments | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds[name] for name in function.arg_names}
    aligned = {
        (n,): [["tt.divisibility", 16]] for n, name in enumerate(signature) if name in arguments and name not in plain
    }
    source = ASTSource(function, signature, constants, aligned)
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": 3})
    return told(result.asm["ptx"])


def bounded(K: int, int8: bool) -> dict[str, int]:
    """Attention to scores with a bound, for heads of K, with the log-sum-exp."""
    tile = (bounded_kernel.TILES_INT8 if int8 else bounded_kernel.TILES)[K]
    constants = {"KEYS": tile.keys, "K": K, "STAGES": tile.stages, "LSE": True, "INT8": int8}
    arguments = {}
    for name, rows in (("q_desc", 64), ("k_desc", tile.keys), ("v_desc", tile.keys)):
        kind, dtype = ("i8", gl.int8) if int8 and name != "v_desc" else ("bf16", gl.bfloat16)
        arguments[name] = f"tensordesc<{kind}[{rows}, {K}],{bounded_kernel.layout(rows, K, dtype)!r}>"
    arguments |= pointers(fp32="q_scale_ptr k_scale_ptr", bf16="out_ptr") | {"lse_ptr": WIDE} | integers("Q S H")
    return gluon(bounded_kernel._bounded_attention, arguments, constants)


def short(K: int, normalises: bool, fp8: bool) -> dict[str, int]:
    """Attention to few keys, for heads of K."""
    keys, rows = short_kernel.KEYS.value, short_kernel.ROWS.value
    constants = {"K": K, "SLOTS": short_kernel.HELD // (K * keys), "NORM": normalises, "FP8": fp8}
    kinds = {"q_desc": (rows, "bf16"), "k_desc": (keys, "bf16"), "v_desc": (keys, "bf16")}
    kinds["out_desc"] = (rows, "fp8e4nv" if fp8 else "bf16")
    types = {"bf16": gl.bfloat16, "fp8e4nv": gl.float8e4nv}
    arguments = {
        name: f"tensordesc<{kind}[{height}, {K}],{bounded_kernel.layout(height, K, types[kind])!r}>"
        for name, (height, kind) in kinds.items()
    }
    arguments |= {"weight_ptr": HALF, "fp8_scale_ptr": WIDE, "scale": "fp32", "eps": "fp32"} | integers("Q S each")
    return gluon(short_kernel._bounded_short_attention, arguments, constants)


def gluon(function, arguments: dict[str, str], constants: dict[str, object]) -> dict[str, int]:
    source = GluonASTSource(function, arguments | dict.fromkeys(constants, "constexpr"), constants, {})
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return told(result.asm["ptx"])


def told(ptx: str) -> dict[str, int]:
    """What the assembler says of a kernel. serialised: it runs matrix instructions one by one, and says so."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        ptxas = triton.knobs.nvidia.ptxas.path
        command = [ptxas, "-v", "-arch=sm_90a", path, "-o", Path(folder, "kernel.cubin")]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    spilled = re.search(r"(\d+) bytes spill stores", said)
    return {
        "spilled": int(spilled.group(1)) if spilled else 0,
        "wide loads": len(re.findall(r"ld\.global\S*\.v4|cp\.async\.(cg\.shared\.global|bulk\.tensor)", ptx)),
        "matrix instructions": ptx.count("wgmma.mma_async"),
        "serialised": said.count("wgmma.mma_async instructions are serialized"),
    }


if __name__ == "__main__":
    made = {name: compiled(*case) for name, case in CASES.items()}
    made |= {f"bounded attention, heads of {K}": bounded(K, False) for K in bounded_kernel.TILES}
    made |= {f"bounded attention in int8, heads of {K}": bounded(K, True) for K in bounded_kernel.TILES_INT8}
    made |= {f"bounded attention to few keys, heads of {K}": short(K, False, False) for K in (64, 128)}
    made |= {f"bounded attention to few keys that normalises, heads of {K}": short(K, True, True) for K in (64, 128)}
    print(json.dumps(made))
