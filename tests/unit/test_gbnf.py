"""llama.cpp's grammars: the translation accepts what they accept, and nothing else.

Its example grammars are tried too where they are: its folder `grammars` in build/grammars.
"""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
from llguidance import LLMatcher

from quire.engine.constrain import Constrainer
from quire.errors import RequestError
from quire.text.gbnf import as_lark, gbnf_to_lark
from quire.text.tokenizer import Tokenizer
from quire.types import Grammar
from tests.model_folders import MODELS

EXAMPLES = Path(__file__).parents[2] / "build" / "grammars"
CONSTRAINER = Constrainer(Tokenizer(MODELS / "tiny-dense"))


def accepts(grammar: str, text: str) -> bool:
    """Whether a text as a whole fits."""
    matcher: LLMatcher = CONSTRAINER.compile(Grammar(gbnf_to_lark(grammar)))._matcher
    tokens = CONSTRAINER.vocabulary.encode(text, add_special=False) if text else []
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


LIST = """
# a list
root ::= item+   # one or more
item ::= "- " [^\\r\\n\\x0b\\u2028]+ "\\n"
"""
SUM = """root ::= (expr "=" ws term "\\n")+
expr ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num ::= [0-9]+ ws
ws ::= [ \\t\\n]*
"""
NESTED = """root ::= value
value ::= "{" (pair ("," pair)*)? "}" |
  "[" (value
     ("," value)*)? "]" | digit-s
pair ::= "\\"" [^"\\\\]{1,3} "\\":" value
digit-s ::= [0-9]{2} | "-"? [1-9] | | "x"{,2}
"""


@pytest.mark.parametrize(
    ("grammar", "fits", "others"),
    [
        (LIST, ["- a\n", "- é: x\n- b\n"], ["", "-a\n", "- a", "- \n", "- a\u2028\n"]),
        (SUM, ["a+1=2\n", "(b_2 *3)/4= x\n1=1\n", "a=b \n\n"], ["a+=1\n", "A=1\n", "1=1"]),
        (NESTED, ["{}", "[12,-3,x,,xx]", '{"ab":[{}]}', ""], ["123", '{"abcd":1}', "xxx", "-0"]),
        ('root ::= ("a" | "ab") "b"', ["ab", "abb"], ["a", "b", "abbb"]),
        ('root ::= [a-z]* "end"', ["end", "endend", "xend"], ["en", "ende"]),
        ('root::=aB|B-b\naB::="1"\nB-b::="2"', ["1", "2"], ["12", ""]),
        ("root ::= .{2} [\\]\\[\\\\/^-]", ["a\n]", "é/[", "..\\", "..^", "..-"], ["a]", "abc"]),
        ('root ::= "\\x41\\u00e9\\U0001F600\\t\\""', ["Aé😀\t\""], ["A"]),
        ('root ::= ("a"{2,3}){2}\n', ["aaaa", "aaaaaa"], ["aaa", "aaaaaaa"]),
        ('root ::= a b\na ::= "x" a | \nb ::=\n\n  "y"', ["y", "xxy"], ["x", "yx"]),
    ],
)  # fmt: skip
def test_what_fits(grammar: str, fits: list[str], others: list[str]) -> None:
    assert [text for text in fits if not accepts(grammar, text)] == []
    assert [text for text in others if accepts(grammar, text)] == []


