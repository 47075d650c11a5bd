"""Sessions in files over tiny random models: what is opened goes on as if nothing had happened."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire.engine.sequence import PARKED
from quire.errors import RequestError, SessionFileError
from quire.models.registry import open_weights
from quire.weights.fingerprint import fingerprint, sample_of
from quire.weights.gguf import GGUF
from tests import tiny
from tests.model_folders import MODELS, RANDOM, TRAINED, model_folder

PROMPT = "The quick brown fox jumps over the lazy dog"
REPO = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(made, tiny.Tiny(context=256, tied=False))
    return made


@pytest.fixture
def llm(path: Path) -> Iterator[quire.LLM]:
    with quire.load(path) as loaded:
        yield loaded
        loaded.memory.audit()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return tmp_path / "story.quire"


def greedy(session: quire.Session, n: int = 24) -> list[int]:
    done = session.generate(max_tokens=n, temperature=0, ignore_eos=True)
    return list(done.token_ids)


@pytest.mark.parametrize("variant", sorted(tiny.VARIANTS))
def test_a_restart_in_the_middle_changes_nothing(variant: str, tmp_path: Path) -> None:
    model, saved = tmp_path / "model.gguf", tmp_path / "story.quire"
    tiny.write(model, tiny.VARIANTS[variant])
    with quire.load(model) as llm, llm.session() as session:
        session.append(PROMPT)
        first = greedy(session, 9)
        session.save(saved)
        expected = greedy(session)
        after = session.logits()
        session.close()
    with quire.load(model) as llm, llm.open(saved) as session:
        assert session.tokens == llm.encode(PROMPT) + first
        done = session.generate(max_tokens=24, temperature=0, ignore_eos=True)
        # The last token that was generated had not been computed when it was saved.
        assert done.cached_tokens == len(llm.encode(PROMPT)) + len(first) - 1
        assert done.token_ids == expected
        assert session.logits().tobytes() == after.tobytes()
        llm.memory.audit()


@pytest.mark.parametrize("name", [*TRAINED, *RANDOM])
def test_a_restart_with_every_kind_of_model(name: str, saved: Path, tmp_path: Path) -> None:
    folder = model_folder(name, tmp_path)
    text = (REPO / "tests" / "data" / "models" / "validation.txt").read_text()[:3000]
    with quire.load(folder) as llm, llm.session() as session:
        session.append(llm.encode(text)[:300])
        session.checkpoint("there")
        greedy(session, 70)
        session.save(saved)
        expected, after = greedy(session), session.logits()
        again = greedy(session.rewind(session.marks["there"]))
        session.close()
    with quire.load(folder) as llm, llm.open(saved) as session:
        assert greedy(session) == expected
        assert session.logits().tobytes() == after.tobytes()
        assert greedy(session.rewind(session.marks["there"])) == again
        llm.memory.audit()
    refused = pytest.raises(SessionFileError, match="another model")
    with quire.load(folder, quantize="q8_0") as llm, refused:
        llm.open(saved)


def test_nothing_is_computed_to_open(llm: quire.LLM, path: Path, saved: Path) -> None:
    with llm.session() as session:
        session.append(PROMPT)
        logits = session.logits()
        session.save(saved)
        expected = greedy(session)
    with quire.load(path) as other:
        other.engine.runner.forward = None  # type: ignore[assignment,method-assign]
        with other.open(saved) as session:
            assert session.logits().tobytes() == logits.tobytes()
            assert session.position == len(llm.encode(PROMPT))
    with quire.load(path) as other, other.open(saved) as session:
        assert greedy(session) == expected


def test_marks_survive(llm: quire.LLM, path: Path, saved: Path) -> None:
    with llm.session() as session:
        session.append(PROMPT[:20])
        early = session.checkpoint("early")
        expected = {"early": greedy(session)}
        late = session.checkpoint()
        expected[late.name] = greedy(session)
        session.rewind(early)
        session.append(" and")
        session.save(saved)
        expected[""] = greedy(session)
    with quire.load(path) as other, other.open(saved) as one, other.open(saved) as two:
        for session in (one, two):
            assert list(session.marks) == ["early", late.name]
            assert greedy(session) == expected[""]
            for name in (late.name, "early", late.name):
                assert session.rewind(session.marks[name]).tokens == list(
                    session.marks[name].tokens
                )
                assert greedy(session) == expected[name]
            with pytest.raises(RequestError, match="early"):
                session.checkpoint("early")
            assert session.checkpoint().name not in expected
        one.save(saved)
        with other.open(saved) as three:
            assert len(three.marks) == 3
        other.memory.audit()


def test_a_session_with_tokens_taken_out(llm: quire.LLM, path: Path, saved: Path) -> None:
    with llm.session() as session:
        session.append(PROMPT).remove(4, 11)
        session.save(saved)
        expected = greedy(session)
    with quire.load(path) as other, other.open(saved) as session:
        assert greedy(session) == expected
        # Nobody else may share what has seen tokens that are gone.
        other_one = other.generate(session.tokens[:30], max_tokens=1)
        assert other_one.cached_tokens == 0


def test_what_was_opened_serves_nobody_else(llm: quire.LLM, path: Path, saved: Path) -> None:
    """A file decides what its session remembers; other requests it must not reach."""
    with llm.session() as session:
        session.append(PROMPT).checkpoint("here")
        session.save(saved)
    with quire.load(path) as other:
        opened = other.open(saved)
        for one in (opened, opened.fork(), opened.fork().rewind(opened.marks["here"])):
            one.append("?").generate(max_tokens=2)
            done = other.generate(PROMPT + "!", max_tokens=1, temperature=0)
            assert done.cached_tokens == 0
            one.close()
            other.forget()


def test_what_was_opened_is_shared_if_asked(llm: quire.LLM, path: Path, saved: Path) -> None:
    with llm.session() as session:
        session.append(PROMPT).save(saved)
    with quire.load(path) as other, other.open(saved, share=True):
        done = other.generate(PROMPT + "!", max_tokens=4, temperature=0)
        assert done.cached_tokens == len(llm.encode(PROMPT))
        assert done.token_ids == llm.generate(PROMPT + "!", max_tokens=4, temperature=0).token_ids
        assert other.generate(PROMPT + "!", max_tokens=1, cache_salt="b").cached_tokens == 0


def test_an_empty_session(llm: quire.LLM, saved: Path) -> None:
    with llm.session() as session:
        session.save(saved)
    with llm.open(saved) as session:
        assert session.tokens == [] and session.append("a").position == 1


def test_saving_again_replaces_the_file(llm: quire.LLM, saved: Path) -> None:
    with llm.session() as session:
        session.append(PROMPT).save(saved)
        session.append(" again").save(str(saved))
        assert os.listdir(saved.parent) == [saved.name]
        assert stat.S_IMODE(saved.stat().st_mode) == 0o600
        link = saved.with_name("link")
        link.symlink_to(saved)
        session.append("!").save(link)
        assert link.is_symlink()
        with llm.open(saved) as other:
            assert other.tokens == session.tokens
    with pytest.raises(RequestError, match="closed"):
        session.save(saved)


# -- what can go wrong ----------------------------------------------------------------------------


def used(llm: quire.LLM) -> object:
    memory = llm.engine.memory
    memory.audit()
    return memory.stats(), memory.seqs, llm.budget.breakdown


@pytest.fixture
def story(llm: quire.LLM, saved: Path) -> Path:
    with llm.session() as session:
        session.append(PROMPT)
        session.checkpoint("m")
        session.append(" and on").save(saved)
    llm.forget()
    return saved


def test_garbage_is_refused(llm: quire.LLM, story: Path, path: Path, tmp_path: Path) -> None:
    was = used(llm)
    data = story.read_bytes()
    middle = len(data) // 2
    for bad in (
        b"", b"\0" * 1000, path.read_bytes(), data[:middle], data + b"x",
        data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
    ):  # fmt: skip
        story.write_bytes(bad)
        with pytest.raises(SessionFileError, match=r"story\.quire: "):
            llm.open(story)
        assert used(llm) == was
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", ".", "pipe", "a\0b", "x" * 300):
        with pytest.raises(
            SessionFileError, match=r"no such file|folder|not a regular file|cannot be opened"
        ):
            llm.open(tmp_path / name)
    assert used(llm) == was


def forged(data: bytes, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> bytes:
    """The file with other facts about the session, and a header whose checksum is right."""
    length = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:length])
    facts = json.loads(header["__metadata__"]["extra"])
    change(header, facts)
    header["__metadata__"] |= {"checksum": "0" * 64, "extra": json.dumps(facts)}
    raw = json.dumps(header, separators=(",", ":")).encode()
    whole = len(raw).to_bytes(8, "little") + raw
    digest = blake2b(whole, digest_size=32).hexdigest().encode()
    return whole.replace(b"0" * 64, digest, 1) + data[length:]


def swap(header: dict[str, Any], one: str, two: str) -> None:
    """Gives tensors each other's names; their bytes stay where they are."""
    digests = json.loads(header["__metadata__"]["digests"])
    digests[one], digests[two] = digests[two], digests[one]
    header["__metadata__"]["digests"] = json.dumps(digests)
    names = {one: two, two: one}
    entries = {names.get(name, name): entry for name, entry in header.items()}
    header.clear()
    header.update(entries)


