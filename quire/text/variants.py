"""The ways in which BPE vocabularies split text, by the name in `tokenizer.ggml.pre`.

The patterns and the flags are those of llama.cpp, which a file with such a name is made for;
`pretokenize` says how they are read.
"""

from __future__ import annotations

from dataclasses import replace

from quire.errors import TokenizerError
from quire.text.pretokenize import DigitGroups, PreTokenizer

_CONTRACTION = r"'(?:[sStTmMdD]|[rRvV][eE]|[lL][lL])"
_TAIL = f"(?:{_CONTRACTION})?"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACE = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+|" + _SPACE


def _any(*alternatives: str) -> str:
    return "|".join(alternatives)


def _cased(upper: str, lower: str, tail: str) -> str:
    """Words that begin anew where the case rises: `helloWorld` is two."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return f"{lead}[{upper}]*[{lower}]+{tail}|{lead}[{upper}]+[{lower}]*{tail}"


_GPT2 = _any(r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+", _SPACE)
_LLAMA3 = _any(_CONTRACTION, _WORD, r"\p{N}{1,3}", _PUNCTUATION, _LINES)
_QWEN2 = _any(_CONTRACTION, _WORD, r"\p{N}", _PUNCTUATION, _LINES)
_CASED = _cased(r"\p{Lu}", r"\p{Ll}", _TAIL)
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+" + _TAIL
_LETTERS_OR_MARKS = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK = _any(_LETTERS_OR_MARKS, r" ?[\p{P}\p{S}]+[\r\n]*", _LINES)
_CHINESE_JAPANESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_AND_MORE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)

_DEFAULT = PreTokenizer(
    (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
)
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN_QWEN2 = PreTokenizer((_QWEN2,))
_PLAIN_LLAMA3 = PreTokenizer((_LLAMA3,))
_DEEPSEEK_V3 = PreTokenizer((r"\p{N}{1,3}", _CHINESE_JAPANESE, _DEEPSEEK))
_LINEWISE = PreTokenizer((r"[^\n]+|\n+",), byte_level=False)
_NUMBERS_BY_THREES = DigitGroups(r"\p{N}+", after=True)
_GPT_4O = PreTokenizer((_any(_CASED, r"\p{N}{1,3}", _PATHS, _LINES),))
_BAILING = _any(_CONTRACTION, _WORD, r"\p{N}", _PUNCTUATION, r"\s*[\r\n]", _SPACE)

_VARIANTS: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", _DEFAULT),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe glm4", _PLAIN_LLAMA3),
    (
        "jais-2",
        PreTokenizer(
            (
                _any(
                    _CONTRACTION,
                    _WORD,
                    r"\p{N}{1,3}",
                    _PUNCTUATION,
                    r"(?<![^\S\r\n])\s*[\r\n]+",  # the look-behind keeps long runs of spaces linear
                    *(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)),
                    r"\s{1,2}(?!\S)|\s",
                ),
            )
        ),
    ),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{CASED_LETTERS}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"(?<!\s)\s+\Z",  # the look-behind keeps long runs of spaces linear
                _CJK_AND_MORE,
                r"\p{N}+",
            )
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_MORE, r"\p{N}")),
    ),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK_V3),
    (
        "spark2_5",
        PreTokenizer(
            (
                r"\p{N}{1,3}",
                _CHINESE_JAPANESE,
                _any(_LETTERS_OR_MARKS, r" ?[\p{P}\p{S}]+", r"[\r\n]", _SPACE),
                r"\p{N}",
            )
        ),
    ),
    (
        "youtu",
        PreTokenizer(
            (
                "[\uac00-\ud7a3\u3131-\u318e]+"
                "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
                "\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _CHINESE_JAPANESE,
                _any(_MARKED, r"\p{N}", _PATHS, _LINES),
            ),
            ignore_merges=True,
        ),
    ),
    ("falcon", PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", _DIGITS),
    (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert "
        "jina-v1-en jina-v2-code roberta-bpe exaone4 mpt olmo jais trillion granite-docling",
        _PLAIN_GPT2,
    ),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        _PLAIN_QWEN2,
    ),
    (
        "qwen35",
        PreTokenizer(
            (
                _any(
                    _CONTRACTION,
                    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
                    r"\p{N}",
                    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
                    _LINES,
                ),
            )
        ),
    ),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
    (
        "tekken",
        PreTokenizer(
            (_any(_cased(r"\p{Lu}", r"\p{Ll}", ""), r"\p{N}", _PATHS, _LINES),),
            ignore_merges=True,
            add_bos=True,
        ),
    ),
    (
        "chameleon",
        PreTokenizer(
            (
                r"<sentinel:[0-9]+>",
                r"IMGIMG[A-I]{1,4}Z",
                r"[\t\n]|    |  ",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
    ),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT_4O),
    (
        "granite-embed-multi-97m",
        PreTokenizer(
            (
                _any(
                    _cased(r"\p{Lu}\p{M}", r"\p{Ll}\p{M}", _TAIL),
                    r"\p{N}{1,3}",
                    _PATHS,
                    _LINES,
                ),
            ),
            ignore_merges=True,
        ),
    ),
    (
        "tiny_aya cohere2moe",
        PreTokenizer(
            (
                _NUMBERS_BY_THREES,
                _any(_MARKED, r"\p{N}{1,3}", _PATHS, _LINES),
            )
        ),
    ),
    (
        "kimi-k2",
        PreTokenizer(
            (
                _any(
                    r"\p{Han}+",
                    r"[^\r\n\p{L}\p{N}]?\p{NotHan}+" + _TAIL,
                    r"\p{N}{1,3}",
                    _PUNCTUATION,
                    _LINES,
                ),
            )
        ),
    ),
    ("superbpe", PreTokenizer((r"\p{N}+", DigitGroups(r"[0-9]+", after=False)))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
    (
        "seed-coder",
        PreTokenizer((_any(_CONTRACTION, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}]+", _LINES),)),
    ),
    ("ufakzeka", PreTokenizer((_any(_WORD, r"\p{N}", _PUNCTUATION, _LINES),))),
    (
        "afmoe",
        PreTokenizer(
            (
                _NUMBERS_BY_THREES,
                "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f"
                "\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f"
                "\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
                _DEEPSEEK,
            )
        ),
    ),
    ("laguna", PreTokenizer((r"[^\n]+|\n+", _QWEN2))),
    (
        "exaone-moe",
        PreTokenizer(
            (
                _any(
                    _CONTRACTION,
                    r"[^\r\n\p{L}\p{N}]?\p{L}(?:\p{M}| ?\p{L})*",
                    r"\p{N}",
                    r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
                    r"\s*[\r\n]",
                    _SPACE,
                ),
            )
        ),
    ),
    ("gemma4 granite-embed-multi-311m", replace(_LINEWISE, whole_lines=True, force_bos=True)),
    ("sarvam-moe", _LINEWISE),
    (
        "minicpm5",
        PreTokenizer(
            (
                r"\p{N}{1,3}",
                _any(_CONTRACTION, _WORD, r"\p{N}+", _PUNCTUATION, _LINES),
            ),
            ignore_merges=True,
        ),
    ),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: variant for names, variant in _VARIANTS for name in names.split()
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The variant of that name, or an error that lists the known ones."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise TokenizerError(
            f"tokenizer.ggml.pre is {name!r}, which is not known here; known: {known}"
        ) from None
