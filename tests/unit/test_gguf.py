"""The GGUF reader: what it reads is what was written, and what breaks the format is refused."""

from __future__ import annotations

import math
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quire
from quire.errors import GGUFError
from quire.weights.fingerprint import fingerprint
from quire.weights.gguf import GGUF, GGMLType, StringArray
from quire.weights.strings import find_strings
from tests import tiny
from tests.gguf_writer import (
    Typed,
    ValueType,
    encode_entry,
    encode_string,
    encode_tensor,
    gguf_bytes,
    header,
    write_gguf,
)

VOCABULARIES = Path(__file__).parents[3] / "shared" / "golden" / "tokenizers"

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "naïve.key": "text with \0 and 🙂",
    "empty": "",
    "u8": Typed(ValueType.UINT8, 255),
    "i8": Typed(ValueType.INT8, -128),
    "u16": Typed(ValueType.UINT16, 65535),
    "i16": Typed(ValueType.INT16, -32768),
    "u32": 2**32 - 1,
    "i32": -(2**31),
    "u64": 2**64 - 1,
    "i64": -(2**63),
    "f32": 0.5,
    "f64": Typed(ValueType.FLOAT64, 0.1),
    "yes": True,
    "no": False,
    "nan": math.nan,
}
ARRAYS: dict[str, Any] = {
    "a.u32": [1, 2, 3],
    "a.i8": Typed(ValueType.INT8, [-1, 2]),
    "a.f64": Typed(ValueType.FLOAT64, [0.1, 0.2]),
    "a.bool": [True, False, True],
    "a.none": Typed(ValueType.FLOAT32, []),
}