def make_hole(header: dict[str, Any], group: str = "attention") -> None:
    """Takes a token out of what memory holds of the session."""
    state = json.loads(header["__metadata__"]["state"])
    table = state["sequences"][0]["tables"][group]
    table["positions"] = [-1 if i == 1 else i for i in range(table["length"])]
    header["__metadata__"]["state"] = json.dumps(state)


@pytest.mark.parametrize(
    "change",
    [
        lambda h, f: make_hole(h),
        lambda h, f: f.update(computed=3),
        lambda h, f: f.update(computed=10**6),
        lambda h, f: f.update(computed="3"),
        lambda h, f: f.update(salt=None),
        lambda h, f: f.update(whole=10**6),
        lambda h, f: f.update(more=1),
        lambda h, f: f.pop("marks"),
        lambda h, f: f.update(marks={}),
        lambda h, f: f["marks"].append(f["marks"][0]),
        lambda h, f: f["marks"].clear(),
        lambda h, f: f["marks"][0].update(name=1),
        lambda h, f: f["marks"][0].update(checkpoint="x"),
        lambda h, f: f["marks"][0].update(computed=1),
        lambda h, f: f["marks"][0].update(whole=True),
        lambda h, f: swap(h, "extra tokens", "extra logits"),
        lambda h, f: swap(h, "extra tokens", "extra mark 0 tokens"),
        lambda h, f: h["extra logits"].update(dtype="I32"),
        lambda h, f: h["extra tokens"].update(dtype="F32"),
        lambda h, f: h["extra tokens"].update(shape=[5, 10]),
    ],
)
def test_a_session_that_contradicts_itself_is_refused(
    llm: quire.LLM, story: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]
) -> None:
    was = used(llm)
    data = story.read_bytes()
    story.write_bytes(forged(data, lambda h, f: None))
    llm.open(story).close()
    llm.forget()
    story.write_bytes(forged(data, change))
    with pytest.raises(SessionFileError, match=r"story\.quire: "):
        llm.open(story)
    assert used(llm) == was


