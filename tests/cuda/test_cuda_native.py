"""CUDA C++ compiles for every architecture, without a GPU, and keeps its values in registers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.ops.cuda import attend_native, many, nvrtc
from quire.ops.cuda.few import STAGES
from quire.ops.cuda.formats import FORMATS
from quire.ops.cuda.launch import DENSE_SHAPES, SOME_SHAPES

NATIVE = sorted({f.native for f in FORMATS.values() if f.bits or f.dtype.itemsize == 2})
pytestmark = pytest.mark.skipif(not nvrtc.has_compiler(), reason="there is no NVRTC")


def sections(code: bytes) -> Iterator[tuple[str, int, bytes]]:
    """The name, `info` field and bytes of each section of an ELF file."""
    table, size, count, names = (
        struct.unpack_from("<Q", code, 40)[0],
        *struct.unpack_from("<HHH", code, 58),
    )
    heads = [struct.unpack_from("<IIQQQQII", code, table + i * size) for i in range(count)]
    start = heads[names][4]
    for name, _, _, _, at, length, _, info in heads:
        text = code[start + name : code.index(b"\0", start + name)].decode()
        yield text, info, code[at : at + length]


def facts(code: bytes, wanted: int) -> dict[int, int]:
    """One attribute of all functions, by the number of their symbol."""
    found = {}
    for name, _, info in sections(code):
        at = 0
        while name == ".nv.info" and at < len(info):
            form, attribute, size = struct.unpack_from("<BBH", info, at)
            if form == 4 and attribute == wanted:
                symbol, value = struct.unpack_from("<II", info, at + 4)
                found[symbol] = value
            at += 4 + (size if form == 4 else 0)
    return found


def registers(code: bytes) -> dict[str, int]:
    """By kernel."""
    used = facts(code, 0x2F)
    kernels = [(n[6:], info) for n, info, _ in sections(code) if n.startswith(".text.")]
    return {name: used[info & 0xFFFFFF] for name, info in kernels}


def stack(code: bytes) -> int:
    """The largest frame of any kernel: where values lie that found no register."""
    return max(facts(code, 0x11).values(), default=0)


def compiled(files: list[str], architecture: str, **defines: object) -> bytes:
    return nvrtc.compile_source(
        nvrtc.source_of(["common", "norm", "weights", *files]), architecture, defines
    )


def test_rows() -> None:
    found = registers(compiled(["rows"], "sm_90"))
    assert set(found) >= {"prepare_half", "prepare_bfloat", "prepare_float", "join"}
    assert max(found.values()) <= 128


@pytest.mark.parametrize("name", NATIVE)
def test_products_of_few_tokens(name: str) -> None:
    bits = 4 if "<4" in name else 8 if "<8" in name else 0
    stages, blocks = STAGES[bits][0]
    code = compiled(["few"], "sm_90a", WEIGHTS=name, STAGES=stages, BLOCKS=blocks)
    found = registers(code)
    assert set(found) == {"few", "few_normed", "few_gated"}
    assert 0 < max(found.values()) <= 65536 // (256 * blocks)
    assert stack(code) <= 64


@pytest.mark.parametrize("dims", attend_native.DIMS)
def test_attention_of_one_token(dims: int) -> None:
    for rows in (1, 1000):
        how = attend_native.cut(dims, rows, 8, 132, True)
        given = {"TYPE": "Half", "DIMS": dims, "STAGES": how.stages, "BLOCKS": how.blocks}
        source = nvrtc.source_of(attend_native.FILES)
        code = nvrtc.compile_source(source, "sm_90", given)
        assert 0 < registers(code)["attend"] <= 65536 // (256 * how.blocks)
        assert stack(code) == 0
        room = (
            attend_native.shared_bytes(dims, how, how.stages, 16) + 1152
        )  # what every block has besides
        assert how.blocks * room <= 228 << 10


@pytest.mark.parametrize("architecture", ["sm_80", "sm_100"])
def test_other_architectures(architecture: str) -> None:
    given = {"STAGES": 5, "SECOND_STAGES": 4, "BLOCKS": 2}
    compiled(["few"], architecture, WEIGHTS="Dense<Bfloat>", SECOND="Quantised<4,32,1>", **given)
    compiled(["expand"], architecture, WEIGHTS="Quantised<8,16,0>")
    compiled([*attend_native.FILES[1:]], architecture, TYPE="Bfloat", DIMS=128, STAGES=2, BLOCKS=1)
    compiled(["unit", "some"], architecture, WEIGHTS="Quantised<4,32,1>", TOKENS=16, STAGES=4,
             GROUPS=1, BLOCKS=2)  # fmt: skip


@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_products_of_some_tokens(tokens: int) -> None:
    name, shapes = ("Dense<Bfloat>", DENSE_SHAPES) if tokens == 32 else (NATIVE[-1], SOME_SHAPES)
    groups, stages, blocks = shapes[tokens, "gated"]
    given = {"TOKENS": tokens, "GROUPS": groups, "STAGES": stages, "BLOCKS": blocks}
    code = compiled(["unit", "some"], "sm_90a", WEIGHTS=name, **given)
    found = registers(code)
    assert set(found) == {"some_slice", "some_whole", "some_gated", "some_routed"}
    assert 0 < max(found.values()) <= 65536 // (128 * groups * blocks)
    assert stack(code) == 0


@pytest.mark.parametrize("rows, two, act, weights", [
    (192, 0, 0, ""), (128, 0, 1, "Quantised<4,32,1>"), (128, 1, 2, ""),
    (96, 0, 1, "Quantised<8,16,0>"), (80, 1, 0, "Quantised<8,32,1>"),
])  # fmt: skip
def test_products_of_many_tokens(rows: int, two: int, act: int, weights: str) -> None:
    given = {"ROWS": rows, "SHARED": 2, "STAGES": 4, "TYPE": "f16", "TWO": two, "ACT": act}
    given |= {"BFLOAT": 0} | ({"WEIGHTS": weights} if weights else {})
    code = compiled([*many.FILES[2:]], "sm_90a", **given)
    assert set(registers(code)) == {"many"}
    assert stack(code) == 0


@pytest.mark.parametrize("type", ["f16", "bf16"])
def test_attention_of_prompts(type: str) -> None:
    code = compiled(["hopper", "prompt"], "sm_90a", TYPE=type, BFLOAT=1)
    assert set(registers(code)) == {"attend_prompt"}
    assert stack(code) <= 32


def test_what_was_compiled_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    first = nvrtc.compiled(
        ("common", "weights", "expand"), "sm_90", {"WEIGHTS": "Quantised<4,32,1>"}
    )
    assert [path.read_bytes() for path in tmp_path.rglob("*.cubin")] == [first]
    monkeypatch.setattr(nvrtc, "compile_source", None)  # not asked again
    again = nvrtc.compiled(
        ("common", "weights", "expand"), "sm_90", {"WEIGHTS": "Quantised<4,32,1>"}
    )
    assert again == first
    with pytest.raises(TypeError):
        nvrtc.compiled(("common", "weights", "expand"), "sm_80", {"WEIGHTS": "Quantised<4,32,1>"})


def test_mistakes_are_shown() -> None:
    with pytest.raises(nvrtc.CompileError, match="nothing"):
        nvrtc.compile_source("nothing", "sm_90", {})
