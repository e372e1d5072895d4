"""A server that speaks vLLM's or SGLang's routes and fails on demand. Its tokens are made up, its protocol is not."""

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

EOS = 2
Fault = Callable[[str, Any], Any]  # (path, body) -> None, or what to do instead: see _Handler.misbehave


class FakeServer:
    """Answers each request with ``body``-dependent tokens that end with :data:`EOS` after three, at its version.

    Attributes:
        calls: (path, body) of everything asked, in order.
        fault: what goes wrong.
        change: alters a well-formed answer of a generation before it is sent.
        loaded: what update calls brought.
    """

    def __init__(self, kind: str = "vllm") -> None:
        self.kind = kind
        self.calls: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.fault: Fault = lambda path, body: None
        self.change: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.loaded: list[str] = []
        self.version = "default"
        self.max_length = 64
        self.paused = False
        self.released = threading.Event()  # ends all that hang
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": self}))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def generated(self) -> list[Any]:
        return [body for path, body in self.calls if path.endswith("generate")]

    def stop(self) -> None:
        self.released.set()
        self._http.shutdown()
        self._http.server_close()

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def answer(self, path: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "policy", "max_model_len": self.max_length}]}
        if path == "/server_info":
            return {"max_req_input_len": self.max_length + 1}
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/collective_rpc":
            self.loaded.append(body["kwargs"]["weights_path"])
        if path == "/update_weights_from_disk":
            self.loaded.append(body["model_path"])
            self.version = body["weight_version"]
        if path.startswith(("/pause", "/resume", "/continue")):
            self.paused = path.startswith("/pause")
        if path == "/inference/v1/generate":
            return self.change(self._vllm(body))
        if path == "/generate":
            return self.change(self._sglang(body))
        return {"success": True}

    def _response(self, prompt: list[int], limit: int) -> tuple[list[int], str]:
        tokens = [3 + prompt[0] % 5, 4, EOS][:limit]
        return tokens, "stop" if tokens[-1] == EOS else "length"

    def _vllm(self, body: Any) -> dict[str, Any]:
        tokens, reason = self._response(body["token_ids"], body["sampling_params"]["max_tokens"])
        content = [{"token_id": token, "logprob": -0.5} for token in tokens]
        choice = {
            "token_ids": tokens,
            "finish_reason": reason,
            "logprobs": {"content": content},
            "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
        }
        return {"prompt_token_ids": body["token_ids"], "choices": [choice]}

    def _sglang(self, body: Any) -> dict[str, Any]:
        tokens, reason = self._response(body["input_ids"], body["sampling_params"]["max_new_tokens"])
        meta = {
            "finish_reason": {"type": reason, **({"matched": EOS} if reason == "stop" else {})},
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
        }
        if body["return_sampling_mask"]:
            meta["output_token_sampling_logprobs"] = [-0.25] * len(tokens)
        return {"output_ids": tokens, "prompt_token_ids": body["input_ids"], "meta_info": meta}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeServer

    def do_GET(self) -> None:
        self._handle(None)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._handle(json.loads(content) if content else None)

    def _handle(self, body: Any) -> None:
        path = self.path.partition("?")[0]
        self.fake.calls.append((self.path, body))
        self.fake.headers.append(dict(self.headers))
        fault = self.fake.fault(path, body)
        if fault is None:
            self._send(200, json.dumps(self.fake.answer(path, body)).encode())
        else:
            self.misbehave(fault, path, body)

    def misbehave(self, fault: Any, path: str, body: Any) -> None:
        if fault == "hang":
            self.fake.released.wait(60)
            self.close_connection = True
        elif fault == "reset":  # no byte of an answer
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif fault == "dies":  # in the middle of its answer
            content = json.dumps(self.fake.answer(path, body)).encode()
            self._head(200, len(content))
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif fault == "truncated":  # complete by its length, and no JSON
            content = json.dumps(self.fake.answer(path, body)).encode()
            self._send(200, content[: len(content) // 2])
        else:
            self._send(int(fault), b"planted\nfault")

    def _head(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _send(self, status: int, content: bytes) -> None:
        self._head(status, len(content))
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Not on the tests' output."""