def test_token_ids_outside_the_vocabulary(llm: quire.LLM, saved: Path) -> None:
    with llm.session() as session:
        session.append(PROMPT)
        session._sequence.tokens.array()[3] = tiny.N_VOCAB
        session.save(saved)
        session._sequence.tokens.array()[3] = 0
    with pytest.raises(SessionFileError, match="vocabulary"):
        llm.open(saved)


def test_other_models_and_settings_are_refused(story: Path, path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    tiny.write(other, tiny.Tiny(context=256, tied=False, seed=9))
    for model, settings, reason in (
        (other, {}, "another model"),
        (path, {"type_k": "f32"}, "type_k of group 'attention' is f16 in the file and f32 here"),
        (path, {"type_v": "bf16"}, "type_v of group 'attention' is f16 in the file and bf16 here"),
        (path, {"page_tokens": 32}, "page_tokens of group 'attention' is 16"),
        (path, {"n_ctx": 16}, "n_ctx"),
        (
            path,
            {"kv_cache_tokens": 32, "n_ctx": 256},
            "has 4 pages of attention, and there are 2 in all",
        ),
    ):
        with quire.load(model, **settings) as llm:  # type: ignore[arg-type]
            was = used(llm)
            with pytest.raises(SessionFileError, match=reason):
                llm.open(story)
            assert used(llm) == was


def test_cached_prefixes_give_way(story: Path, path: Path) -> None:
    with quire.load(path, kv_cache_tokens=128, n_ctx=128) as llm:
        for i in range(4):
            llm.generate(f"{i} {PROMPT}"[:30], max_tokens=2)
        stats = llm.engine.memory.stats()["attention"]
        assert stats["pages_free"] < 4
        with llm.open(story) as session:
            assert session.position == len(PROMPT) + 7
            llm.memory.audit()


def test_idle_sessions_give_way_and_are_saved_all_the_same(
    story: Path, path: Path, tmp_path: Path
) -> None:
    with quire.load(path, kv_cache_tokens=96, n_ctx=96) as llm:
        idle = llm.session().append(PROMPT)
        with idle.fork() as twin:
            expected = greedy(twin, 5)
        llm.forget()
        with llm.open(story) as session:
            assert idle._sequence.status is PARKED and session.position == len(PROMPT) + 7
        idle.save(tmp_path / "idle.quire")
        assert idle._sequence.status is not PARKED
        assert greedy(idle, 5) == expected
        idle.close()
        with llm.open(tmp_path / "idle.quire") as again:
            assert greedy(again, 5) == expected
        llm.memory.audit()


def test_a_full_disk_keeps_the_old_file(llm: quire.LLM, story: Path) -> None:
    data = story.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with llm.open(story) as session:
        session.append("more")
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(data) // 2, limits[1]))
        try:
            with pytest.raises(SessionFileError, match="cannot be saved: File too large"):
                session.save(story)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert story.read_bytes() == data and os.listdir(story.parent) == [story.name]


def test_what_cannot_be_written(
    llm: quire.LLM, story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = story.read_bytes()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    pipe = story.with_name("pipe")
    os.mkfifo(pipe)
    with llm.open(story) as session:
        for place in (story.parent, story.parent / "no" / "x", story / "x", pipe, "a\0b"):
            with pytest.raises(SessionFileError, match="cannot be saved"):
                session.save(place)
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(SessionFileError, match="No space left"):
            session.save(story)
    assert story.read_bytes() == data
    assert sorted(os.listdir(story.parent)) == ["pipe", story.name]


SAVE_FOR_EVER = """
import sys, quire
with quire.load(sys.argv[1]) as llm:
    one, two = llm.session().append("one" * 60), llm.session().append("two")
    one.save(sys.argv[2])
    print("ready", flush=True)
    while True:
        two.save(sys.argv[2])
        one.save(sys.argv[2])
"""


def test_killed_while_saving_the_old_file_is_valid(path: Path, llm: quire.LLM, saved: Path) -> None:
    chosen = random.Random(5)
    found = set()
    for _ in range(10):
        command = [sys.executable, "-c", SAVE_FOR_EVER, str(path), str(saved)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPO) as child:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            time.sleep(chosen.uniform(0.0, 0.03))
            child.send_signal(signal.SIGKILL)
        with llm.open(saved) as session:
            found.add(len(session.tokens))
            assert llm.decode(session.tokens) in ("one" * 60, "two")
    assert found <= {3, 180}


def test_killed_while_writing_nothing_is_left(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom quire.files import replace_file\n"
        "def write(file):\n    file.write(b'x' * 100_000)\n    file.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "replace_file(Path(sys.argv[1]), write)"
    )
    (tmp_path / "kept").write_text("old")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "kept")], cwd=REPO)
    assert done.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["kept"] and (tmp_path / "kept").read_text() == "old"


