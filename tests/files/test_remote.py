"""Checkpoints over HTTP, from a server that can be told to do everything wrong."""

from __future__ import annotations

import email.utils
import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import needs
import numpy as np
import pytest
from remote_server import (
    Answer,
    Handler,
    Redirect,
    Site,
    etag,
    make_certificate,
    modified,
    no_proxy,
    patiently,
    serve,
    tls_proxy,
)
from safetensors_files import write_safetensors

from streamload.checkpoint.open import open_checkpoint
from streamload.core.location import Url
from streamload.errors import CheckpointError, HeaderError, ShardNotFoundError, TruncatedFileError
from streamload.files.folder import choose_reader, open_reader, resolve_reader
from streamload.files.remote import HttpReader, Patience, read_file
from streamload.formats.reader import read_header

needs.module("httpx2")

__all__ = ["no_proxy"]

SOON = Patience(read_seconds=10, tries=3, backoff_seconds=0.01)
HASTY = Patience(read_seconds=0.5, tries=3, backoff_seconds=0.01)
NBYTES = 300_000
NAME = "/model.safetensors"
DIGITS = "9" * 5000  # more than Python makes an integer of


def content(nbytes: int = NBYTES, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


@pytest.fixture
def site() -> Iterator[Site]:
    with serve({"/f": content()}) as served:
        yield served


def version(site: Site) -> Url:
    return Url.parse(site.url + "f").of_version(f'ETag: "{etag(site.files["/f"])}"')


def read(site: Site, start: int = 0, stop: int = NBYTES, patience: Patience = SOON) -> bytes:
    out = bytearray(stop - start)
    with patiently(patience, HttpReader, version(site), NBYTES) as reader:
        reader.read_into(start, memoryview(out))
    return bytes(out)


def error_of(call: Callable[[], object]) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        call()
    return caught.value


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "checkpoint"
    names = {}
    for number, tensors in enumerate((("a", "b"), ("c",)), 1):
        path = out / f"model-0000{number}-of-00002.safetensors"
        write_safetensors(
            path,
            {n: ("F32", [64, 25], content(6400, ord(n))) for n in tensors},
            metadata={"format": "pt"},
        )
        names |= dict.fromkeys(tensors, path.name)
    index = {"metadata": {"total_size": 19200}, "weight_map": names}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    (out / "config.json").write_text('{"model_type": "llama"}')
    return out


def test_a_served_folder_is_the_same_checkpoint(folder: Path) -> None:
    local = open_checkpoint(folder)
    with serve(folder) as site:
        for url in (site.url, site.url + "model.safetensors.index.json"):
            found = open_checkpoint(url)
            assert str(found.path) == url
            assert [str(h.path) for h in found.shards] == [
                site.url + h.path.name for h in local.shards
            ]
            assert [
                (i.name, i.dtype, i.shape, i.shard.name, i.start, i.stop)
                for i in found.tensors.values()
            ] == [
                (i.name, i.dtype, i.shape, i.shard.name, i.start, i.stop)
                for i in local.tensors.values()
            ]
            assert (found.metadata, found.config) == (local.metadata, local.config)


def test_a_header_is_one_request(folder: Path) -> None:
    """A file is asked for its header once; of the rest comes what the request had room for."""
    name = "/model-00001-of-00002.safetensors"
    with serve(folder) as site:
        found = open_checkpoint(site.url.rstrip("/") + name)
        assert site.asked(name) == [(0, 2**18)]
        assert found.config["model_type"] == "llama"
        assert site.connections == 1


def test_a_long_header_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": ("U8", [1000], content(1000))}, pad_nbytes=2**18)
    start = open_checkpoint(path).shards[0].data_start
    with serve(tmp_path) as site:
        found = open_checkpoint(site.url)
        assert site.asked(NAME) == [(0, 2**18), (2**18, start)]
    assert found.shards[0].data_start == start


def test_which_files_of_a_folder(folder: Path) -> None:
    """As on this machine: a single file comes before the index of a set that does not name it."""
    write_safetensors(folder / "model.safetensors", {"single": ("U8", [1], b"1")})
    with serve(folder) as site:
        assert list(open_checkpoint(site.url).tensors) == ["single"]
        del site.files["/model.safetensors.index.json"]
        assert list(open_checkpoint(site.url).tensors) == ["single"]
        site.files.clear()
        error = error_of(lambda: open_checkpoint(site.url))
    assert isinstance(error, ShardNotFoundError)
    assert error.path == site.url
    assert "model.safetensors.index.json or model.safetensors" in str(error)


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_a_store_that_may_not_be_listed(folder: Path, status: int) -> None:
    """What is not there may be refused as well: there is no configuration, and no single file."""
    with serve(folder) as site:
        del site.files["/config.json"]
        site.always["/config.json"] = site.always[NAME] = Answer(status, body=b"no")
        assert open_checkpoint(site.url).config == {}


def test_missing_shards_are_named_together(folder: Path) -> None:
    with serve(folder) as site:
        for name in [name for name in site.files if "-of-" in name]:
            del site.files[name]
        error = error_of(lambda: open_checkpoint(site.url))
    assert isinstance(error, ShardNotFoundError)
    assert "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors" in str(error)


def test_names_are_quoted(tmp_path: Path) -> None:
    name = "model #1?100%.safetensors"
    write_safetensors(tmp_path / name, {"a": ("U8", [1], b"1")})
    (tmp_path / "x.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with serve(tmp_path) as site:
        site.files["/model%20%231%3F100%25.safetensors"] = site.files["/" + name]
        found = open_checkpoint(site.url + "x.json?key=1")
        assert found.tensors["a"].shard.name == name
        assert all(request.path.endswith("?key=1") for request in site.requests)


def test_broken_files_are_told_as_those_of_this_machine(tmp_path: Path) -> None:
    """A header that breaks a rule, a cut file, an empty one, a web page and a long index."""
    path = write_safetensors(tmp_path / "model.safetensors", {"a": ("U8", [9], content(9))})
    whole = path.read_bytes()
    with serve({NAME: whole}) as site:
        url = site.url + "model.safetensors"
        for broken in (whole[:-1], whole[:20], whole[:5], b"", whole + b"x", b"<!DOCTYPE html>"):
            path.write_bytes(broken)
            site.files[NAME] = broken
            here, there = (error_of(lambda p=p: open_checkpoint(p)) for p in (path, url))
            assert type(there) is type(here)
            assert str(there) == str(here).replace(str(path), url)
        site.files["/x.json"] = b" " * 100_000_001
        assert isinstance(error_of(lambda: open_checkpoint(site.url + "x.json")), HeaderError)


def test_a_checkpoint_survives_pickling_with_its_versions(folder: Path) -> None:
    """Another process reads the version whose header was read here."""
    with serve(folder) as site:
        found = open_checkpoint(site.url)
        again = pickle.loads(pickle.dumps(found))
    assert again.shards == found.shards
    assert all(header.path.version for header in again.shards)
    assert all(info.shard == again.shards[0].path for info in again.shards[0].tensors)


def test_fingerprints_tell_versions_apart(folder: Path) -> None:
    name = "/model-00002-of-00002.safetensors"
    with serve(folder) as site:
        url = site.url.rstrip("/") + name
        one, two = (read_header(Url.parse(url + q)).fingerprint() for q in ("?sig=1", "?sig=2"))
        assert {**one, "path": 0} == {**two, "path": 0}
        changed = bytearray(site.files[name])
        changed[-1] ^= 1
        site.files[name] = bytes(changed)
        assert read_header(Url.parse(url)).fingerprint()["version"] != one["version"]
    assert json.loads(json.dumps(one)) == one
    local = open_checkpoint(folder).shards[0]
    assert local.fingerprint()["inode"] == os.stat(local.path).st_ino


# -- readers ---------------------------------------------------------------------------------------


def test_ranges(site: Site) -> None:
    """Any range is what it is in the file, in one request: by read_into, view and read_aligned."""
    whole = site.files["/f"]
    with patiently(SOON, HttpReader, version(site), NBYTES) as reader:
        for start, stop in ((0, 1), (5, 5), (1, 70_000), (NBYTES - 1, NBYTES), (0, NBYTES)):
            site.requests.clear()
            out = bytearray(stop - start)
            reader.read_into(start, memoryview(out))
            assert out == whole[start:stop]
            assert site.asked("/f") == [(start, stop)] * (start != stop)
            with reader.view(start, stop) as window:
                assert window == whole[start:stop]
                assert window.readonly
            room = bytearray(stop - start + 3)
            assert reader.read_aligned(start, stop, memoryview(room)) == stop - start
            assert room[: stop - start] == whole[start:stop]
        with pytest.raises(ValueError, match="no bytes"):
            reader.read_into(NBYTES - 1, memoryview(bytearray(2)))
        with pytest.raises(OSError, match="read from a server"):
            reader.fileno()
    with pytest.raises(ValueError, match="closed"):
        reader.read_into(0, memoryview(bytearray(1)))


def test_threads_read_at_once(site: Site) -> None:
    together = threading.Barrier(4)

    def meet(handler: Handler, data: bytes) -> None:
        together.wait(10)
        Answer()(handler, data)

    url = version(site)
    site.acts["/f"].extend([meet] * 4)
    with HttpReader(url, NBYTES) as reader, ThreadPoolExecutor(4) as pool:
        outs = [bytearray(1000) for _ in range(4)]
        places = [(i * 1000, memoryview(out)) for i, out in enumerate(outs)]
        list(pool.map(lambda place: reader.read_into(*place), places))
    assert b"".join(outs) == site.files["/f"][:4000]


def test_connections_are_used_again_and_closed(site: Site) -> None:
    """One thread needs one connection, over several shards; none is left with the last reader."""
    url = version(site)
    site.wait_until_left()
    before = site.connections
    with patiently(SOON, HttpReader, url, NBYTES) as first:
        for _ in range(5):
            first.read_into(0, memoryview(bytearray(10)))
        second = patiently(SOON, HttpReader, url, NBYTES)
    second.read_into(0, memoryview(bytearray(10)))
    second.close()
    second.close()
    assert site.connections == before + 1
    site.wait_until_left()


def test_how_a_url_is_read(site: Site) -> None:
    """There is one way, whatever is asked of it; what is for files only is refused."""
    url = version(site)
    assert choose_reader(url, "auto").kind == "http"
    assert choose_reader(url, "pread").kind == "http"
    assert resolve_reader(url, "http") == "http"
    for kind in ("mmap", "direct"):
        with pytest.raises(ValueError, match="from a server"):
            choose_reader(url, kind)
    with pytest.raises(ValueError, match="unknown reader"):
        choose_reader("/f", "http")
    with open_reader(url, NBYTES, "pread") as reader:
        assert not reader.mapped
        assert not reader.has_file
        assert reader.alignment == 1


# -- what may pass ---------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [Answer(cut=100_000), Answer(stall=100_000)], ids=["cut", "stall"])
def test_only_the_rest_is_asked_for_again(site: Site, act: Answer) -> None:
    site.acts["/f"].append(act)
    assert read(site, patience=HASTY) == site.files["/f"]
    assert site.asked("/f") == [(0, NBYTES), (100_000, NBYTES)]


@pytest.mark.parametrize(
    "act",
    [
        *(Answer(status, body=b"later") for status in (408, 425, 429, 500, 502, 503, 504)),
        Answer(503, {"Retry-After": "0"}, body=b"later"),
        Answer(503, {"Retry-After": email.utils.formatdate(0, usegmt=True)}, body=b"later"),
        Answer(503, {"Retry-After": "when it is done"}, body=b"later"),
        Answer(503, body=b"x" * 100_000),
        Answer(reset=True, cut=5000),
        Answer(reset=True, cut=0),
        Answer(headers={"Content-Length": None, "Connection": "close"}, cut=5000),
        Answer(headers={"Content-Length": None, "Transfer-Encoding": "chunked"}, cut=0),
    ],
    ids=str,
)
def test_what_may_pass_is_tried_again(site: Site, act: Answer) -> None:
    site.acts["/f"].extend([act, act])
    assert read(site) == site.files["/f"]
    assert len(site.requests) == 3


def test_a_server_that_asks_for_an_hour_is_not_waited_for(site: Site) -> None:
    """Longer than two minutes nobody waits: the error says what was asked."""
    site.always["/f"] = Answer(429, {"Retry-After": "3600"}, body=b"later")
    error = error_of(lambda: read(site))
    assert "1 try: 429 Too Many Requests, to be asked again in 3600 s" in str(error)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (Answer(503, body=b"later"), "503 Service Unavailable"),
        (Answer(stall=0), "nothing came for 0.5 s"),
        (Answer(cut=7), "peer closed connection"),
        (Answer(dribble=0.05), "bytes in"),
    ],
    ids=["503", "stall", "cut", "dribble"],
)
def test_giving_up_is_one_error_with_all_facts(site: Site, act: Answer, reason: str) -> None:
    """URL, range, what was wanted and what there was of it, the tries, and why the last failed."""
    site.always["/f"] = act
    error = error_of(lambda: read(site, 1000, 91_000, HASTY))
    assert type(error) is CheckpointError
    assert error.path == site.url + "f"
    assert error.problem == "bytes 1000 to 91000 cannot be read"
    assert error.expected == "90000 bytes"
    assert "in 3 tries, the last: " in str(error.found)
    assert reason in str(error.found)
    assert len(site.requests) == 3
    assert pickle.loads(pickle.dumps(error)).args == error.args


