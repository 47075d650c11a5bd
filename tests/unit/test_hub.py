"""Models of the Hugging Face Hub, fetched from one on this machine."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import quire
from quire.cli import main
from quire.errors import FetchError
from quire.weights import hub as hub_module
from quire.weights.catalog import HUB_ALIASES, HubName, kept_models, remove
from quire.weights.hub_models import HubFile, models_of
from quire.weights.pull import resolve
from tests import tiny
from tests.gguf_writer import write_split
from tests.model_folders import MODELS
from tests.unit.fake_hub import FakeHub, serve

constants = pytest.importorskip("huggingface_hub.constants")
pytest.importorskip("filelock")

REPO = "someone/Small-Model-GGUF"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_whole(tmp_path_factory.mktemp("model")).read_bytes()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, model: bytes) -> Iterator[FakeHub]:
    with serve() as made:
        point_to(made.url, monkeypatch)
        made.repositories[REPO] = {
            "README.md": b"hello",
            "Small-Model-Q4_K_M.gguf": model,
            "Small-Model-Q8_0.gguf": model + bytes(100),
            "Small-Model-IQ2_XS.gguf": b"x",
            "mmproj-Small-Model-F16.gguf": b"y",
        }
        yield made


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "quire"


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_name_without_label_is_the_one_people_want(hub: FakeHub, cache: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = resolve(REPO, cache, lambda *at: seen.append(at))
    assert path == cache / "hub" / REPO / "Small-Model-Q4_K_M.gguf"
    assert path.read_bytes() == hub.repositories[REPO]["Small-Model-Q4_K_M.gguf"]
    assert seen[-1] == (path.stat().st_size,) * 2
    assert [name for name, _ in hub.downloads()] == ["Small-Model-Q4_K_M.gguf"]


def test_what_was_pulled_needs_no_network(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = resolve(f"{REPO}:q8_0", cache)
    hub.requests.clear()
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", None)
    assert resolve(f"{REPO}:Q8_0", cache) == resolve(REPO, cache) == path
    assert resolve(f"hf:{REPO}/Small-Model-Q8_0.gguf", cache) == path
    assert not hub.requests
    with quire.load(f"{REPO}:Q8_0") as llm:
        assert llm.generate("a", max_tokens=3).token_ids
    monkeypatch.setitem(HUB_ALIASES, "small", type(HUB_ALIASES["qwen3-4b"])(f"{REPO}:Q8_0", 9))
    assert resolve("small", cache) == path


def break_off(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone presses Ctrl-C in the middle."""
    monkeypatch.setattr(hub_module, "_CHUNK", 1 << 16)

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve(name, cache, stop)


