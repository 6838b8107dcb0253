"""A load generator, an evaluation harness and a chat backend from PyPI as clients of `roundhouse serve`.

Each runs a few requests offline; its own report of them is evaluated. (`vllm bench` requires all of vLLM.)"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.conformance.drivers import Environment
from tests.conformance.environments import INSTALLED, NotMade, make
from tests.conformance.programs import Served, serving
from tests.ports import free_port
from tests.system import NO_TLS, eventually
from worker.pocket import MODEL_PATH

RUN_S_MAX = 300
START_S_MAX = 300
REQUESTS = 8
QUESTIONS = [
    {"question": "The capital of France is", "choices": [" Paris", " Rome"], "answer": 0},
    {"question": "The capital of Italy is", "choices": [" Paris", " Rome"], "answer": 1},
    {"question": "Two and two are", "choices": [" four", " seven"], "answer": 0},
]
CHOOSING = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
TELLING = """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16}
metric_list: [{metric: exact_match}]
"""


class Failed(Exception):
    """A client failed; with its output, or what is wrong with its report."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The environment of a client: its programs, a server, and a folder."""

    programs: Path
    served: Served
    folder: Path

    def run(self, program: str, *arguments: str) -> None:
        """Run a program. Raises `Failed` unless it succeeds."""
        command = [str(self.programs / program), *arguments]
        ended = subprocess.run(
            command, cwd=self.folder, env=self.environ(), capture_output=True, text=True, timeout=RUN_S_MAX
        )
        if ended.returncode:
            raise Failed(f"status {ended.returncode}\n{(ended.stdout + ended.stderr)[-3000:]}")

    def environ(self, **more: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("LANG", "PATH") if name in os.environ}
        return {**kept, "HOME": str(self.folder), "NO_PROXY": "127.0.0.1", **more}

    def report(self, pattern: str) -> Any:
        """Return the report that matches `pattern`. Raises `Failed` if there is none."""
        found = sorted(self.folder.glob(pattern))
        if not found:
            raise Failed(f"no report: {pattern}")
        return json.loads(found[-1].read_text())


# --- clients -------------------------------------------------------------------------------------------


def lm_eval(bench: Bench) -> Iterator[str]:
    """Run tasks with logprobs and generation over completions, and with generation over chat."""
    (bench.folder / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    for name, rest in (("choosing", CHOOSING), ("telling", TELLING)):
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {bench.folder}/questions.jsonl}}}}"
        (bench.folder / f"{name}.yaml").write_text(f"task: {name}\n{data}\ntest_split: test{rest}")
    yield from _evaluated(bench, "local-completions", "completions", ["choosing", "telling"])
    yield from _evaluated(
        bench, "local-chat-completions", "chat/completions", ["telling"], "--apply_chat_template"
    )


def _evaluated(bench: Bench, model: str, path: str, tasks: Sequence[str], *flags: str) -> Iterator[str]:
    told = f"model={bench.served.model},base_url={bench.served.url}/v1/{path},tokenizer={MODEL_PATH}"
    out = bench.folder / model
    arguments = ["--model", model, "--model_args", f"{told},num_concurrent=2", "--tasks", ",".join(tasks)]
    arguments += ["--include_path", str(bench.folder), "--output_path", str(out), "--log_samples", *flags]
    bench.run("lm_eval", *arguments)
    counts = bench.report(f"{model}/**/results*.json")["n-samples"]
    for task in tasks:
        if counts[task]["effective"] != len(QUESTIONS):
            raise Failed(f"{task}: {counts}")
        (samples,) = out.glob(f"**/samples_{task}_*.jsonl")
        check_samples(json.loads(line) for line in samples.read_text().splitlines())
        yield f"{model} {task}"


def check_samples(samples: Iterator[Any]) -> None:
    """Check that logprobs are valid and texts are not empty. Raises `Failed`."""
    for sample in samples:
        for answer, *_ in sample["resps"]:
            logprob = float(answer[0]) if isinstance(answer, list) else -1.0
            if not answer or not (math.isfinite(logprob) and logprob < 0):
                raise Failed(f"no answer: {sample}")