def test_a_server_that_is_gone(site: Site) -> None:
    """No connection is one error, after all tries."""
    with serve({}) as gone:
        url = Url.parse(gone.url + "f")
    error = error_of(lambda: patiently(SOON, read_header, url))
    assert "0 of them in 3 tries, the last: " in str(error)
    assert "refused" in str(error)


def test_a_line_that_is_cut_again_and_again_gets_there(site: Site) -> None:
    """Tries are counted anew after one that brought 64 KiB: what gets on does not give up."""
    site.always["/f"] = Answer(cut=2**16)
    assert read(site) == site.files["/f"]
    assert len(site.requests) == 5


def test_parts_that_are_shorter_than_asked_for(site: Site) -> None:
    site.always["/f"] = Answer(piece=100_000)
    assert read(site) == site.files["/f"]
    assert site.asked("/f") == [(i * 100_000, NBYTES) for i in range(3)]


def test_reading_can_be_stopped(site: Site) -> None:
    site.always["/f"] = Answer(503, {"Retry-After": "100"}, body=b"later")
    with HttpReader(version(site), NBYTES) as reader, ThreadPoolExecutor(1) as pool:
        call = pool.submit(reader.read_into, 0, memoryview(bytearray(1)))
        while not site.requests:
            time.sleep(0.001)
        reader.stop()
        assert isinstance(call.exception(10), CheckpointError)
    assert len(site.requests) == 1


