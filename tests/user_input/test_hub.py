"""Models and data sets by their names, from a hub on this machine and with real processes."""

import json
import re
import shlex
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from realhf.checkpoint.peft import adapter_config
from realhf.checkpoint.tensor_files import tensor_shapes
from realhf.models.lora import LoraConfig, adapter_spec
from realhf.models.model_config import ModelConfig
from realhf.user_input.hub import HubName, parse_hub_name
from tests.cli_tools import REPO
from tests.docs_pages import commands, fences
from tests.hub import Hub, Repository, gsm8k_repository, gsm8k_rows, hub, model_repository
from tests.kills import worker_environments

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SMALL = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
         "chat_template.jinja", "LICENSE"}
EXPERIMENT = """
from realhf import GRPO, DatasetConfig, OptimizerConfig, PolicyLossConfig, Role, SamplingConfig

def right(completions, answer):
    return [float(a in c) for c, a in zip(completions, answer)]

def number_only(row):
    return {"answer": row["answer"].rpartition("#### ")[2]}

experiment = GRPO(
    actor=Role(model="Qwen/Qwen2.5-0.5B-Instruct", optimizer=OptimizerConfig(lr=1e-3)),
    dataset=DatasetConfig("openai/gsm8k", name="main", split="train", prompt_key="question", map=number_only,
                          system_prompt="Be brief."),
    eval_dataset=DatasetConfig("openai/gsm8k", name="main", split="test[:8]", prompt_key="question",
                               map=number_only, chat=True),
    reward_function=right, sampling=SamplingConfig(max_new_tokens=6), loss=PolicyLossConfig(kl_coef=0.01),
    batch_size=4, group_size=2, steps=1,
)
"""


@pytest.fixture(scope="module")
def server():
    pickled = model_repository("org/pickled")
    del pickled.files["model.safetensors"]
    gated = Repository("org/gated", {"config.json": b"{}"}, is_gated=True)
    with hub([model_repository(MODEL), gsm8k_repository(), pickled, gated]) as running:
        yield running