def aiperf(bench: Bench) -> Iterator[str]:
    for kind in ("chat", "completions"):
        out = bench.folder / kind
        arguments = ["profile", "-m", bench.served.model, "--endpoint-type", kind, "--streaming"]
        arguments += ["-u", bench.served.url, "--tokenizer", str(MODEL_PATH), "--artifact-dir", str(out)]
        arguments += ["--concurrency", "2", "--request-count", str(REQUESTS), "--ui", "none"]
        arguments += ["--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "16"]
        bench.run("aiperf", *arguments, "--extra-inputs", "ignore_eos:true")
        report = bench.report(f"{kind}/**/profile_export_aiperf.json")
        if report["request_count"]["avg"] != REQUESTS or report["error_summary"]:
            raise Failed(f"{report['request_count']} {report['error_summary']}")
        yield kind


def open_webui(bench: Bench) -> Iterator[str]:
    """Make the backend requests of its page: models, a chat, the same streamed, a title."""
    asked = {"model": bench.served.model, "messages": [{"role": "user", "content": "Say something."}]}
    with _backend(bench) as page:
        known = [model["id"] for model in page.get("/api/models").raise_for_status().json()["data"]]
        if bench.served.model not in known:
            raise Failed(f"{known}")
        yield "models"
        said = page.post("/api/chat/completions", json=asked).raise_for_status().json()
        if not said["choices"][0]["message"]["content"]:
            raise Failed(f"{said}")
        yield "chat"
        streamed = page.post("/api/chat/completions", json=asked | {"stream": True}).raise_for_status().text
        if not streamed.rstrip().endswith("data: [DONE]"):
            raise Failed(streamed[-300:])
        yield "chat streamed"
        titled = page.post("/api/v1/tasks/title/completions", json=asked).raise_for_status().json()
        if not titled.get("choices"):
            raise Failed(f"{titled}")
        yield "title"


@contextlib.contextmanager
def _backend(bench: Bench) -> Iterator[httpx.Client]:
    """Start the backend and yield an HTTP client that is signed in."""
    port = free_port()
    own = {"OPENAI_API_BASE_URL": f"{bench.served.url}/v1", "OPENAI_API_KEY": "none", "WEBUI_AUTH": "False"}
    own |= {"DATA_DIR": str(bench.folder), "WEBUI_SECRET_KEY": "none", "ENABLE_OLLAMA_API": "False"}
    own |= {"RAG_EMBEDDING_ENGINE": "openai", "OFFLINE_MODE": "True", "HF_HUB_OFFLINE": "1"}
    command = [str(bench.programs / "open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port)]
    with (
        (bench.folder / "log").open("wb") as log,
        subprocess.Popen(
            command, cwd=bench.folder, env=bench.environ(**own), stdout=log, stderr=log
        ) as backend,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", verify=NO_TLS, timeout=RUN_S_MAX) as page,
    ):
        try:
            eventually(lambda: _lives(page), within_s=START_S_MAX, what="the backend is ready")
            user = page.post("/api/v1/auths/signin", json={"email": "", "password": ""}).raise_for_status()
            page.headers["authorization"] = f"Bearer {user.json()['token']}"
            yield page
        finally:
            backend.terminate()


def _lives(page: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return page.get("/health").status_code == 200
    return False


@dataclass(frozen=True, slots=True)
class Client:
    """`checks`: the number of checks that `tried` yields, unless it raises."""

    packages: tuple[str, ...]
    checks: int
    tried: Callable[[Bench], Iterator[str]]


CLIENTS: dict[str, Client] = {
    "lm-eval": Client(("lm-eval[api]==0.4.13", "transformers==5.23.0"), 3, lm_eval),
    "aiperf": Client(("aiperf==0.13.0",), 2, aiperf),
    "open-webui": Client(("open-webui==0.12.4",), 4, open_webui),
}


def tried(name: str, served: Served) -> int:
    """Run a client, print a line for each check, and return the number that passed."""
    client, passed = CLIENTS[name], 0
    try:
        place = make(Environment(name, "python", client.packages), INSTALLED)
        with tempfile.TemporaryDirectory(prefix="rh-") as folder:
            for what in client.tried(Bench(place / "bin", served, Path(folder))):
                passed += 1
                print(f"OK   {name}: {what}", flush=True)
    except (Failed, NotMade, AssertionError, httpx.HTTPError, subprocess.TimeoutExpired) as error:
        print(f"FAIL {name}: {error}", flush=True)
    return passed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("clients", nargs="*", help=f"of {', '.join(CLIENTS)}; default: all")
    names = parser.parse_args(argv).clients or list(CLIENTS)
    if strangers := set(names) - set(CLIENTS):
        parser.error(f"no such client: {', '.join(sorted(strangers))}")
    with serving() as served:
        passed = sum([tried(name, served) for name in names])
    total = sum(CLIENTS[name].checks for name in names)
    print(f"{passed}/{total}")
    return 0 if passed == total else 1


if __name__ == "__main__":
    sys.exit(main())