# -- what will not pass ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (Answer(ranges=False), "does not read parts of files"),
        (Answer(404, body=b""), "404 Not Found"),
        (Answer(410, body=b""), "410 Gone"),
        (Answer(403, body=b""), "403 Forbidden"),
        (Answer(400, body=b""), "400 Bad Request"),
        (Answer(304, body=b""), "304 Not Modified"),
        (Answer(777, body=b""), "777"),
        (Answer(416, {"Content-Range": None}), "416"),
        (Answer(headers={"Content-Range": None}), "no Content-Range"),
        (Answer(headers={"Content-Range": "bytes 1-300000/300000"}), "another range"),
        (Answer(headers={"Content-Range": "bytes 0-300000/300000"}), "another range"),
        (Answer(headers={"Content-Range": "bytes 0-299999"}), "another range"),
        (Answer(headers={"Content-Range": "items 0-299999/300000"}), "another range"),
        (Answer(headers={"Content-Length": "299999"}), "contradicts itself"),
        (Answer(headers={"Content-Length": "300001"}), "contradicts itself"),
        (Answer(headers={"Content-Range": f"bytes 0-299999/{DIGITS}"}), "another range"),
        (Answer(headers={"Content-Range": f"bytes 0-{DIGITS}/300000"}), "another range"),
        (Answer(headers={"Content-Range": f"bytes {DIGITS}-299999/*"}), "another range"),
        (Answer(headers={"Content-Range": "bytes 0--1/300000"}), "another range"),
        (Answer(headers={"Content-Range": "bytes \xb2-\xb3/\xb9"}), "another range"),
        (Answer(416, {"Content-Range": f"bytes */{DIGITS}"}), "416"),
        (Answer(headers={"Content-Type": "multipart/byteranges; boundary=x"}), "another range"),
        (Answer(headers={"Content-Encoding": "gzip"}), "compresses"),
        (
            Answer(
                headers={"Content-Length": None, "Transfer-Encoding": "chunked"},
                body=b"493e1\r\n" + content(300_001) + b"\r\n0\r\n\r\n",
            ),
            "sent more than it said",
        ),
        (
            Answer(headers={"Content-Length": None, "Connection": "close"}, body=b"x" * 300_001),
            "more",
        ),
        (Redirect("/f"), "redirected again and again"),
        (Redirect("file:///etc/passwd"), "something else than HTTP"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_what_will_not_pass_is_one_error_at_once(site: Site, act: Answer, problem: str) -> None:
    site.always["/f"] = act
    error = error_of(lambda: read(site))
    assert problem in str(error)
    assert error.path == site.url + "f"
    assert len(site.requests) <= 1 + 10 * isinstance(act, Redirect)


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Length": DIGITS},
        {"Content-Length": "-1"},
        {"Content-Length": "0x10"},
        {"Content-Length": "\xb2"},
        {"Content-Length": None, "Transfer-Encoding": "gzip, chunked"},
        {"Content-Length": None, "Transfer-Encoding": "\xff\xfe"},
    ],
    ids=lambda headers: str(headers)[:60],
)
def test_lengths_that_are_none(site: Site, headers: dict[str, str | None]) -> None:
    """What the HTTP library cannot read is one error, after all tries."""
    site.always["/f"] = Answer(headers=headers)
    for call in (
        lambda: read(site),
        lambda: patiently(SOON, read_file, Url.parse(site.url + "f"), NBYTES),
    ):
        assert "in 3 tries, the last: " in str(error_of(call))