# -- fingerprints ---------------------------------------------------------------------------------


def test_fingerprints_tell_weights_apart(tmp_path: Path) -> None:
    seen: dict[str, str] = {}
    for name, variant in tiny.VARIANTS.items():
        tiny.write(tmp_path / name, variant)
        with GGUF.open(tmp_path / name) as file:
            mark = fingerprint(file)
        assert mark not in seen.values()
        seen[name] = mark
    tiny.write(tmp_path / "again", tiny.VARIANTS["llama"])
    with GGUF.open(tmp_path / "again") as file:
        assert fingerprint(file) == seen["llama"]
    base = tiny.VARIANTS["llama"]
    for changed in (tiny.replace(base, eps=2e-5), tiny.replace(base, base=5e5)):
        tiny.write(tmp_path / "changed", changed)
        with GGUF.open(tmp_path / "changed") as file:
            assert fingerprint(file) != seen["llama"]


@pytest.mark.parametrize("size", [1, 100, 4096, 4097, 8 * 4096])
def test_small_tensors_are_seen_whole(size: int) -> None:
    class Fake:
        class Info:
            type, shape, nbytes = "f32", (size,), size

        def __init__(self) -> None:
            self.metadata: dict[str, object] = {}
            self.tensors = {"x": self.Info()}
            self.bytes = np.arange(size).astype(np.uint8)

        def samples(self, name: str) -> Iterator[bytes]:
            yield sample_of(self.bytes)

    file = Fake()
    mark = fingerprint(file)
    step = 1 if size < 5000 else 97
    places = {*range(0, size, step), 0, size - 1}
    missed = 0
    for at in places:
        file.bytes[at] ^= 1
        missed += fingerprint(file) == mark
        file.bytes[at] ^= 1
    assert missed == 0


