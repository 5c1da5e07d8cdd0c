"""Nothing secret of a URL is shown or logged, whatever the URL is and whatever becomes of it."""

from __future__ import annotations

import copy
import io
import logging
import os
import pickle
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import needs
import pytest
from hub_server import use_hub
from remote_server import Act, Answer, Drip, Redirect, Site, serve, serve_raw
from safetensors_files import write_safetensors

import streamload
from streamload import cli
from streamload.checkpoint.digests import Digests
from streamload.conversion.convert import convert
from streamload.core.location import Url, local, without_secrets
from streamload.errors import CheckpointError, StreamloadError
from streamload.verification.diff import diff
from streamload.verification.verify import verify_checkpoint

needs.module("httpx2")

SECRET = "caNaRy5"
#: None of them is the URL of a file that is there; the host h is not asked for, or does not exist.
BROKEN = [
    "http:/u:SECRET@h/x",
    "http:u:SECRET@h/x",
    "http//u:SECRET@h/x",
    "https:/SECRET@h/x",
    "http:///u:SECRET@h/x",
    "http://u:SECRET@h:port/x",
    "http://u:SECRET@[::1/x",
    "http://u:SECRET@[v1.x]/x",
    "http://u:SECRET@/x",
    "http://u:SECRET@h/a b",
    "http://u:SECRET@h/a\nb",
    "http://u:SEC RET@h/x".replace("SEC RET", "a SECRET"),
    "http://u:a\nSECRET@h/x",
    "http://u:a?SECRET@h/x",
    "http://u:SECRET?a@h/x",
    "http://u:a#SECRET@h/x",
    "http://u:SECRET#a@h:p/x",
    "http://u:a/SECRET@h/x",
    "http://u:SECRET/a@h/x",
    "http://u:a@SECRET@h:p/x",
    "http://u:SECRET@a@h:p/x",
    "http://u:p@h:x/f?sig=SECRET",
    "http://u:p@h:x/f?mail=a@SECRET",
    "http://u:p?q@h:x/f?mail=a@SECRET",
    "http://u%3ASECRET%40h/x",
    "http://u:SECRET%40h/x",
    "http://u:SECRET\uff20h/x",
    "http://u:a%2FSECRET@h:p/x",
    "HTTP:/u:SECRET@h/x",
    "HTTPS://u:SECRET@h:p/x",
    " http://u:SECRET@h/x",
    "\thttp://h/x?sig=SECRET",
    "'http://u:SECRET@h/x'",
    "<http://h/x?sig=SECRET>",
    "url=http://u:SECRET@h/x",
    "s3://u:SECRET@h/x",
    "s3://h/x?sig=SECRET",
    "S3://h/x?sig=SECRET" + "x" * 300,
    "ftp://u:SECRET@[::1]:2/x",
    "ftp://SECRET@h/x",
    "file://u:SECRET@h/x",
    "u:SECRET@h/x",
    "h/x?sig=SECRET",
    "//u:SECRET@h/x",
    "http://u:SECRET@h/x\0",
]
#: Requests are sent for these, to nobody who answers.
UNANSWERED = [
    "http://u:SECRET@127.0.0.1:1/x?sig=SECRET#SECRET",
    "http://SECRET@127.0.0.1:1/x",
    "HTTP://U:SECRET@127.0.0.1:1/x",
    "http://u:SECRET@[::1]:1/x",
    "http://u:a@SECRET@127.0.0.1:1/x",
    "http://u:%53%00SECRET@127.0.0.1:1/x",
    "http://127.0.0.1:1/SECRET@h/x",
    "http://127.0.0.1:1?SECRET@h/x",
    "http://127.0.0.1:1/x?sig=SECRET@h",
    "http://u:SECRET@h..invalid/x",
    "http://u:SECRET@" + "a" * 70 + ".invalid/x",
    "http://u:SECRET@\u2603.invalid/x",
]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One try, and servers of this machine are asked directly, whatever its settings."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,::1")
    monkeypatch.setenv("STREAMLOAD_HTTP_TRIES", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)