@pytest.mark.parametrize(
    "value",
    [
        *(DIGITS, "9" * 19, "-5", "1e999", "nan", "\xff\xfe", "soon", ","),
        "Fri, 31 Dec 99999 23:59:59 GMT",
        f"Mon, 01 Jan 2024 00:00:00 +{DIGITS}",
        "Mon, 01 Jan 2024 00:00:00 -9999",
        "Fri, 31 Dec 9999 23:59:59 -2359",
    ],
    ids=lambda value: value[:40],
)
def test_odd_times_to_be_asked_again(site: Site, value: str) -> None:
    """Of a time that is none nothing is thought, and to one that is far away nobody waits."""
    site.always["/f"] = Answer(503, {"Retry-After": value}, body=b"later")
    assert "503 Service Unavailable" in str(error_of(lambda: read(site)))


def test_odd_versions(site: Site) -> None:
    tag = "\xff\x80" * 20_000
    site.always["/f"] = Answer(headers={"ETag": tag})
    with patiently(SOON, HttpReader, version(site).of_version(f"ETag: {tag}"), NBYTES) as reader:
        reader.read_into(0, memoryview(bytearray(NBYTES)))
    error = error_of(lambda: read(site))
    assert error.problem == "has changed since its header was read"
    assert len(str(error)) < 300