def either(rng: random.Random, depth: int = 0) -> tuple[str, str]:
    """A grammar without rules, and the regular expression that means the same."""
    kind = rng.choice(
        ["text", "class", "not", "seq", "or", "more", "count"][: 3 if depth > 3 else 7]
    )
    if kind == "text":
        text = "".join(rng.choices("ab", k=rng.randint(1, 3)))
        return f'"{text}"', text
    if kind == "class":
        return "[a-b]", "[a-b]"
    if kind == "not":
        return "[^b]", "[^b]"
    parts = [either(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    if kind in ("seq", "or"):
        sign = {"seq": ("", " "), "or": ("|", " | ")}[kind]
        return f"({sign[1].join(p[0] for p in parts)})", f"(?:{sign[0].join(p[1] for p in parts)})"
    sign = rng.choice("*+?") if kind == "more" else rng.choice(["{2}", "{1,2}", "{0,1}", "{1,}"])
    return f"({parts[0][0]}){sign}", f"(?:{parts[0][1]}){sign}"


def test_regular_grammars_fit_what_regular_expressions_fit() -> None:
    rng = random.Random(5)
    fitting = 0
    for _ in range(40):
        grammar, pattern = either(rng)
        for _ in range(12):
            text = "".join(rng.choices("abc", k=rng.randint(0, 6)))
            expected = re.fullmatch(pattern, text) is not None
            assert accepts(f"root ::= {grammar}", text) == expected, (grammar, text)
            fitting += expected
    assert fitting > 40


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ("", "no rule 'root'"),
        ('start ::= "a"', "no rule 'root'.*it has start"),
        ('root ::= "a', "line 1: the end is missing"),
        ("root ::= [a", "the end is missing"),
        ("root ::= item\n\nother ::= item", "line 1: there is no rule 'item'"),
        ('root ::= "a"\nroot ::= "b"', "line 2: there is a rule 'root' already"),
        ('root ::= ("a"', "a parenthesis is not closed"),
        ('root ::= "a")', "belongs to nothing"),
        ('root ::= "a"{3000}', "above 2000"),
        ('root ::= "a"{3,2}', "backwards"),
        ('root ::= "a"{}', "a count is written"),
        ("root ::= [z-a]", "from a lower character"),
        ("root ::= []", "no characters"),
        ('root ::= "\\q"', "no escape"),
        ('root ::= "\\x4"', "2 hexadecimal digits"),
        ('root ::= "\\uD800"', "is no character"),
        ("root ::= !<think>", "must not come"),
        ("root ::= *", "is not expected"),
        ("root", "a rule begins"),
        ("root ::= " + "(" * 5000, "nested deeper"),
    ],
)
def test_what_is_wrong_is_named(grammar: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        gbnf_to_lark(grammar)


def test_long_grammars_take_no_longer_than_they_are() -> None:
    """White space, comments and names in the thousands, where a rule may begin and does not."""
    started = time.monotonic()
    for between in (" " * 5000, " #" * 2500 + "\n", "# \n" * 1700):
        assert gbnf_to_lark(f'root ::= a{between}"b"\na ::= "c"').startswith("start:")
        with pytest.raises(RequestError):
            gbnf_to_lark(f"root ::= a{between}]")
    assert time.monotonic() - started < 5


def test_both_notations_are_told_apart() -> None:
    gbnf = '# a comment\n\nroot ::= "a"'
    assert as_lark(gbnf) == gbnf_to_lark(gbnf)
    for lark in ('start: "::="', '// root ::= x\nstart: "a"', "", "%llguidance {}\nstart: /a/"):
        assert as_lark(lark) == lark


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="llama.cpp's grammars are not here")
@pytest.mark.parametrize(
    ("name", "fits", "others"),
    [
        (
            "json",
            ['{"a": [1, -2.5e3, "x\\n\\u00e9"], "b": {}}', "{}\n"],
            ["[1]", "{'a': 1}", '{"a"}'],
        ),
        ("json_arr", ['[\n{"a": true},\n1]', "[\n]"], ["[1]", "{}"]),
        ("arithmetic", ["(a+1)*2=x\n"], ["a+=1\n"]),
        ("chess", ["1. e4 e5\n2. Nf3 Nc6\n"], ["1. e9 e5\n2. e4 e5\n", "e4"]),
        ("list", ["- one\n- two\n"], ["one\n"]),
        ("english", ["It's 5 o'clock."], ["é"]),
        ("japanese", ["日本語 です。"], ["abc"]),
        ("c", ["int main(){return 1+x;}"], ["main(){}"]),
    ],
)
def test_llama_cpp_examples(name: str, fits: list[str], others: list[str]) -> None:
    test_what_fits((EXAMPLES / f"{name}.gbnf").read_text(), fits, others)