@pytest.fixture(autouse=True)
def kept_secret(capfd: pytest.CaptureFixture[str]) -> Iterator[io.StringIO]:
    """Whatever a test does, the secret is in no log of any level, no warning and no output."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    root, levels = logging.getLogger(), {}
    for logger in (root, *map(logging.getLogger, list(logging.root.manager.loggerDict))):
        levels[logger] = logger.level
        logger.setLevel(1)
    root.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield log
    finally:
        root.removeHandler(handler)
        for logger, level in levels.items():
            logger.setLevel(level)
    out, err = capfd.readouterr()
    for text in (log.getvalue(), out, err, *(str(w.message) for w in warned)):
        assert SECRET not in text


def texts_of(error: BaseException | None) -> Iterator[str]:
    """All that can be shown of an error and of those that it came from."""
    while error is not None:
        yield from (str(error), repr(error), repr(error.args), *getattr(error, "__notes__", ()))
        yield "".join(traceback.format_exception(error))
        if isinstance(error, StreamloadError):
            yield repr(pickle.dumps(error))
            yield repr(vars(error))
        if error.__cause__ is not None:
            yield from texts_of(error.__cause__)
        error = error.__context__


@contextmanager
def fails(kind: type[Exception] = CheckpointError) -> Iterator[None]:
    """A block raises an error of streamload's that shows no secret."""
    with pytest.raises(kind) as caught:
        yield
    # the first frame shows the call, and so the URL that the program has
    for text in texts_of(caught.value.with_traceback(None)):
        assert SECRET not in text


ENTRANCES: dict[str, Callable[[Any, Path], object]] = {
    "open": lambda url, _: streamload.open_checkpoint(url),
    "load": lambda url, _: streamload.load_state_dict(None, url, device="host", progress=False),
    "plan": lambda url, _: streamload.plan(url, budget="1GB", dtype="float16"),
    "convert": lambda url, folder: convert(url, folder / "out", progress=False),
    "verify": lambda url, _: verify_checkpoint(url, progress=False),
    "diff": lambda url, _: diff(url, url, progress=False),
    "digests": lambda url, _: Digests.read(url),
}


@pytest.mark.parametrize("text", BROKEN + UNANSWERED)
def test_no_error_shows_a_secret(text: str, tmp_path: Path) -> None:
    url = text.replace("SECRET", SECRET)
    for call in ENTRANCES.values():
        with fails():
            call(url, tmp_path)
    with fails():
        streamload.open_checkpoint(Path(url))
    for arguments in (["inspect", url], ["inspect", "one", url]):
        with pytest.raises(SystemExit):
            run_main(arguments)


def run_main(arguments: list[str]) -> None:
    before, shown = sys.argv, warnings.showwarning
    sys.argv = ["streamload", *arguments]
    try:
        cli.main()
    finally:
        sys.argv, warnings.showwarning = before, shown


