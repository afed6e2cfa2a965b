"""RemoteJudge against a service on this machine."""

import json
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from realhf import RemoteJudge, Reward, RewardLimits
from realhf.errors import UserError
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
        self.seconds = 0.0
        self.url = f"http://127.0.0.1:{self.server_address[1]}/"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        service = self.server
        service.requests.append((self.path, self.headers.get("Authorization"), document))
        time.sleep(service.seconds)
        if len(service.requests) <= service.fail_first:
            return self._answer(503, "busy")
        if self.path == "/broken":
            return self._answer(200, {"scores": "no"})
        if self.path == "/chat":
            text = document["messages"][0]["content"]
            content = "no score" if "silent" in text else f"I count 3. Score: {len(text)}"
            return self._answer(200, {"choices": [{"message": {"content": content}}]})
        return self._answer(200, {"scores": [float(len(text)) for text in document["completions"]]})

    def _answer(self, status, document):
        body = (document if isinstance(document, str) else json.dumps(document)).encode()
        self.send_response(status)
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
        "columns": {"level": [1, 2, 3]}})]  # fmt: skip
    assert "secret" not in repr(judge)


def test_requests_at_the_same_time(service):
    service.seconds = 0.4
    started = time.monotonic()
    texts = tuple("x" * (i % 5) for i in range(32))
    assert _score(Reward(RemoteJudge(service.url), concurrency=32), texts=texts) == [
        float(len(text)) for text in texts]  # fmt: skip
    assert time.monotonic() - started < 6 and len(service.requests) == 32


def test_failures_are_named_or_repeated(service):
    service.fail_first = 1
    with pytest.raises(UserError, match="answered 503: 'busy'"):
        _score(Reward(RemoteJudge(service.url), concurrency=1), texts=("a",))
    service.fail_first = len(service.requests) + 1
    assert _score(RemoteJudge(service.url), RewardLimits(retries=1)) == [1.0, 2.0, 3.0]
    with pytest.raises(UserError, match=r"it must be \{\"scores\": \[...\]\} with a number for each sample"):
        _score(RemoteJudge(service.url + "broken"))


def test_a_service_that_is_away_or_slow(service):
    service.seconds = 0.8
    with pytest.raises(UserError, match="ReadTimeout"):
        _score(RemoteJudge(service.url, timeout_seconds=0.3), texts=("a",))
    with pytest.raises(UserError, match="ConnectError"):
        _score(RemoteJudge("http://127.0.0.1:9/"), texts=("a",))
    with pytest.raises(UserError, match="the environment variable NO_SUCH_TOKEN is not set"):
        _score(RemoteJudge(service.url, headers_from={"Authorization": "NO_SUCH_TOKEN"}), texts=("a",))


def test_a_chat_model_is_asked(service):
    judge = RemoteJudge(
        service.url + "chat", columns=("gold",), prompt="{prompt} {completion} {gold} {other}",
        model="judge", scale=10.0)  # fmt: skip
    shown = ["prompt a a 1 {other}", "prompt bb bb 2 {other}"]
    expected = [len(text) / 10 for text in shown]
    assert _score(judge, texts=("a", "bb"), gold=["1", "2"]) == expected
    path, _, document = service.requests[0]
    assert path == "/chat" and document["model"] == "judge" and document["temperature"] == 0.0
    with pytest.raises(UserError, match="in which the pattern finds no score"):
        _score(judge, texts=("silent",), gold=["1"])


@pytest.mark.parametrize(("fields", "sentence"), [
    ({"url": "judge:80"}, "RemoteJudge.url is judge:80: it must begin with http"),
    ({"timeout_seconds": 0.0}, "RemoteJudge.timeout_seconds is 0.0"),
    ({"pattern": "x"}, "RemoteJudge.pattern is x: it must be a regular expression with a group"),
    ({"prompt": "{completion}"}, "RemoteJudge.model is '': it must name a model"),
])  # fmt: skip
def test_wrong_settings(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        RemoteJudge(**{"url": "http://localhost", **fields})
