"""Stands in for llama-server: the same requests and answers, computed by the float64 reference.

Behaviour is chosen by FAKE_LLAMA_SERVER: "" (right), "dies", "refuses", "sleeps", "miscounts"; to a
prompt that is a text it answers after FAKE_LLAMA_SECONDS.
"""

import argparse
import http.server
import json
import os
import socketserver
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from orinbench.check.reference import Reference, log_softmax
from orinbench.measure.prompt_text import tokenize_prompt, tokenizer_of
from orinbench.model import open_model
from orinllm.text.tokenizer import Tokenizer


class Server(socketserver.UnixStreamServer):
    reference: Reference
    tokenizer: Tokenizer
    mode: str
    seconds: float  # that an answer to a text takes
    context: int
    more: int  # tokens that it counts too many


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        assert self.path == "/health"
        self.answer(503 if self.server.mode == "sleeps" else 200, {})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.answer(200, {"tokens": [ord(request["content"])]})
        elif self.server.mode == "refuses":
            self.answer(400, {"error": "no"})
        elif isinstance(request["prompt"], str):
            assert request["n_predict"] == 1 and not request["cache_prompt"]
            time.sleep(self.server.seconds)
            n_tokens = len(tokenize_prompt(self.server.tokenizer, request["prompt"]))
            if n_tokens >= self.server.context:  # no room for the answer
                self.answer(400, {"error": "exceed_context_size_error"})
                return
            self.answer(200, {"content": "a", "tokens_evaluated": n_tokens + self.server.more})
        else:
            assert request["n_predict"] == 1 and request["logit_bias"][0][0] == ord("a")
            row = log_softmax(self.server.reference.logits(request["prompt"]))[0]
            best = np.argsort(-row)[: request["n_probs"]].tolist()
            alternatives = [{"id": token, "logprob": float(row[token])} for token in best]
            position = {"id": ord("a"), "top_logprobs": alternatives}
            self.answer(200, {"completion_probabilities": [position]})


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", required=True)
    parser.add_argument("-m", required=True)
    parser.add_argument("-c", type=int)
    for flag in ("-np", "-ctk"):  # else argparse takes -ctk for -c
        parser.add_argument(flag)
    arguments, _ = parser.parse_known_args()
    mode = os.environ.get("FAKE_LLAMA_SERVER", "")
    if mode == "dies":
        print("loading\nerror: cannot load the model\n", file=sys.stderr)
        sys.exit(1)
    time.sleep(0.1)
    with Server(arguments.host, Handler) as server:
        server.reference, server.mode = Reference(open_model(arguments.m)), mode
        server.tokenizer = tokenizer_of(Path(arguments.m))
        server.seconds = float(os.environ.get("FAKE_LLAMA_SECONDS", "0"))
        server.context = arguments.c
        server.more = int(mode == "miscounts")
        server.serve_forever()


if __name__ == "__main__":
    main()