def test_cookies_are_not_kept(site: Site) -> None:
    """One that cannot be sent back ends no request after it."""
    site.always["/f"] = Answer(headers={"Set-Cookie": "a=\xff\xfe"})
    with patiently(SOON, HttpReader, version(site), NBYTES) as reader:
        for _ in range(2):
            reader.read_into(0, memoryview(bytearray(10)))
    assert all("Cookie" not in request.headers for request in site.requests)


def test_huge_lengths_of_files(site: Site) -> None:
    """A file that is said to be longer than any is, and its header to be in it, is one error."""
    site.files["/f"] = bytes.fromhex("ffffffffffffff7f") + bytes(2**18)
    total = "9" * 19
    site.always["/f"] = Answer(headers={"Content-Range": f"bytes 0-262143/{total}"})
    assert isinstance(
        error_of(lambda: patiently(SOON, read_header, Url.parse(site.url + "f"))), HeaderError
    )
    site.always["/f"] = Answer(headers={"Content-Length": total, "Content-Range": None})
    error = error_of(lambda: patiently(HASTY, read_file, Url.parse(site.url + "f"), NBYTES))
    assert "in 3 tries" in str(error)


def test_a_file_of_unknown_length(site: Site) -> None:
    """A server that does not say how long a file is cannot be held to it."""
    site.always["/f"] = Answer(headers={"Content-Range": "bytes 0-262143/*"})
    assert "how long" in str(error_of(lambda: patiently(SOON, read_header, version(site))))


