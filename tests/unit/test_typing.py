"""What programs of others are checked against: the types of the public names."""

from __future__ import annotations

import dataclasses
import inspect
import re
from importlib.resources import files
from pathlib import Path

import pytest

import quire
from quire.config import LoadConfig

USE = """
import quire
llm = quire.load("smollm2", n_ctx=512, type_k="q8_0")
reveal_type(llm)
reveal_type(llm.generate("a"))
reveal_type(llm.generate([1, 2]))
reveal_type(llm.generate(["a", "b"], temperature=0.5))
reveal_type(llm.generate([[1], [2]]))
reveal_type(llm.generate("a", n=2, stop=["x"]))
reveal_type(llm.generate(["a"], n=2))
reveal_type(llm.chat([{"role": "user", "content": "hi"}], tools=[], temperature=1))
reveal_type(llm.chat([{"role": "user", "content": "hi"}], n=3))
reveal_type(llm.embed(["a"]))
async def use() -> None:
    reveal_type(await llm.agenerate("a"))
    reveal_type(await llm.agenerate(["a"], n=2))
with llm.stream("a") as stream:
    reveal_type(next(stream))
"""
TYPES = [
    "quire.api.llm.LLM", "Completion", "Completion", "list[Completion]", "list[Completion]",
    "list[Completion]", "list[list[Completion]]", "Completion", "list[Completion]",
    "numpy.ndarray[tuple[Any, ...], numpy.dtype[numpy.floating[numpy._typing._nbit_base._32Bit]]]",
    "Completion", "list[list[Completion]]", "str",
]  # fmt: skip
WRONG = """
import quire
quire.load("smollm2", n_ctxx=512)
quire.load("smollm2", n_ctx="many")
quire.load("smollm2").generate("a", temprature=1.0)
quire.load("smollm2").chat("Hi")
"""


def mypy(tmp_path: Path, text: str) -> list[str]:
    api = pytest.importorskip("mypy.api")
    program = tmp_path / "program.py"
    program.write_text(text)
    root = Path(quire.__file__).parent.parent
    out, err, _ = api.run(
        [str(program), "--strict", f"--cache-dir={root / '.mypy_cache'}", "--no-error-summary",
         "--follow-imports=silent"]
    )  # fmt: skip
    assert not err, err
    return out.splitlines()


@pytest.mark.slow
def test_a_program_is_told_what_comes_back(tmp_path: Path) -> None:
    lines = mypy(tmp_path, USE)
    found = [re.findall(r'Revealed type is "(.*)"', line) for line in lines]
    types = [one[0].replace("builtins.", "").replace("quire.types.", "") for one in found if one]
    assert types == TYPES, "\n".join(lines)
    assert not [line for line in lines if "error" in line]


@pytest.mark.slow
def test_a_program_is_told_what_is_wrong(tmp_path: Path) -> None:
    wrong = [line for line in mypy(tmp_path, WRONG) if ": error: " in line]
    assert {int(line.split(":")[1]) for line in wrong} == {3, 4, 5, 6}, wrong


def test_the_package_says_that_it_is_typed() -> None:
    assert files("quire").joinpath("py.typed").is_file()


def test_load_spells_its_settings_out() -> None:
    parameters = dict(inspect.signature(quire.load).parameters)
    for own in ("model", "progress", "beside", "unknown"):
        del parameters[own]
    fields = {field.name: field for field in dataclasses.fields(LoadConfig)}
    assert list(parameters) == list(fields)
    for name, parameter in parameters.items():
        assert (parameter.default, parameter.annotation) == (
            fields[name].default,
            fields[name].type,
        )
        assert re.search(rf"\b{name}\b.*:", quire.load.__doc__ or ""), name
