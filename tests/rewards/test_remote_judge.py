"""RemoteJudge against a service on this machine."""

import email.utils
import gzip
import json
import math
import threading
import time
import tracemalloc
import zlib
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from realhf import RemoteJudge, Reward, RewardLimits
from realhf.errors import UserError
from realhf.rewards.limits import ServiceError
from realhf.rewards.remote_judge import _retry_after
from realhf.rewards.reward import reward_columns
from realhf.rewards.scoring import RewardCall


class Service(ThreadingHTTPServer):
    """A judge that scores the lengths of completions. Requests are kept."""

    daemon_threads = False  # Closing the service waits for its requests: nothing is printed in a later test.
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests = []
        self.fail_first = 0
        self.error_headers = {}
        self.seconds = 0.0
        self.retry_after = 0.0
        self.says = ""
        self.bodies = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        service = self.server
        service.requests.append((self.path, self.headers.get("Authorization"), document))
        time.sleep(service.seconds)
        if len(service.requests) <= service.fail_first:
            return self._answer(503, "busy", service.error_headers)
        if self.path in ("/drip", "/endless"):
            return self._drip()
        if self.path in service.bodies:
            body, headers = service.bodies[self.path]
            return self._answer(200, body, headers)
        if self.path == "/refuses" or (self.path == "/busy" and len(service.requests) == 1):
            status = 401 if self.path == "/refuses" else 429
            return self._answer(status, "not now", {"Retry-After": str(service.retry_after)})
        if self.path == "/broken":
            return self._answer(200, {"scores": "no"})
        if self.path == "/chat":
            text = document["messages"][0]["content"]
            content = service.says or ("none" if "silent" in text else f"I count 3. Score: {len(text)}")
            return self._answer(200, {"choices": [{"message": {"content": content}}]})
        return self._answer(200, {"scores": [float(len(text)) for text in document["completions"]]})

    def _drip(self):
        """Send a byte every 50 ms, of a head or of a body that have no end."""
        self.wfile.write(b"HTTP/1.1 200 OK\r\n")
        if self.path == "/drip":
            self.wfile.write(b"Content-Length: 1000\r\n\r\n")
        with suppress(OSError):
            for _ in range(60):
                self.wfile.write(b"x")
                time.sleep(0.05)

    def _answer(self, status, document, headers=None):
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        if isinstance(document, str):
            body = document.encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(BrokenPipeError):  # The client has stopped waiting.
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def service():
    server = Service()
    yield server
    server.shutdown()
    server.server_close()


def _score(reward, limits=None, texts=("a", "bb", "ccc"), **columns):
    call = RewardCall(reward, reward_columns(reward), limits)
    prompts = [f"prompt {text}" for text in texts]
    return call.scores(list(range(len(texts))), prompts, list(texts), [[1]] * len(texts), columns)