def test_a_host_that_is_not_there() -> None:
    """A name that does not exist is said at once, or after all tries where the resolver is away."""
    error = error_of(lambda: patiently(SOON, read_header, Url.parse("http://nowhere.invalid/f")))
    assert "no such host" in str(error) or "resol" in str(error)


# -- versions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("validator", ["ETag", "Last-Modified"])
def test_a_file_that_changes_is_an_error_and_never_a_mixture(site: Site, validator: str) -> None:
    """Between the header and the data, and between two tries of one range: another version."""
    other = Answer(headers=dict.fromkeys({"ETag", "Last-Modified"} - {validator}))
    known = {"ETag": f'"{etag(site.files["/f"])}"', "Last-Modified": modified(site.files["/f"])}
    url = Url.parse(site.url + "f").of_version(f"{validator}: {known[validator]}")

    def change(handler: Handler, data: bytes) -> None:
        site.files["/f"] = content(seed=1)
        Answer(headers=other.headers, cut=100_000)(handler, data)

    out = bytearray(NBYTES)
    with patiently(SOON, HttpReader, url, NBYTES) as reader:
        site.always["/f"] = other
        reader.read_into(0, memoryview(out))
        site.acts["/f"].append(change)
        error = error_of(lambda: reader.read_into(0, memoryview(out)))
        assert error.problem == "has changed since its header was read"
        assert known[validator] in str(error.expected)
        assert len(site.requests) == 3
        assert "has changed" in str(error_of(lambda: reader.read_into(5, memoryview(out)[:9])))
        site.always["/f"] = Answer(headers={"ETag": None, "Last-Modified": None})
        assert "does not say" in str(error_of(lambda: reader.read_into(5, memoryview(out)[:9])))