def realhf(
    server: Hub, home: Path, *words: object, cwd: Path = REPO, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command with its cache in `home`."""
    command = [sys.executable, "-m", "realhf", *map(str, words)]
    settings = server.environment(home, PYTHONPATH=str(REPO), OMP_NUM_THREADS="1", **environment)
    return subprocess.run(command, env=settings, cwd=cwd, capture_output=True, text=True)


def python(server: Hub, home: Path, code: str, **environment: str) -> str:
    """Run Python code with its cache in `home`, and return what it prints."""
    settings = server.environment(home, PYTHONPATH=str(REPO), **environment)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=settings, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names_of_the_hub_and_other_texts():
    assert parse_hub_name(MODEL) == HubName(MODEL)
    assert parse_hub_name(f"{MODEL}@refs/pr/3") == HubName(MODEL, "refs/pr/3")
    for other in ("tiny", "a/b/c", "/a/b", "../b", "a/../b", "data/rows.jsonl", "a/b.json", "a/b@", "", "a/"):
        assert parse_hub_name(other) is None


@pytest.mark.slow
def test_an_experiment_that_names_model_and_data(server, tmp_path):
    """`check` downloads the small files, `run` the weights, and the next commands nothing at all."""
    home = tmp_path / "home"
    experiment = tmp_path / "gsm8k.py"
    experiment.write_text(EXPERIMENT)
    server.requests.clear()
    checked = realhf(server, home, "check", experiment)
    assert checked.returncode == 0, checked.stderr
    data = {"main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet", "README.md"}
    assert server.downloads() == dict.fromkeys(SMALL | data, 1)

    server.requests.clear()
    first = realhf(server, home, "run", experiment, "--out", tmp_path / "run")
    assert first.returncode == 0, first.stderr
    assert server.downloads() == {"model.safetensors": 1}

    server.requests.clear()
    again = realhf(server, home, "check", experiment, HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert server.requests == []

    commits = json.loads((tmp_path / "run/config.json").read_text())["hub"]
    model, data = server.repositories[:2]
    assert commits == {MODEL: model.commit, "openai/gsm8k main": data.commit}
    rows = [json.loads(line) for line in (tmp_path / "run/eval.jsonl").read_text().splitlines()]
    expected = {row["question"]: row["answer"].split("#### ")[1] for row in gsm8k_rows(8, seed=1)}
    assert {row["prompt"]: row["answer"] for row in rows} == expected
    card = (tmp_path / "run/hf/step_1/README.md").read_text()
    assert f'base_model: "{MODEL}"' in card
    assert (tmp_path / "run/hf/step_1/LICENSE").read_bytes() == model.files["LICENSE"]


@pytest.mark.slow
def test_two_processes_answer_as_one_does_and_ask_the_hub_no_more(server, tmp_path):
    experiment = tmp_path / "gsm8k.py"
    experiment.write_text(EXPERIMENT)
    server.requests.clear()
    for count in (2, 1):
        options = ("--nproc", count, "--out", tmp_path / f"{count}")
        done = realhf(server, tmp_path / "home", "run", experiment, *options)
        assert done.returncode == 0, done.stderr
    assert set(server.downloads().values()) == {1}
    one, two = ((tmp_path / f"{count}/eval.jsonl").read_text() for count in (1, 2))
    assert one == two


def on_the_first_page() -> tuple[str, list[list[str]]]:
    """Return the README's experiment, and the words of the commands that use it."""
    page = REPO / "README.md"
    (text,) = (text for _, text in fences(page) if text.startswith("# gsm8k.py"))
    return text, [shlex.split(c)[1:] for c in commands(page) if c.startswith("realhf ") and "gsm8k" in c]


def test_the_experiment_of_the_first_page_is_sound(server, tmp_path):
    text, (words, *_) = on_the_first_page()
    (tmp_path / "gsm8k.py").write_text(text)
    checked = realhf(server, tmp_path / "home", *words, cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "100 steps, 3200 prompts, 50 epochs of 64 rows" in checked.stdout


@pytest.mark.slow
def test_the_commands_of_the_first_page(server, tmp_path):
    """The experiment is as it stands; options make the run short."""
    text, (_, run, rollouts, evaluation, _, profile, plan) = on_the_first_page()
    (tmp_path / "gsm8k.py").write_text(text)
    few = ("--sampling.max-new-tokens", 16, "--eval-dataset.max-rows", 4)
    run += [*few, "--steps", 2, "--batch-size", 4]
    for words in (profile, plan, run, rollouts, [*evaluation, *few]):
        done = realhf(server, tmp_path / "home", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert "pass@8" in done.stdout
    by_run = ("eval", "runs/gsm8k", "--reward", "math", "--eval-dataset.max-rows", 4)
    done = realhf(server, tmp_path / "home", *by_run, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "as in runs/gsm8k: prompt_key 'question', system_prompt 'Think step by" in done.stderr
    summary = json.loads((tmp_path / "runs/gsm8k/summary.json").read_text())
    assert {"eval/pass@4", "eval/math_answer", "eval/boxed"} <= summary["evals"].keys()


@pytest.mark.slow
def test_processes_that_ask_at_once_download_each_file_once(server, tmp_path):
    code = (
        "from realhf.user_input.hub import find_model\nfrom realhf.data.row_files import find_dataset\n"
        f"print(find_model({MODEL!r}, weights=True))\n"
        "print(find_dataset('openai/gsm8k', name='main', revision=None).commit)")
    server.requests.clear()
    printed: list[str] = []
    threads = [threading.Thread(target=lambda: printed.append(python(server, tmp_path, code))) for _ in "12"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(printed) == 2 and printed[0] == printed[1]
    assert set(server.downloads().values()) == {1} and server.downloads().keys() >= SMALL
    assert not any(path.endswith(".bin") for _, path in server.requests)
    torch_free = "import sys\n" + code + "\nassert 'torch' not in sys.modules"
    server.requests.clear()
    assert python(server, tmp_path, torch_free) == printed[0] and server.requests == []


def test_a_branch_stays_at_its_commit_and_a_revision_can_be_named(tmp_path):
    repository = model_repository("org/moving")
    old = repository.commit
    show = "from realhf.user_input.hub import find_model\nfor name in {}: print(find_model(name).name)"
    with hub([repository]) as server:
        assert python(server, tmp_path, show.format(["org/moving"])).split() == [old]
        repository.update({"README.md": b"# Another commit\n"})
        names = ["org/moving", f"org/moving@{repository.commit}", f"org/moving@{old}"]
        assert repository.commit != old
        assert python(server, tmp_path, show.format(names)).split() == [old, repository.commit, old]


def test_every_field_with_a_directory_takes_a_name(tmp_path):
    """Adapters, tokenizers and configs are found by name; weights are downloaded when they are asked for."""
    model = model_repository("org/base")
    config = ModelConfig.from_hf(json.loads(model.files["config.json"]))
    lora = LoraConfig(rank=4, target_modules=("q_proj",))
    shapes = tensor_shapes(adapter_spec(config, lora))
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    adapter = Repository("org/adapter", {
        "adapter_config.json": json.dumps(adapter_config(config, lora, base="org/base")).encode(),
        "adapter_model.safetensors": safetensors.numpy.save(tensors),
    })
    code = """
from pathlib import Path
from realhf import SFT, LoraConfig, ModelConfig, OptimizerConfig, Role
from realhf.runtime.doubts.models import other_bases
role = Role("org/base", optimizer=OptimizerConfig(), lora=LoraConfig(adapter="org/adapter"))
print(ModelConfig.load("org/base").hidden_size, role.config().hidden_size)
print(role.resolved_lora().rank, role.base_name(), other_bases({"actor": role}))
print(sorted(path.name for path in Path(role.resolved_lora().adapter).iterdir()))
print(sorted(path.name for path in Path(role.resolved_lora(weights=True).adapter).iterdir()))
experiment = SFT(actor=Role("tiny", random_init=True), tokenizer="org/base")
print(Path(experiment.tokenizer_dir(), "tokenizer.json").is_file(), list(experiment.hub_commits()))
"""
    with hub([model, adapter]) as server:
        printed = python(server, tmp_path, code).splitlines()
        assert not server.downloads().keys() & {"model.safetensors", "pytorch_model.bin"}
    files = ["adapter_config.json", "adapter_model.safetensors"]
    assert printed == ["32 32", "4 org/base []", str(files[:1]), str(files), "True ['org/base']"]


@pytest.mark.slow
def test_ranks_with_different_commits_do_not_start(tmp_path):
    """Each rank has a cache of its own here, as each host has."""
    repository = model_repository(MODEL)
    old = repository.commit
    rows = "".join(json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n" for _ in range(4))
    (tmp_path / "rows.jsonl").write_text(rows)
    here = f"{str(tmp_path / 'rows.jsonl')!r}"
    text = re.sub(r'"openai/gsm8k", name="main", split="[^"]*"', lambda _: here, EXPERIMENT)
    experiment = tmp_path / "gsm8k.py"
    experiment.write_text(text)
    fetch = f"from realhf.user_input.hub import find_model\nfind_model({MODEL!r}, weights=True)"
    with hub([repository]) as server:
        python(server, tmp_path / "0", fetch)
        repository.update({"README.md": b"# Another commit\n"})
        python(server, tmp_path / "1", fetch)
        words = ("run", experiment, "--nproc", 2, "--out", tmp_path / "run")
        with ThreadPoolExecutor() as threads:
            ranks = [
                threads.submit(realhf, server, tmp_path / variables["RANK"], *words, **variables)
                for variables in worker_environments(2)]
        done, other = (rank.result() for rank in ranks)
    assert done.returncode == other.returncode == 2
    both = f"{old} on rank 0 and {repository.commit} on rank 1"
    sentence = f"the hosts' caches have different commits of {MODEL}, {both}: name one of them, as in"
    assert f"realhf: {sentence} {MODEL}@{repository.commit}\n" in done.stderr + other.stderr


def test_what_cannot_be_found_is_said_in_one_sentence(server, tmp_path):
    code = """
import sys
from realhf.data.row_files import open_split
from realhf.user_input.hub import find_model
cases = {
    "unknown": lambda: find_model("org/unknown"),
    "gated": lambda: find_model("org/gated"),
    "revision": lambda: find_model("Qwen/Qwen2.5-0.5B-Instruct@v9"),
    "pickled": lambda: find_model("org/pickled", weights=True),
    "data": lambda: open_split("org/unknown", name=None, split="train", revision=None),
    "config": lambda: open_split("openai/gsm8k", name="mian", split="train", revision=None),
    "no config": lambda: open_split("openai/gsm8k", name=None, split="train", revision=None),
    "split": lambda: open_split("openai/gsm8k", name="main", split="dev", revision=None),
}
for case in sys.stdin.read().split(","):
    try:
        cases[case]()
    except ValueError as error:
        print(error)
"""
    cases = ["unknown", "gated", "revision", "pickled", "data", "config", "no config", "split"]
    settings = server.environment(tmp_path, PYTHONPATH=str(REPO))
    done = subprocess.run([sys.executable, "-c", code], env=settings, input=",".join(cases),
                          capture_output=True, text=True, check=True)
    log_in = "set HF_TOKEN or log in with `hf auth login`"
    here = server.endpoint
    assert done.stdout.splitlines() == [
        f"'org/unknown' is no file or directory here, and the hub at {here} shows no such model: check the "
        f"name; if it is private, {log_in}",
        f"'org/gated' is gated: accept its terms at {here}/org/gated, and {log_in}",
        f"the hub's model '{MODEL}' has no branch, tag or commit 'v9': see its page for those that it has",
        "'org/pickled' has no safetensors weights on the hub; pickled weights (*.bin) are never downloaded, "
        "as reading them runs code: take another model or convert it",
        f"'org/unknown' is no file or directory here, and the hub at {here} shows no such data set: check "
        f"the name; if it is private, {log_in}",
        "'openai/gsm8k': name is 'mian': it must be one of main, socratic",
        "'openai/gsm8k': name is None: it must be one of main, socratic",
        "'openai/gsm8k': split is 'dev': it must be train or test, or a part such as train[:100]",
    ]


@pytest.mark.slow
def test_no_network_and_nothing_in_the_cache(server, tmp_path):
    experiment = tmp_path / "gsm8k.py"
    experiment.write_text(EXPERIMENT)
    missing = f"actor.model: '{MODEL}' is no file or directory here, and the model is not in the hub's cache"
    offline = realhf(server, tmp_path, "check", experiment, HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stderr) == (2, (
        f"realhf: {missing} {tmp_path / 'hub'}, and HF_HUB_OFFLINE is set: unset it once to download it\n"))
    cut = realhf(server, tmp_path, "check", experiment, HF_ENDPOINT="http://127.0.0.1:9")
    assert cut.returncode == 2 and cut.stderr.count("\n") == 1
    assert f"{missing} {tmp_path / 'hub'}, and the hub at http://127.0.0.1:9 cannot be reached" in cut.stderr
    assert "set HF_ENDPOINT to a mirror, or give a local path" in cut.stderr