def weights(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


def open_bytes(tmp_path: Path, content: bytes) -> GGUF:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return GGUF.open(path)


class TestReading:
    @pytest.mark.parametrize("version", [2, 3])
    def test_scalars_come_back(self, tmp_path: Path, version: int) -> None:
        with GGUF.open(write_gguf(tmp_path / "m", METADATA, version=version)) as file:
            assert file.version == version
            assert file.alignment == 32
            assert list(file.metadata) == list(METADATA)
            for key, value in METADATA.items():
                expected = value.value if isinstance(value, Typed) else value
                found = file.metadata[key]
                assert type(found) is type(expected)
                assert found == expected or (math.isnan(found) and math.isnan(expected))  # type: ignore[arg-type]

    def test_arrays_come_back_with_their_type(self, tmp_path: Path) -> None:
        with GGUF.open(write_gguf(tmp_path / "m", ARRAYS)) as file:
            types = {"a.u32": "<u4", "a.i8": "i1", "a.f64": "<f8", "a.bool": "?", "a.none": "<f4"}
            for key, value in ARRAYS.items():
                array = file.get_array(key)
                assert isinstance(array, np.ndarray)
                assert array.dtype == np.dtype(types[key])
                assert array.tolist() == (value.value if isinstance(value, Typed) else value)
                assert array.flags.aligned and array.flags.writeable

    @pytest.mark.parametrize("alignment", [1, 8, 32, 4096])
    def test_tensors_come_back(self, tmp_path: Path, alignment: int) -> None:
        raw = np.arange(2 * 3 * 18, dtype=np.uint8)
        tensors: dict[str, Any] = {
            "one": weights(5),
            "half": weights(2, 3, 4, 5).astype(np.float16),
            "packed": (GGMLType.Q4_0, raw, (2, 96)),
        }
        path = write_gguf(tmp_path / "m", {"some": "key"}, tensors, alignment=alignment)
        with GGUF.open(path) as file:
            assert file.alignment == alignment
            assert list(file.tensors) == list(tensors)
            assert file.tensors["packed"].shape == (2, 96)
            assert file.tensors["packed"].type is GGMLType.Q4_0
            assert file.tensors["half"].shape == (2, 3, 4, 5)
            for name, tensor in tensors.items():
                expected = tensor[1].tobytes() if isinstance(tensor, tuple) else tensor.tobytes()
                info = file.tensors[name]
                assert file.data(name).tobytes() == expected
                assert info.nbytes == len(expected)
                assert path.read_bytes()[info.offset :][: info.nbytes] == expected

    def test_a_file_without_anything_is_sound(self, tmp_path: Path) -> None:
        with open_bytes(tmp_path, header(3, 0, 0)) as file:
            assert not file.metadata and not file.tensors

    def test_gaps_between_tensors_are_allowed(self, tmp_path: Path) -> None:
        head = header(3, 2, 0) + encode_tensor("b", (4,), 0, 64) + encode_tensor("a", (4,), 0, 0)
        head += bytes(-len(head) % 32)
        with open_bytes(tmp_path, head + bytes(64) + weights(4).tobytes()) as file:
            assert file.data("b").tobytes() == weights(4).tobytes()
            assert not file.data("a").any()

    def test_agrees_with_the_gguf_package(self, tmp_path: Path) -> None:
        gguf = pytest.importorskip("gguf")
        path = tmp_path / "theirs.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(7)
        writer.add_token_list(["a", "Ġb", "", "🙂"])
        writer.add_token_types([1, -1, 3, 6])
        writer.add_bool("flag", True)
        writer.add_float32("eps", 1e-5)
        writer.add_tensor("w", weights(3, 8))
        writer.add_tensor("v", weights(40).astype(np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with GGUF.open(path) as file:
            assert file.get_int("llama.block_count") == 7
            assert file.get_strings("tokenizer.ggml.tokens") == ["a", "Ġb", "", "🙂"]
            assert list(file.get_array("tokenizer.ggml.token_type")) == [1, -1, 3, 6]
            assert file.get_bool("flag") is True
            assert file.get_float("eps") == np.float32(1e-5)
            assert file.tensors["w"].shape == (3, 8)
            assert file.data("w").tobytes() == weights(3, 8).tobytes()
            assert file.data("v").tobytes() == weights(40).astype(np.float16).tobytes()

    def test_the_writer_of_these_tests_writes_gguf(self, tmp_path: Path) -> None:
        gguf = pytest.importorskip("gguf")
        tensors = {"w": weights(3, 8), "v": weights(9)}
        path = write_gguf(tmp_path / "ours.gguf", METADATA | {"words": ["x", "yz"]}, tensors)
        reader = gguf.GGUFReader(path)
        assert reader.fields["general.architecture"].contents() == "llama"
        assert reader.fields["u64"].contents() == 2**64 - 1
        assert reader.fields["words"].contents() == ["x", "yz"]
        assert {t.name: t.data.tolist() for t in reader.tensors} == {
            name: tensor.tolist() for name, tensor in tensors.items()
        }

    @pytest.mark.parametrize("stem", ["gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2"])
    def test_real_vocabularies_agree_with_a_plain_loop(self, stem: str) -> None:
        path = VOCABULARIES / f"ggml-vocab-{stem}.gguf"
        if not path.exists():
            pytest.skip("no conformance data here")
        raw = path.read_bytes()
        with GGUF.open(path) as file:
            keys = [key for key, value in file.metadata.items() if isinstance(value, StringArray)]
            assert "tokenizer.ggml.tokens" in keys
            for key in keys:
                head = encode_string(key) + struct.pack("<II", ValueType.ARRAY, ValueType.STRING)
                assert file.get_strings(key) == plain_strings(raw, raw.index(head) + len(head))

    def test_a_real_vocabulary_agrees_with_the_gguf_package(self) -> None:
        gguf = pytest.importorskip("gguf")
        path = VOCABULARIES / "ggml-vocab-llama-spm.gguf"
        if not path.exists():
            pytest.skip("no conformance data here")
        fields = gguf.GGUFReader(path).fields
        with GGUF.open(path) as file:
            assert {key for key in fields if not key.startswith("GGUF.")} == set(file.metadata)
            for key, value in file.metadata.items():
                found = value if isinstance(value, int | float | str) else list(value)
                assert found == fields[key].contents(), key


def plain_strings(raw: bytes, at: int) -> list[str]:
    """The strings of an array whose count is at `at`, one after the other."""
    (count,) = struct.unpack_from("<Q", raw, at)
    at += 8
    strings = []
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", raw, at)
        strings.append(raw[at + 8 : at + 8 + length].decode())
        at += 8 + length
    return strings


class TestData:
    def test_data_is_a_copy(self, tmp_path: Path) -> None:
        with GGUF.open(write_gguf(tmp_path / "m", {}, {"w": weights(8)})) as file:
            first, second = file.data("w"), file.data("w")
            assert not np.shares_memory(first, second)
            assert np.array_equal(first, second)

    def test_copies_outlive_the_file(self, tmp_path: Path) -> None:
        metadata = {"words": ["a", "b"], "n": [1, 2]}
        with GGUF.open(write_gguf(tmp_path / "m", metadata, {"w": weights(8)})) as file:
            data, words = file.data("w"), file.metadata["words"]
        assert data.view(np.float32).tolist() == weights(8).tolist()
        assert isinstance(words, StringArray) and words.to_list() == ["a", "b"]
        assert list(file.get_array("n")) == [1, 2]
        with pytest.raises(GGUFError, match="closed"):
            file.data("w")

    def test_memory_is_used_again_only_when_nobody_looks(self, tmp_path: Path) -> None:
        tensors = {name: weights(64, 64) + i for i, name in enumerate("abcdef")}
        with GGUF.open(write_gguf(tmp_path / "m", {}, tensors)) as file:
            rows = {name: file.data(name).view(np.float32).reshape(64, 64)[3] for name in "abc"}
            gone = file.data("d").ctypes.data
            assert file.data("e").ctypes.data == gone
            file.data("f")
            for name, row in rows.items():
                assert np.array_equal(row, tensors[name][3])

    def test_an_unknown_tensor_is_named(self, tmp_path: Path) -> None:
        with (
            GGUF.open(write_gguf(tmp_path / "m", {}, {"w": weights(8)})) as file,
            pytest.raises(GGUFError, match="no tensor 'x'"),
        ):
            file.data("x")

    def test_a_header_larger_than_the_first_look(self, tmp_path: Path) -> None:
        words = [f"word {i}" * (i % 7) for i in range(200_000)]
        numbers = list(range(1_000_000))
        path = write_gguf(tmp_path / "m", {"n": numbers, "words": words}, {"w": weights(8)})
        with GGUF.open(path) as file:
            assert file.get_strings("words") == words
            assert file.get_array("n").tolist() == numbers
            assert file.data("w").tobytes() == weights(8).tobytes()


class TestFilesThatChange:
    """Another process may do to a file what it likes."""

    def test_cut_short_is_an_error(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m", {}, {"a": weights(8), "b": weights(1024, 64)})
        with GGUF.open(path) as file:
            end = file.tensors["b"].offset + file.tensors["b"].nbytes
            os.truncate(path, 4096)
            file.data("a")
            with pytest.raises(GGUFError, match=rf"m: ends at 4096 bytes, tensor 'b' needs {end}"):
                file.data("b")

    def test_cut_short_while_a_model_is_loaded(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        tiny.write(path, tiny.VARIANTS["llama"])
        with pytest.raises(GGUFError, match=r"m\.gguf: ends at \d+ bytes, tensor '.*' needs \d+"):
            quire.load(path, progress=lambda done, total: os.truncate(path, 2048))

    def test_replaced_while_it_is_loaded_changes_nothing(self, tmp_path: Path) -> None:
        path, other = tmp_path / "m.gguf", tmp_path / "other.gguf"
        tiny.write(path, tiny.VARIANTS["llama"])
        tiny.write(other, tiny.VARIANTS["qwen3"])
        with quire.load(path) as llm:
            expected = llm.logits([1, 2, 3])
        replaced = iter([other])

        def replace(done: int, total: int) -> None:
            for source in replaced:
                os.replace(source, path)

        with quire.load(path, progress=replace) as llm:
            assert next(replaced, None) is None
            assert np.array_equal(llm.logits([1, 2, 3]), expected)

    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    def test_nothing_stays_mapped_or_open(self, tmp_path: Path) -> None:
        path = tmp_path / "unmistakable.gguf"
        tiny.write(path, tiny.VARIANTS["llama"])
        with quire.load(path):
            assert path.name not in Path("/proc/self/maps").read_text()
            links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                     if os.path.lexists(f"/proc/self/fd/{fd}")]  # fmt: skip
            assert not any(path.name in link for link in links)

    def test_a_fingerprint_is_that_of_what_was_read(self, tmp_path: Path) -> None:
        tensors = {"a": weights(8), "b": weights(64, 1024)}
        path = write_gguf(tmp_path / "m", {}, tensors)
        with GGUF.open(path) as file:
            expected = fingerprint(file)
        with GGUF.open(path) as file:
            for name in tensors:
                file.data(name)
            path.write_bytes(b"another model")
            assert fingerprint(file) == expected
        assert fingerprint(file) == expected  # and needs no file any more


class TestGetters:
    @pytest.fixture
    def file(self, tmp_path: Path) -> GGUF:
        return GGUF.open(write_gguf(tmp_path / "m.gguf", METADATA | ARRAYS | {"words": ["a"]}))

    def test_values(self, file: GGUF) -> None:
        assert file.get_int("u64") == 2**64 - 1
        assert file.get_int("i8", minimum=-128, maximum=-128) == -128
        assert file.get_float("f32", minimum=0.0, maximum=1.0) == 0.5
        assert file.get_str("general.architecture") == "llama"
        assert file.get_bool("no") is False
        assert file.get_strings("words") == list(file.get_array("words")) == ["a"]

    def test_defaults(self, file: GGUF) -> None:
        assert file.get_int("missing", 3, minimum=10) == 3
        assert file.get_float("missing", None) is None
        assert file.get_str("missing", "x") == "x"
        assert file.get_bool("missing", False) is False
        assert file.get_array("missing", None) is None
        assert file.get_strings("missing", None) is None

    @pytest.mark.parametrize(
        "getter", ["get_int", "get_float", "get_str", "get_bool", "get_array", "get_strings"]
    )
    def test_a_missing_key_is_named(self, file: GGUF, getter: str) -> None:
        with pytest.raises(GGUFError, match=r"m\.gguf.*no 'llama\.block_count'"):
            getattr(file, getter)("llama.block_count")

    @pytest.mark.parametrize(
        "getter,key,message",
        [
            ("get_int", "yes", "'yes' is the bool True, it must be an integer"),
            ("get_int", "f32", "'f32' is the float 0.5, it must be an integer"),
            ("get_int", "a.u32", "an array of 3 uint32 values"),
            ("get_float", "u8", "'u8' is the int 255, it must be a floating-point"),
            ("get_float", "nan", "'nan' is nan, it must be finite"),
            ("get_str", "words", "an array of 1 strings, it must be a string"),
            ("get_bool", "u8", "must be true or false"),
            ("get_array", "u8", "must be an array"),
            ("get_strings", "general.architecture", "the string 'llama', it must be an array"),
        ],
    )
    def test_a_wrong_type_is_named(self, file: GGUF, getter: str, key: str, message: str) -> None:
        with pytest.raises(GGUFError, match=message) as caught:
            getattr(file, getter)(key)
        assert "m.gguf" in str(caught.value)

    def test_limits_are_named(self, file: GGUF) -> None:
        with pytest.raises(GGUFError, match="'u8' is 255, it must be at most 254"):
            file.get_int("u8", maximum=254)
        with pytest.raises(GGUFError, match="'i8' is -128, it must be at least 0"):
            file.get_int("i8", minimum=0)
        with pytest.raises(GGUFError, match=r"'f32' is 0\.5, it must be at least 0\.75"):
            file.get_float("f32", minimum=0.75)


class TestStrings:
    @settings(deadline=None)
    @given(
        st.lists(
            st.one_of(
                st.binary(max_size=12),
                st.text(max_size=6).map(str.encode),
                st.sampled_from([b"", b"\0", bytes(8), bytes(20), b"x" * 300, b"y" * 65_535]),
                st.sampled_from([b"z" * 65_536, b"a\0", b"\0b", b"\xff", struct.pack("<Q", 3)]),
            ),
            max_size=60,
        ),
        st.binary(max_size=20),
        st.integers(1, 4),
    )
    def test_every_list_of_strings_comes_back(
        self, strings: list[bytes], after: bytes, repeat: int
    ) -> None:
        strings = strings * repeat
        prefix = b"abc"
        encoded = b"".join(map(encode_string, strings))
        data = np.frombuffer(prefix + encoded + after, dtype=np.uint8)
        starts, end = find_strings(data, len(prefix), len(strings))
        assert end == len(prefix) + len(encoded)
        array = StringArray(data[len(prefix) : end], starts - len(prefix))
        expected = [text.decode("utf-8", "surrogateescape") for text in strings]
        assert array.to_list() == list(array) == array[:] == expected
        assert [array[i - len(array)] for i in range(len(array))] == expected
        assert [text.encode("utf-8", "surrogateescape") for text in array] == strings
        assert len(array) == len(strings)

    def test_windows_meet_without_a_seam(self) -> None:
        rng = np.random.default_rng(0)
        strings = [b"t" * int(n) for n in rng.integers(0, 40, 20_000)]
        strings[777], strings[9_000] = b"L" * 200_000, b"\0" * 50
        data = np.frombuffer(b"".join(map(encode_string, strings)), dtype=np.uint8)
        starts, end = find_strings(data, 0, len(strings))
        assert end == len(data)
        assert list(StringArray(data, starts)) == [text.decode() for text in strings]

    def test_indices_outside_raise(self, tmp_path: Path) -> None:
        words = GGUF.open(write_gguf(tmp_path / "m", {"words": ["a", "b"]})).metadata["words"]
        assert isinstance(words, StringArray)
        assert words[1] == words[-1] == "b"
        for index in (2, -3):
            with pytest.raises(IndexError):
                words[index]

    def test_an_empty_array_is_empty(self, tmp_path: Path) -> None:
        metadata = {"words": Typed(ValueType.STRING, [])}
        assert GGUF.open(write_gguf(tmp_path / "m", metadata)).get_strings("words") == []

    def test_invalid_utf8_is_kept_as_bytes(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m", {"words": [b"\xff\xfe", "fine"]})
        broken, fine = GGUF.open(path).get_strings("words")
        assert fine == "fine"
        assert broken.encode("utf-8", "surrogateescape") == b"\xff\xfe"
        with pytest.raises(UnicodeEncodeError):
            broken.encode()

    def test_many_strings_are_quick_to_open(self, tmp_path: Path) -> None:
        metadata = {"words": [f"word{i}" for i in range(100_000)]}
        path = write_gguf(tmp_path / "m", metadata)
        GGUF.open(path)
        start = time.process_time()
        GGUF.open(path)
        assert time.process_time() - start < 0.1  # some 3 ms on a free machine

    @pytest.mark.parametrize("string", [b"", b"\0", b"x\0\0\0\0\0\0y"])
    def test_strings_that_defeat_the_quick_way_take_linear_time(self, string: bytes) -> None:
        encoded = encode_string(string)
        count = 2_000_000 // len(encoded)
        data = np.frombuffer(encoded * count, dtype=np.uint8)
        start = time.process_time()
        starts, end = find_strings(data, 0, count)
        assert time.process_time() - start < 2.0  # some 40 ms on a free machine
        assert end == len(data)
        assert starts.tolist() == list(range(0, len(data), len(encoded)))


KEY = encode_string("key")


def entry(type: int, raw: bytes) -> bytes:
    """A file with one metadata entry of the given type and raw value."""
    return header(3, 0, 1) + KEY + struct.pack("<I", type) + raw


def array(item_type: int, count: int, raw: bytes = b"") -> bytes:
    return entry(ValueType.ARRAY, struct.pack("<IQ", item_type, count) + raw)


def tensors(*described: bytes, data: int = 4096, alignment: Any = None) -> bytes:
    """A file with tensors described as given, and that many bytes for all of them."""
    entries = b"" if alignment is None else encode_entry("general.alignment", alignment)
    head = header(3, len(described), int(alignment is not None)) + entries + b"".join(described)
    return head + bytes(-len(head) % 32) + bytes(data)


NESTED = array(9, 1, struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQI", 4, 1, 7))
HUGE = 2**62

BROKEN = {
    "magic": (b"GGUX" + bytes(60), "begins with b'GGUX'"),
    "tiny": (b"GG", "begins with b'GG'"),
    "header cut": (header(3, 0, 0)[:20], "header at offset 0 needs 24 bytes, file has 20"),
    "zip": (b"PK\3\4" + bytes(60), "looks like a zip"),
    "pickle": (b"\x80\x04\x95" + bytes(60), "looks like a pickle"),
    "safetensors": (struct.pack("<Q", 60) + b'{"a":{}}', "looks like safetensors"),
    "web page": (b"\n<!DOCTYPE html><html>", "looks like a web page"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "ggml": (b"tjgg" + bytes(60), "older GGML"),
    "version 0": (header(0, 0, 0), "version 0; Quire reads 2 and 3"),
    "version 1": (header(1, 0, 0), "version 1; .*convert the model again"),
    "version 4": (header(4, 0, 0), "version 4; .*newer Quire"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), r"big-endian GGUF \(version 3\)"),
    "2^60 entries": (header(3, 0, 2**60), f"{2**60} metadata entries .* file has 0 left"),
    "2^60 tensors": (header(3, 2**60, 0), f"{2**60} tensors .* file has 0 left"),
    "one entry too many": (header(3, 0, 1), "1 metadata entries at offset 24 need at least 13"),
    "key of 2^62": (header(3, 0, 1) + struct.pack("<Q", HUGE) + bytes(9), f"{HUGE} bytes, at most"),
    "key not UTF-8": (header(3, 0, 1) + encode_entry(b"\xff", 1), "not UTF-8 at offset 32"),
    "string of 2^62": (entry(8, struct.pack("<Q", HUGE)), f"'key' .*needs {HUGE} bytes"),
    "string not UTF-8": (entry(8, encode_string(b"ab\xff")), "value of 'key' is not UTF-8"),
    "unknown value type": (entry(13, bytes(8)), "unknown value type 13"),
    "truth value of 2": (entry(7, b"\2"), "truth value of 2"),
    "array of 2^50": (array(4, 2**50), f"{2**50} elements of 'key'"),
    "array of 2^64-1": (array(12, 2**64 - 1), "elements of 'key'"),
    "array of 2^50 strings": (array(8, 2**50), f"{2**50} strings of 'key'"),
    "array cut": (array(8, 2, encode_string("word") + bytes(7)), "string 2 of 2 runs past"),
    "string in array of 2^62": (array(8, 1, struct.pack("<Q", HUGE)), "string 1 of 1 runs past"),
    "array of unknown": (array(99, 0), "array of the unknown value type 99"),
    "array of truth values of 7": (array(7, 3, b"\0\1\7"), "truth value of 7"),
    "nested arrays": (NESTED, "array of arrays"),
    "duplicate key": (header(3, 0, 2) + encode_entry("k", 1) * 2, "'k' appears twice"),
    "alignment 0": (tensors(alignment=0), "alignment' is 0, it must be a power of two"),
    "alignment 24": (tensors(alignment=24), "alignment' is 24, it must be a power of two"),
    "alignment -8": (tensors(alignment=-8), "must be a uint32"),
    "alignment of 64 bits": (tensors(alignment=2**40), "must be a uint32"),
    "alignment a string": (tensors(alignment="32"), "must be a uint32"),
    "alignment an array": (tensors(alignment=[32]), "must be a uint32"),
    "duplicate tensor": (
        tensors(encode_tensor("w", (4,), 0, 0), encode_tensor("w", (4,), 0, 32)),
        "'w' appears twice",
    ),
    "no dimension": (tensors(encode_tensor("w", (), 0, 0)), "'w' has 0 dimensions"),
    "five dimensions": (tensors(encode_tensor("w", (1,) * 5, 0, 0)), "'w' has 5 dimensions"),
    "2^32-1 dimensions": (
        header(3, 1, 0) + encode_string("w") + struct.pack("<I", 2**32 - 1) + bytes(99),
        "'w' has 4294967295 dimensions",
    ),
    "empty dimension": (tensors(encode_tensor("w", (4, 0), 0, 0)), "empty dimension"),
    "product past 2^64": (
        tensors(encode_tensor("w", (2**63, 2**63, 4), 0, 0)),
        rf"'w' needs {2**130} bytes, file has \d+",
    ),
    "product that wraps to 0": (
        tensors(encode_tensor("w", (2**32, 2**32), 0, 0)),
        rf"'w' needs {2**66} bytes, file has \d+",
    ),
    "row not whole blocks": (
        tensors(encode_tensor("w", (2, 48), GGMLType.Q4_0, 0)),
        "rows of 48 weights, Q4_0 needs a multiple of 32",
    ),
    "removed type": (tensors(encode_tensor("w", (32,), 4, 0)), "type 4, Q4_2, which ggml removed"),
    "unknown type": (tensors(encode_tensor("w", (32,), 999, 0)), "'w' has type 999, unknown"),
    "misaligned": (tensors(encode_tensor("w", (4,), 0, 16)), "offset 16, it must be a multiple of"),
    "past the end": (
        tensors(encode_tensor("w", (1024,), 0, 32)),
        r"'w' needs 4096 bytes from offset \d+ on, file has \d+",
    ),
    "offset of 2^64": (tensors(encode_tensor("w", (4,), 0, 2**64 - 32)), "'w' needs 16 bytes from"),
    "overlap": (
        tensors(encode_tensor("b", (8,), 0, 32), encode_tensor("a", (16,), 0, 0)),
        "'a' and 'b' overlap",
    ),
    "same place": (
        tensors(encode_tensor("a", (8,), 0, 0), encode_tensor("b", (8,), 0, 0)),
        "'a' and 'b' overlap",
    ),
    "data missing": (
        gguf_bytes({}, {"w": weights(64)})[:-1],
        r"'w' needs 256 bytes .*, file has \d+; .* fetch it again",
    ),
    "description cut": (
        header(3, 1, 0) + encode_tensor("w" * 20, (4,), 0, 0)[:-1],
        "tensor 'w+' at offset 56 needs 20 bytes, file has 19 left",
    ),
}


class TestRefusing:
    @pytest.mark.parametrize("name", BROKEN)
    def test_broken_files_are_refused(self, tmp_path: Path, name: str) -> None:
        content, message = BROKEN[name]
        start = time.process_time()
        with pytest.raises(GGUFError, match=message) as caught:
            open_bytes(tmp_path, content)
        assert time.process_time() - start < 0.5
        assert "model.gguf" in str(caught.value)
        assert len(str(caught.value)) < len(str(tmp_path)) + 300

    def test_text_of_a_file_is_escaped_in_messages(self, tmp_path: Path) -> None:
        key = "\x1b[2J" + "k" * 5000
        with pytest.raises(GGUFError) as caught:
            open_bytes(tmp_path, header(3, 0, 2) + encode_entry(key, 1) * 2)
        assert "\x1b" not in str(caught.value)
        assert "kkk..." in str(caught.value)

    def test_paths_that_are_no_files(self, tmp_path: Path) -> None:
        with pytest.raises(GGUFError, match="No such file"):
            GGUF.open(tmp_path / "missing.gguf")
        with pytest.raises(GGUFError, match="not a regular file"):
            GGUF.open(tmp_path)
        with pytest.raises(GGUFError, match="null"):
            GGUF.open("a\0b")
        (tmp_path / "empty.gguf").touch()
        with pytest.raises(GGUFError, match=r"empty\.gguf: the file is empty"):
            GGUF.open(tmp_path / "empty.gguf")

    @pytest.mark.skipif(sys.platform == "win32", reason="needs pipes with names")
    def test_a_pipe_does_not_hang(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(GGUFError, match="not a regular file"):
            GGUF.open(tmp_path / "pipe")