def test_a_broken_transfer_goes_on_where_it_ended(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.random.default_rng(1).bytes(1 << 20)
    hub.repositories[REPO]["Small-Model-Q5_K_M.gguf"] = data
    break_off(f"{REPO}:Q5_K_M", cache, monkeypatch)
    (kept,) = kept_models(cache)
    assert not kept.whole and kept.name == f"{REPO}:Q5_K_M"
    assert "not whole" in CliRunner().invoke(main, ["list"]).stdout
    hub.requests.clear()
    seen: list[tuple[int, int]] = []
    assert resolve(f"{REPO}:Q5_K_M", cache, lambda *at: seen.append(at)).read_bytes() == data
    ((_, asked),) = hub.downloads()
    assert int(asked.removeprefix("bytes=").rstrip("-")) > len(data) // 3
    assert seen[0][0] > len(data) // 3 and seen[-1] == (len(data), len(data))


def test_a_connection_that_ends_early(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "_CHUNK", 1 << 16)
    monkeypatch.setattr(hub_module, "_PAUSE_SECONDS", 0)
    hub.cut_after = 1 << 18
    data = hub.repositories[REPO]["Small-Model-Q5_K_M.gguf"] = bytes(range(256)) * (1 << 11)
    assert resolve(f"{REPO}:Q5_K_M", cache).read_bytes() == data
    assert len(hub.downloads()) > 1


def test_damage_on_the_way_is_found_and_not_kept(hub: FakeHub, cache: Path) -> None:
    hub.change = b"?"
    with pytest.raises(FetchError, match="came damaged"):
        resolve(REPO, cache)
    assert not list(cache.rglob("*.gguf"))
    hub.change = None
    assert resolve(REPO, cache).is_file()


def test_split_files_are_one_model(hub: FakeHub, cache: Path, tmp_path: Path) -> None:
    parts = tiny_parts(tmp_path / "parts", 3)
    hub.repositories["a/split"] = {f"Q4_0/{p.name}": p.read_bytes() for p in parts}
    seen: list[tuple[int, int]] = []
    path = resolve("a/split:Q4_0", cache, lambda *at: seen.append(at))
    total = sum(p.stat().st_size for p in parts)
    assert path.name == parts[0].name and seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    with quire.load("a/split:Q4_0") as split, quire.load(tiny_whole(tmp_path)) as whole:
        assert split.generate("abc", max_tokens=5).text == whole.generate("abc", max_tokens=5).text
    (kept,) = kept_models(cache)
    assert kept.total == total and kept.name == "a/split:Q4_0"
    (path.parent / parts[1].name).unlink()
    assert resolve("a/split", cache) == path and len(hub.downloads()) == 4


def test_folders_of_safetensors(hub: FakeHub, cache: Path) -> None:
    source = MODELS / "tiny-dense"
    hub.repositories["a/folder"] = {p.name: p.read_bytes() for p in source.iterdir()} | {
        "pytorch_model.bin": b"never", "../outside.json": b"never", "onnx/model.onnx": b"never",
    }  # fmt: skip
    path = resolve("a/folder", cache)
    fetched = {name for name in files(path) if not name.startswith(".")}
    assert "config.json" in fetched and "model.safetensors" in fetched
    assert not fetched & {"pytorch_model.bin", "onnx/model.onnx", "golden.json"}
    with quire.load("a/folder:safetensors") as llm, quire.load(source) as same:
        assert llm.generate("Once", max_tokens=4).text == same.generate("Once", max_tokens=4).text


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (f"{REPO}:Q3_K_L", r"has no 'Q3_K_L'; it has Q4_K_M, Q8_0, IQ2_XS"),
        (f"{REPO}:IQ2_XS", r"does not compute with IQ2_XS; it has Q4_K_M, Q8_0"),
        (f"hf:{REPO}/other.gguf", r"has no model file 'other.gguf'; it has Q4_K_M"),
        ("nobody/nothing", r"no file or folder has this name, and the Hub has no repository"),
        ("a/pickles", r"only pickles"),
        ("a/nothing", r"look for GGUF files"),
    ],
)
def test_what_is_not_there_is_told(hub: FakeHub, cache: Path, name: str, told: str) -> None:
    hub.repositories["a/pickles"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    hub.repositories["a/nothing"] = {"README.md": b"x"}
    with pytest.raises(FetchError, match=told):
        resolve(name, cache)
    assert not hub.downloads() and not kept_models(cache)


@pytest.mark.parametrize(
    "name", ["hf:", "hf:a", "hf:a/b", "hf:a//c", "hf:a/b/../../c", "hf:a/b/.x"]
)
def test_names_of_files_have_three_parts(cache: Path, name: str) -> None:
    with pytest.raises(FetchError, match="write hf:owner/repository/file"):
        resolve(name, cache)


@pytest.mark.parametrize(
    "name", ["a/..", "../a", "a/b:../c", ".a/b", "a/b/c", "a/b.gguf", "a", "a/b:"]
)
def test_what_cannot_be_a_name_is_never_asked_for(cache: Path, name: str) -> None:
    assert HubName.parse(name) is None


def test_without_the_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", None)
    with pytest.raises(FetchError, match=r"pip install 'quire\[hf\]'"):
        resolve("org/model:Q4_0", cache)


def test_no_network_is_told_within_two_seconds(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused at once, a name that nobody knows, and a machine that never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent:
        full = [socket.socket() for _ in range(8)]
        for one in full:  # nobody accepts: further connections wait
            one.setblocking(False)
            one.connect_ex(silent.getsockname())
        urls = ["http://127.0.0.1:9", f"http://127.0.0.1:{silent.getsockname()[1]}"]
        for url in [*urls, "http://no-such-host.invalid"]:
            point_to(url, monkeypatch)
            started = time.monotonic()
            with pytest.raises(FetchError, match=r"cannot be reached.*check the network"):
                resolve("org/model", cache)
            assert time.monotonic() - started < 2
        for one in full:
            one.close()


def test_list_and_rm(hub: FakeHub, cache: Path, model: bytes) -> None:
    run = CliRunner()
    for name in (f"{REPO}:Q4_K_M", f"{REPO}:Q8_0"):
        assert run.invoke(main, ["pull", name]).exit_code == 0
    shown = run.invoke(main, ["list"]).stdout
    assert f"{REPO}:Q4_K_M" in shown and "just now" in shown and "qwen3-0.6b" in shown
    listed = json.loads(run.invoke(main, ["list", "--json"]).stdout)["models"]
    assert [(one["name"], one["bytes"]) for one in listed] == [
        (f"{REPO}:Q4_K_M", len(model)), (f"{REPO}:Q8_0", len(model) + 100)
    ]  # fmt: skip
    told = run.invoke(main, ["rm", REPO])
    assert told.exit_code == 1 and "one of several models" in told.stderr
    assert "removed" in run.invoke(main, ["rm", f"{REPO}:Q4_K_M"]).stdout
    assert [kept.name for kept in kept_models(cache)] == [f"{REPO}:Q8_0"]
    assert run.invoke(main, ["rm", REPO.lower()]).exit_code == 0
    assert not (cache / "hub" / "someone").exists()


def test_half_a_model_can_be_removed(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[REPO]["Small-Model-Q6_K.gguf"] = bytes(1 << 20)
    break_off(f"{REPO}:Q6_K", cache, monkeypatch)
    assert any(name.endswith(".part") for name in files(cache))
    remove(f"{REPO}:Q6_K", cache)
    assert files(cache) == []


def test_labels() -> None:
    names = [
        "M-Q4_K_M.gguf", "m.q5_k_m.gguf", "m-f16.gguf", "UD/M-UD-Q4_K_XL-00001-of-00002.gguf",
        "UD/M-UD-Q4_K_XL-00002-of-00002.gguf", "A-Q4_0.gguf", "B-Q4_0.gguf", "plain.gguf",
        "mmproj-F16.gguf", "imatrix.gguf",
    ]  # fmt: skip
    found = models_of([HubFile(name, 1, None) for name in names])
    assert set(found) == {
        "Q4_K_M", "Q5_K_M", "F16", "UD-Q4_K_XL", "A-Q4_0", "B-Q4_0", "plain"
    }  # fmt: skip
    assert len(found["UD-Q4_K_XL"]) == 2


def test_aliases_are_names_of_the_hub() -> None:
    for name, alias in HUB_ALIASES.items():
        found = HubName.parse(alias.model)
        assert found is not None and found.label and HubName.parse(name) is None
        assert alias.nbytes > 100e6


def tiny_whole(folder: Path) -> Path:
    tiny.write(folder / "whole.gguf", tiny.Tiny())
    return folder / "whole.gguf"


def tiny_parts(folder: Path, count: int) -> list[Path]:
    folder.mkdir()
    made = tiny.Tiny()
    return write_split(folder, "M-Q4_0", count, tiny.metadata(made), tiny.weights(made))