def test_a_file_that_gets_longer_or_shorter(site: Site) -> None:
    """As of files on this machine: truncated, or longer than its header says."""
    url = version(site)
    with patiently(SOON, HttpReader, url, NBYTES) as reader:
        site.files["/f"] += b"x"
        assert isinstance(
            error_of(lambda: reader.read_into(0, memoryview(bytearray(1)))), HeaderError
        )
        site.files["/f"] = site.files["/f"][:1000]
        for start in (0, 999, 1000, 5000):
            error = error_of(lambda at=start: reader.read_into(at, memoryview(bytearray(2))))
            assert isinstance(error, TruncatedFileError)
            assert (error.expected, error.found) == (NBYTES, 1000)


def test_a_server_without_versions(site: Site) -> None:
    """Where neither ETag nor Last-Modified is sent, the length is all that can be compared."""
    site.always["/f"] = Answer(headers={"ETag": None, "Last-Modified": None})
    with (
        patiently(SOON, HttpReader, Url.parse(site.url + "f"), NBYTES) as reader,
        reader.view(3, 9) as seen,
    ):
        assert seen == site.files["/f"][3:9]


def test_a_weak_etag_is_compared_too(site: Site) -> None:
    site.always["/f"] = Answer(headers={"ETag": f'W/"{etag(site.files["/f"])}"'})
    assert read(site) == site.files["/f"]


# -- redirects and secrets -------------------------------------------------------------------------


def test_a_redirect_is_followed_once(site: Site) -> None:
    """Ranges after the first are asked for where it led, until that address is good no longer."""
    with serve({}) as entrance:
        entrance.files["/f"] = site.files["/f"]
        entrance.always["/f"] = Redirect(site.url + "f?signed=1")
        url = Url.parse(entrance.url + "f").of_version(version(site).version)
        out = bytearray(10)
        with patiently(SOON, HttpReader, url, NBYTES) as reader:
            for _ in range(3):
                reader.read_into(0, memoryview(out))
            assert (len(entrance.requests), len(site.requests)) == (1, 3)
            assert entrance.connections == 1
            site.acts["/f"].append(Answer(403, body=b"expired"))
            reader.read_into(20, memoryview(out))
            assert out == site.files["/f"][20:30]
            assert (len(entrance.requests), len(site.requests)) == (2, 5)
            site.always["/f"] = Answer(403, body=b"never")
            error = error_of(lambda: reader.read_into(0, memoryview(out)))
        assert "403" in str(error)
        assert "signed" not in str(error)