@pytest.mark.parametrize("text", ["s3://u:SECRET@h/x", "http:/u:SECRET@h/x", *UNANSWERED[:2]])
def test_no_destination_is_a_url(text: str, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": ("U8", [3], b"abc")})
    for destination in (text.replace("SECRET", SECRET), Path(text.replace("SECRET", SECRET))):
        with fails(ValueError):
            convert(tmp_path, destination, progress=False)
    assert not list(Path.cwd().glob("s3:*"))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    folder = tmp_path / "served"
    write_safetensors(
        folder / "model.safetensors", {"a": ("F32", [64, 25], bytes(range(256)) * 25)}
    )
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    with serve(folder) as served:
        yield served


def with_secrets(site: Site, name: str = "") -> str:
    """A URL of a server with a user, a password, a signature and a fragment."""
    return site.url.replace("//", f"//{SECRET}:{SECRET}@") + f"{name}?sig={SECRET}#{SECRET}"


def test_what_is_sent_is_not_shown(site: Site, tmp_path: Path, kept_secret: io.StringIO) -> None:
    url = with_secrets(site)
    checkpoint = streamload.open_checkpoint(url)
    report = streamload.load_state_dict(None, url, device="host", progress=False)
    made = streamload.plan(url, device="host")
    done = convert(url, tmp_path / "out", dtype="float16", progress=False)
    again = convert(url, tmp_path / "out", dtype="float16", resume=True, progress=False)
    found = [diff(url, tmp_path / "out", progress=False)]
    for shown in (checkpoint, checkpoint.path, report, made, done, again, *found):
        assert SECRET not in str(shown) + repr(shown)
    for text in (report.to_json(), made.to_json(), done.to_json(), found[0].to_json()):
        assert SECRET not in text
    site.acts["/model.safetensors"].append(Answer())
    site.always["/model.safetensors"] = Answer(headers={"ETag": '"other"'})
    with fails():
        convert(checkpoint.path, tmp_path / "half", progress=False, resume=True)
    written = [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()]
    assert written
    assert not any(SECRET.encode() in data for data in written)
    assert all(f"?sig={SECRET}" in request.path for request in site.requests)
    assert all("Basic " in request.headers["Authorization"] for request in site.requests)


def test_an_unfinished_conversion_has_no_secret(site: Site, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(with_secrets(site), tmp_path / "out", progress=stop)
    written = [p for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert any("journal" in p.name for p in written)
    assert not any(SECRET.encode() in p.read_bytes() for p in written)


ANSWERS: dict[str, Act] = {
    "refused": Answer(403, body=SECRET.encode()),
    "failed": Answer(500, {"Set-Cookie": f"a={SECRET}"}, body=SECRET.encode()),
    "missing": Answer(404, {"Location": f"http://u:{SECRET}@h/"}, body=b""),
    "elsewhere": Redirect(f"http://u:{SECRET}@127.0.0.1:1/x?sig={SECRET}"),
    "scheme": Redirect(f"ftp://u:{SECRET}@h/x?sig={SECRET}"),
    "port": Redirect(f"http://u:{SECRET}@h:port/x"),
    "brackets": Redirect(f"http://u:{SECRET}@[h/x"),
    "long port": Redirect(f"http://u:{SECRET}@h:{'9' * 5000}/x"),
    "host": Redirect(f"http://u:{SECRET}@h..invalid/x"),
    "letters": Redirect(f"http://u:{SECRET}@\xff\xfe/x"),
    "nothing": Redirect(f"//{SECRET}@/?{SECRET}"),
    "range": Answer(206, {"Content-Range": f"http://u:{SECRET}@h/"}),
    "encoding": Answer(206, {"Content-Encoding": f"http://h/?{SECRET}"}),
    "loop": Redirect(f"/model.safetensors?{SECRET}"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_servers_say_is_not_shown(site: Site, name: str) -> None:
    site.always["/model.safetensors"] = ANSWERS[name]
    with fails():
        streamload.open_checkpoint(with_secrets(site, "model.safetensors"))
    assert site.requests


@pytest.mark.parametrize(
    "line",
    [
        b"HTTP/1.1 200 OK\r\nNo colon SECRET\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nLocation: \x00SECRET\r\n\r\n",
        b"SECRET HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 206 SECRET\r\nContent-Length: SECRET\r\n\r\n",
        b"HTTP/1.1 206 OK\r\nTransfer-Encoding: chunked\r\n\r\nSECRET\r\n",
        b"HTTP/1.1 999 SECRET\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_what_is_no_http_is_not_shown(line: bytes) -> None:
    """The words of a server that breaks the protocol, which may be a signed address."""
    with serve_raw(Drip(line.replace(b"SECRET", SECRET.encode()))) as site, fails():
        streamload.open_checkpoint(site.url + "model.safetensors?sig=" + SECRET)


@pytest.mark.parametrize(
    "proxy",
    [
        "http://u:SECRET@127.0.0.1:1",
        "http://u:SECRET@h:port",
        "http://u:SECRET@[h",
        "SECRET://u:SECRET@h",
        "ftp://u:SECRET@h",
        "u:SECRET@127.0.0.1:1",
        "socks5://u:SECRET@127.0.0.1:1",
    ],
)
@pytest.mark.parametrize("kind", ["HTTP_PROXY", "ALL_PROXY"])
def test_proxies_are_not_shown(monkeypatch: pytest.MonkeyPatch, kind: str, proxy: str) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(kind, proxy.replace("SECRET", SECRET))
    with fails():
        streamload.open_checkpoint(f"http://u:{SECRET}@h.invalid/model.safetensors")


def test_a_proxy_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words are not shown."""
    refusal = f"HTTP/1.1 407 {SECRET}\r\nContent-Length: 0\r\n\r\n".encode()
    with serve_raw(Drip(refusal)) as site:
        monkeypatch.setenv("HTTPS_PROXY", site.url.replace("//", f"//u:{SECRET}@"))
        with fails():
            streamload.open_checkpoint("https://h.invalid/model.safetensors")
    assert site.requests


@pytest.mark.parametrize("token", [f"{SECRET}\x01", f"{SECRET}\xe9"])
def test_a_token_that_cannot_be_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str
) -> None:
    """An error that says which variable it is, and no more."""
    use_hub(monkeypatch, "https://hub.invalid", tmp_path)
    monkeypatch.setenv("HF_TOKEN", token)
    with fails():
        streamload.open_checkpoint("https://hub.invalid/model.safetensors")
    with pytest.raises(CheckpointError, match=r"\(HF_TOKEN\) cannot be sent"):
        streamload.open_checkpoint("https://hub.invalid/model.safetensors")


def test_others_keep_their_logs(site: Site, kept_secret: io.StringIO) -> None:
    import httpx2

    streamload.open_checkpoint(with_secrets(site))
    assert "HTTP Request" not in kept_secret.getvalue()
    httpx2.get(site.url + "config.json", trust_env=False)
    assert "HTTP Request: GET" in kept_secret.getvalue()


COMMANDS = {
    "inspect": ["inspect", "URL", "--json"],
    "plan": ["plan", "URL", "--device", "host", "--json"],
    "load": ["load", "URL", "--device", "host", "--json"],
    "convert": ["convert", "URL", "OUT"],
    "missing": ["inspect", "URLnothing"],
    "usage": ["inspect", "here", "URL"],
    "option": ["plan", "here", "--device=URL"],
    "broken": ["load", "http:/u:SECRET@h/x"],
    "unsupported": ["convert", "s3://u:SECRET@h/x", "OUT"],
    "destination": ["convert", "URL", "s3://u:SECRET@h/x"],
    "plot": ["plan", "URL", "--device", "host", "--plot", "OUT.svg"],
}


@pytest.mark.parametrize(
    "name",
    ["load", *[pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS if name != "load"]],
)
def test_no_command_shows_a_secret(site: Site, tmp_path: Path, name: str) -> None:
    url, out = with_secrets(site), str(tmp_path / "out")
    command = [
        a.replace("URLnothing", with_secrets(site, "nothing.safetensors")).replace("URL", url)
        for a in COMMANDS[name]
    ]
    command = [a.replace("OUT", out).replace("SECRET", SECRET) for a in command]
    done = subprocess.run(
        [sys.executable, "-m", "streamload", *command],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "always"},
        timeout=60,
        cwd=tmp_path,
    )
    assert SECRET not in done.stdout + done.stderr
    for path in tmp_path.rglob("*"):
        assert SECRET not in path.name
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()
    wrong = name in ("missing", "usage", "option", "broken", "unsupported", "destination")
    assert (done.returncode != 0) == wrong, done.stderr


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/data/model", "/data/model"),
        ("/data/me@work/model", "/data/me@work/model"),
        ("org/name@main", "org/name@main"),
        ("name@v1.0", "name@v1.0"),
        ("http://h:port/x", "http://h:port/x"),
        ("s3://bucket/key", "s3://bucket/key"),
        ("/data/what?", "/data/what?..."),
        ("https://u:p@h:x/y", "https:..."),
        ("u:p@h/x", "..."),
    ],
)
def test_what_has_no_secret_is_shown(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
    assert without_secrets(":x?" * 100_000)  # soon


def test_a_password_with_a_hash() -> None:
    """It would be a port and a fragment: neither user nor password is shown."""
    with pytest.raises(CheckpointError, match=r"^http:\.\.\.: is not a URL") as caught:
        Url.parse("http://someone:12#34@host/x")
    assert "12" not in str(caught.value)
    assert str(Url.parse("http://host:12/x#a@b")) == "http://host:12/x"


def test_a_file_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is no URL, whatever it looks like, and errors name it."""
    monkeypatch.chdir(tmp_path)
    write_safetensors(tmp_path / "s3:/u:p@h/x?y", {"a": ("U8", [1], b"1")})
    assert local("s3:/u:p@h/x?y") == Path("s3:/u:p@h/x?y")
    assert list(streamload.open_checkpoint("s3:/u:p@h/x?y").tensors) == ["a"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://u:p@h/x?y", "http://h/x?..."),
        ("https://h/pkg@1.2/x", "https://...@1.2/x"),
        ("http://u:1/2@h/x", "http://...@h/x"),
        ("http://u:1/?2@h/x", "http://...?..."),
        ("https://h/x?mail=a@b", "https://h/x?..."),
        ("http://u:p@h:80/x?mail=a@b", "http://h:80/x?..."),
    ],
)
def test_a_url_as_text(text: str, shown: str) -> None:
    """What stands before an @ is left out, also where the @ is not where it ends a password."""
    url = Url.parse(text)
    assert (str(url), os.fspath(url), repr(url)) == (shown, shown, f"Url({shown!r})")
    assert url.href == text


def test_no_pickle_has_a_secret(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes out compares and prints as what went in; reading it says what is missing."""
    monkeypatch.setenv("HF_TOKEN", f"{SECRET}token")
    checkpoint = streamload.open_checkpoint(with_secrets(site))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps((checkpoint, checkpoint.path, checkpoint.shards), protocol)
        assert SECRET.encode() not in data
    again, path, shards = pickle.loads(data)
    assert [*again.items()] == [*pickle.loads(pickle.dumps(again)).items()]
    assert str(again) == str(checkpoint)
    assert [each.shape for each in again.values()] == [each.shape for each in checkpoint.values()]
    before = len(site.requests)
    for given in (again, path, path / "model.safetensors", shards[0].path, path.parent):
        with pytest.raises(CheckpointError, match="was left out of a pickle"):
            streamload.load_state_dict(None, given, device="host", progress=False)
    assert len(site.requests) == before
    for twin in (copy.copy(checkpoint), copy.deepcopy(checkpoint)):
        assert twin == checkpoint
        streamload.load_state_dict(None, twin, device="host", progress=False)


def test_a_pickle_without_secrets_is_read(site: Site) -> None:
    checkpoint = streamload.open_checkpoint(site.url)
    again = pickle.loads(pickle.dumps(checkpoint))
    assert again == checkpoint
    streamload.load_state_dict(None, again, device="host", progress=False)