@pytest.mark.parametrize("name", ["tiny-moe", "tiny-hybrid"])
def test_folders_are_told_apart_by_what_is_stored(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor is put together for it, and each expert counts."""
    folder = tmp_path / "m"
    shutil.copytree(MODELS / name, folder)
    with open_weights(folder) as file:
        monkeypatch.setattr(type(file), "data", None)
        before = fingerprint(file)
        size = file.path.joinpath("model.safetensors").stat().st_size
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[size - 40] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with open_weights(folder) as file:
        assert fingerprint(file) != before


def test_sessions_go_with_the_arithmetic_they_are_from(path: Path) -> None:
    with quire.load(path) as llm, quire.load(path, activations="f32") as exact:
        assert llm.fingerprint != exact.fingerprint


def test_notes_come_back(path: Path, tmp_path: Path) -> None:
    notes = {"title": "a story", "turns": [1, 2.5, None, {"deep": True}]}
    with quire.load(path) as llm, llm.session() as session:
        session.append([1, 2, 3]).notes.update(notes)
        twin = session.fork()
        twin.notes["turns"].append("only there")
        session.save(tmp_path / "noted.quire")
        with llm.open(tmp_path / "noted.quire") as opened:
            assert opened.notes == notes
        for bad in ({"x": object()}, {"x": (1, 2)}, {"x": float("nan")}, {1: "x"}):
            session.notes = bad
            with pytest.raises(RequestError, match="notes must be plain JSON"):
                session.save(tmp_path / "noted.quire")
        with llm.open(tmp_path / "noted.quire") as opened:
            assert opened.notes == notes
        twin.close()