def test_secrets_are_sent_and_not_shown(site: Site, tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", {"a": ("U8", [3], b"abc")})
    site.files[NAME] = path.read_bytes()
    where = site.url.replace("http://", "http://user:pass-word@") + "model.safetensors?sig=se-cret"
    with serve({}) as other:
        site.acts[NAME].extend([Answer(), Redirect(other.url + "x")])
        found = open_checkpoint(where)
        header = found.shards[0]
        with open_reader(header.path, header.file_nbytes) as reader:
            error = error_of(lambda: reader.read_into(0, memoryview(bytearray(1))))
    assert all(r.path.endswith("?sig=se-cret") for r in site.requests)
    assert all(r.headers["Authorization"] == "Basic dXNlcjpwYXNzLXdvcmQ=" for r in site.requests)
    assert "Authorization" not in other.requests[0].headers
    texts = [
        str(found),
        repr(found),
        repr(header),
        str(error),
        repr(error),
        str(header.fingerprint()),
    ]
    texts += [str(found.path), os.fspath(found.path), repr(found.tensors["a"])]
    for text in texts:
        assert "pass-word" not in text
        assert "se-cret" not in text


def test_huggingface_gets_its_token_and_nobody_else(site: Site, tmp_path: Path) -> None:
    """HF_TOKEN goes to huggingface.co over TLS, and neither to its redirects nor to other servers.

    The certificate is trusted because SSL_CERT_FILE says so; the proxy is this machine's.
    """
    cert, key = make_certificate(tmp_path, "huggingface.co")
    path = write_safetensors(tmp_path / "model.safetensors", {"a": ("U8", [3], b"abc")})
    with serve({NAME: path.read_bytes()}) as there, tls_proxy(cert, key) as (proxy, front):
        front.always[NAME] = Redirect(there.url + "model.safetensors")
        program = """
            import sys
            from streamload import open_checkpoint
            for url in sys.argv[1:]:
                try:
                    print(list(open_checkpoint(url).tensors))
                except ValueError as error:
                    print(error)
        """
        environment = {"HTTPS_PROXY": proxy, "HF_TOKEN": "hf_to-ken\n", "SSL_CERT_FILE": str(cert)}
        environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
        urls = ["https://huggingface.co/model.safetensors", there.url + "model.safetensors"]
        urls.append("https://other.example/model.safetensors")
        lines = forked.fresh(program, *urls, **environment).splitlines()
        assert lines[:2] == ["['a']"] * 2
        assert "the certificate is not to be trusted" in lines[2]
    assert {r.headers["Authorization"] for r in front.requests} == {"Bearer hf_to-ken"}
    assert all("Authorization" not in r.headers for r in there.requests)


# -- the edge --------------------------------------------------------------------------------------


def test_without_the_extra(site: Site) -> None:
    program = """
        import sys
        sys.modules["httpx2"] = None  # as if it were not installed
        import streamload
        try:
            streamload.open_checkpoint(sys.argv[1])
        except ValueError as error:
            print(error)
    """
    assert "the extra remote: pip install 'httpx2>=2'" in forked.fresh(program, site.url)


def test_patience_is_set_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long and how often is asked can be set; what is not a number above 0 is refused."""
    assert Patience.from_environment() == Patience()
    monkeypatch.setenv("STREAMLOAD_HTTP_TIMEOUT", "2.5")
    monkeypatch.setenv("STREAMLOAD_HTTP_TRIES", "9")
    assert Patience.from_environment() == Patience(2.5, 2.5, 9)
    for wrong in ("0", "-1", "nan", "inf", "many"):
        monkeypatch.setenv("STREAMLOAD_HTTP_TRIES", wrong)
        with pytest.raises(ValueError, match="STREAMLOAD_HTTP_TRIES"):
            Patience.from_environment()


@pytest.mark.parametrize(
    "text",
    ["http://", "https:///f", "http://h:port/f", "http://[::1/f", "http://h/a b", "http://h/\n"],
)
def test_what_is_no_url(text: str) -> None:
    """A URL without a host, with a port that is none, or with blanks is refused."""
    assert "is not a URL" in str(error_of(lambda: open_checkpoint(text)))


def test_a_broken_url_keeps_its_password() -> None:
    assert "word" not in str(error_of(lambda: open_checkpoint("http://u:pass/word@h:x/f?s=word")))


def test_a_url_that_was_made_a_path() -> None:
    """`Path` makes one slash of two: the error says so."""
    error = error_of(lambda: open_checkpoint(Path("https://host/model.safetensors")))
    assert "give it as a str" in str(error)


@pytest.mark.parametrize(
    ("text", "name", "parent", "child"),
    [
        ("http://h", "", "http://h/", "http://h/x/y"),
        ("http://h/a/", "", "http://h/a/", "http://h/a/x/y"),
        (
            "HTTPS://h:81/a/b%20c?q=1#f",
            "b c",
            "https://h:81/a/?q=1",
            "https://h:81/a/b%20c/x/y?q=1",
        ),
    ],
)
def test_parts_of_a_url(text: str, name: str, parent: str, child: str) -> None:
    """A name, a folder and a file of it, as of paths; the query stays with all of them."""
    url = Url.parse(text)
    assert (url.name, url.parent.href, (url / "x/y").href) == (name, parent, child)
    assert url.parent.parent == url.parent
    assert str(url) == url.href.replace("?q=1", "?...")
    assert sorted([url / "b", url / "a"]) == [url / "a", url / "b"]