def test_samples_are_posted_and_scores_are_read(service, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    judge = RemoteJudge(service.url, columns=("level",), headers_from={"Authorization": "JUDGE_TOKEN"})
    assert _score(judge, level=[1, 2, 3]) == [1.0, 2.0, 3.0]
    assert service.requests == [("/", "secret", {
        "prompts": ["prompt a", "prompt bb", "prompt ccc"], "completions": ["a", "bb", "ccc"],
        "columns": {"level": [1, 2, 3]}})]
    assert "secret" not in repr(judge)


def test_requests_at_the_same_time(service):
    service.seconds = 0.4
    started = time.monotonic()
    texts = tuple("x" * (i % 5) for i in range(32))
    assert _score(Reward(RemoteJudge(service.url), concurrency=32), texts=texts) == [
        float(len(text)) for text in texts]
    assert time.monotonic() - started < 32 * service.seconds and len(service.requests) == 32


def test_failures_are_named_or_repeated(service):
    service.fail_first = 1
    with pytest.raises(UserError, match="answered 503: 'busy'"):
        _score(Reward(RemoteJudge(service.url), concurrency=1), texts=("a",))
    service.fail_first = len(service.requests) + 1
    limits = RewardLimits(retries=1, retry_seconds=0.01)
    assert _score(RemoteJudge(service.url), limits) == [1.0, 2.0, 3.0]
    with pytest.raises(UserError, match=r"it must be \{\"scores\": \[...\]\} with a number for each sample"):
        _score(RemoteJudge(service.url + "broken"))


def test_a_service_that_is_away_or_slow(service):
    service.seconds = 0.8
    with pytest.raises(UserError, match=r"has not answered within 0.3 s \(RemoteJudge.timeout_seconds\)"):
        _score(RemoteJudge(service.url, timeout_seconds=0.3), texts=("a",))
    with pytest.raises(UserError, match="ConnectError"):
        _score(RemoteJudge("http://127.0.0.1:9/"), texts=("a",))
    with pytest.raises(UserError, match="the environment variable NO_SUCH_TOKEN is not set"):
        _score(RemoteJudge(service.url, headers_from={"Authorization": "NO_SUCH_TOKEN"}), texts=("a",))


def test_a_chat_model_is_asked(service):
    judge = RemoteJudge(
        service.url + "chat", columns=("gold",), prompt="{prompt} {completion} {gold} {other}",
        model="judge", scale=100.0)
    shown = ["prompt a a 1 {other}", "prompt bb bb 2 {other}"]
    expected = [len(text) / 100 for text in shown]
    assert _score(judge, texts=("a", "bb"), gold=["1", "2"]) == expected
    path, _, document = service.requests[0]
    assert path == "/chat" and document["model"] == "judge" and document["temperature"] == 0.0
    with pytest.raises(UserError, match="in which there is no score"):
        _score(judge, texts=("silent",), gold=["1"])


@pytest.mark.parametrize("path", ["drip", "endless"])
@pytest.mark.parametrize("concurrency", [None, 2])
def test_the_time_limit_is_that_of_the_whole_request(service, path, concurrency):
    judge = Reward(RemoteJudge(f"{service.url}{path}", timeout_seconds=0.4), concurrency=concurrency)
    started = time.monotonic()
    with pytest.raises(UserError, match="has not answered within 0.4 s"):
        _score(judge, texts=("a",))
    assert time.monotonic() - started < 30


def _gzipped(size):
    return gzip.compress(b'{"scores": [' + b" " * size + b"1]}")


@pytest.mark.slow
def test_replies_are_limited_after_decompression(service):
    """A reply of 64 KiB, which would be 64 MiB, needs no more memory than the limit."""
    service.bodies = {
        "/bomb": (_gzipped(64 << 20), {"Content-Encoding": "gzip"}),
        "/twice": (gzip.compress(_gzipped(1)), {"Content-Encoding": "gzip, gzip"}),
        "/damaged": (_gzipped(1)[:-12] + b"x" * 30, {"Content-Encoding": "gzip"}),
        "/small": (_gzipped(100), {"Content-Encoding": "gzip"}), "/plain": (b" " * (2 << 20), {}),
        "/not-text": (b"\xff\xfe", {}), "/deep": (b"[" * 200_000, {}), "/digits": (b"1" * 10_000, {}),
        "/nan": (b'{"scores": [NaN]}', {}), "/huge": (b'{"scores": [1e999]}', {}),
    }
    judge = RemoteJudge(f"{service.url}small", max_reply_mib=1.0)
    assert _score(judge, texts=("a",)) == [1.0]
    faults = {
        "bomb": r"answered more than 1 MiB \(RemoteJudge.max_reply_mib\)", "plain": "more than 1 MiB",
        "twice": "Content-Encoding 'gzip, gzip': legal is gzip", "damaged": "answered with damaged gzip",
        "not-text": "which is no JSON", "deep": "nested too deeply", "digits": "which is no JSON",
        "nan": "it must be a finite number", "huge": "it must be a finite number",
    }
    for path, fault in faults.items():
        judge = RemoteJudge(service.url + path, max_reply_mib=1.0)
        tracemalloc.start()
        with pytest.raises(UserError, match=fault):
            _score(judge, texts=("a",))
        assert tracemalloc.get_traced_memory()[1] < 12 << 20, path
        tracemalloc.stop()


SCORES = {
    "8": 8, "8/10": 8, "8.5 / 10": 8.5, "8 (on a scale of 1-10)": 8, "8 out of 10": 8, "**Score:** 8/10": 8,
    "Rating: **8**/10": 8, "Score (1-10): 8": 8, '{"score": 8, "why": "3 of 4"}': 8, "The score is 8.": 8,
    "[[8]]": 8, "It has 3 faults.\r\n\r\n8\r\n": 8, "Score: 3? No. Score: 8": 8, "8/10: it has 3 faults": 8,
    "<think>Score: 3</think>\n8": 8, "10": 10, "Score: 1": 1, "Grade: 8, on a scale of 1-10": 8,
}
NO_SCORES = (
    "", "good", "Score: 11", "0", "-8", "8/5", "80%", "1-10", "Score: 1-10", "3\n8", "It has 3 faults", "8,5",
    "Score: 1e1", "Score: NaN", "8 to 9", "3/4 of it, 8/10", "1.2.3")


def test_the_score_of_a_chat_is_read_by_a_strict_rule():
    judge = RemoteJudge("http://localhost", prompt="{completion}", model="judge", scale=10.0, lowest=1.0)
    assert {text: judge.score_in(text) for text in SCORES} == SCORES
    for text in NO_SCORES:
        with pytest.raises(UserError, match="in which there is no score|out of range|on another scale"):
            judge.score_in(text)
    own = replace(judge, pattern=r"<(.*?)>")
    assert own.score_in("<3> <4>") == 4
    for text in ("3", "<a>", "<11>"):
        with pytest.raises(UserError, match="in which the pattern finds no score|out of range"):
            own.score_in(text)


@pytest.mark.parametrize("text", ["score ", "(", "score" + " " * 50, "8/", " \n", "score:*", "8 (", "1"])
def test_no_reply_takes_long_to_read(text):
    judge = RemoteJudge("http://localhost", prompt="{completion}", model="judge", scale=10.0)
    started = time.process_time()
    with suppress(UserError):
        judge.score_in(text * (100_000 // len(text)))
    assert time.process_time() - started < 5


def test_a_reply_out_of_range_fails_for_its_sample_alone(service):
    judge = RemoteJudge(f"{service.url}chat", prompt="{completion}", model="judge", scale=2.0)
    for reward in (judge, Reward(judge, concurrency=4)):
        scores = _score(reward, RewardLimits(on_failure="drop"))
        assert scores[:2] == [0.5, 1.0] and math.isnan(scores[2])


def test_retries_wait_as_long_as_the_service_asks(service):
    service.retry_after = 0.6
    judge = RemoteJudge(f"{service.url}busy")
    for reward in (judge, Reward(judge, concurrency=4)):
        service.requests.clear()
        started = time.monotonic()
        assert _score(reward, RewardLimits(retries=1, retry_seconds=0.01), texts=("a",)) == [1.0]
        assert time.monotonic() - started >= 0.6 and len(service.requests) == 2
    service.requests.clear()
    with pytest.raises(UserError, match="answered 401: 'not now'"):
        _score(RemoteJudge(f"{service.url}refuses"), RewardLimits(retries=5, retry_seconds=10.0))
    assert len(service.requests) == 1  # It would refuse again.


def test_waits_grow_up_to_a_minute_with_jitter():
    limits = RewardLimits(retries=20, retry_seconds=2.0)
    for failures in range(1, 21):
        waits = [limits.wait_seconds(OSError(), failures) for _ in range(50)]
        longest = min(2.0 * 2 ** (failures - 1), 60.0)
        assert longest / 2 <= min(waits) < max(waits) <= longest
    assert limits.wait_seconds(OSError(), 21) is None and limits.wait_seconds(SystemExit(), 1) is None
    assert limits.wait_seconds(ServiceError("", wait_seconds=300.0), 1) == 300.0
    assert limits.wait_seconds(ServiceError("", wait_seconds=1e9), 1) == 600.0
    date = email.utils.format_datetime(datetime.now(UTC) + timedelta(seconds=90))
    assert 80 < _retry_after(date) < 91 and _retry_after("soon") == 0.0 and _retry_after("7") == 7.0


@pytest.mark.parametrize(("fields", "sentence"), [
    ({"url": "judge:80"}, "RemoteJudge.url is judge:80: it must begin with http"),
    ({"timeout_seconds": 0.0}, "RemoteJudge.timeout_seconds is 0.0"),
    ({"lowest": 1.0}, "RemoteJudge.lowest is 1.0: it must be below the scale, 1"),
    ({"max_reply_mib": 0.0}, "RemoteJudge.max_reply_mib is 0.0"),
    ({"pattern": "x"}, "RemoteJudge.pattern is x: it must be a regular expression with a group"),
    ({"prompt": "{completion}"}, "RemoteJudge.model is '': it must name a model"),
])
def test_wrong_settings(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        RemoteJudge(**{"url": "http://localhost", **fields})


def test_replies_are_one_whole_stream_of_gzip(service):
    """What follows the end of a stream would be kept without a limit."""
    service.bodies = {
        "/longer": (_gzipped(1) + b"x" * (8 << 20), {"Content-Encoding": "gzip"}),
        "/two": (_gzipped(1) + _gzipped(1), {"Content-Encoding": "gzip"}),
        "/truncated": (gzip.compress(b'{"scores": [1]}')[:-8], {"Content-Encoding": "gzip"}),
        "/nothing": (b"", {"Content-Encoding": "gzip"}),
        "/deflate": (zlib.compress(b'{"scores": [1]}'), {"Content-Encoding": "deflate"}),
    }
    faults = {
        "longer": "damaged gzip .more follows its end", "two": "more follows its end",
        "truncated": "damaged gzip .it has no end", "nothing": "it has no end",
        "deflate": "Content-Encoding 'deflate': legal is gzip"}
    for path, fault in faults.items():
        tracemalloc.start()
        with pytest.raises(UserError, match=fault):
            _score(RemoteJudge(service.url + path, max_reply_mib=1.0), texts=("a",))
        assert tracemalloc.get_traced_memory()[1] < 24 << 20, path  # The service has the text, too.
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", ["br", "gzip"])
def test_a_busy_service_is_named_whatever_its_error_looks_like(service, encoding):
    service.fail_first = 1
    service.error_headers = {"Content-Encoding": encoding}
    with pytest.raises(UserError, match=f"answered 503: .*{encoding}"):
        _score(RemoteJudge(service.url), texts=("a",))


@pytest.mark.parametrize("value", [
    "Mon, 01 Jan 2024 00:00:00 +99999999999999", f"Mon, 01 Jan {'9' * 30} 00:00:00 GMT", "nan", "-1",
    "Mon, 01 Jan 0001 00:00:00 -0000"])
def test_a_wait_that_is_no_time_is_none(value):
    assert _retry_after(value) == 0.0
