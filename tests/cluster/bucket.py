"""A Google Cloud Storage of our own, for tests: what TensorStore and gcsfs ask of its JSON interface, in a thread."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@contextlib.contextmanager
def serving() -> Iterator[tuple[str, dict[str, bytes]]]:
    """Its address, and the objects that it holds, by name."""
    objects: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def asked(self) -> tuple[str, str, dict[str, str], bytes]:
            """The bucket, the object, the options and the content of a request."""
            url = urlsplit(self.path)
            found = re.fullmatch(r"(?:/upload|/download)?/storage/v1/b/([^/]+)(?:/o(?:/(.*))?)?", url.path)
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            options = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
            return (found[1], unquote(found[2] or ""), options, body) if found else ("", "", {}, b"")

        def answer(self, code: int, content: bytes = b"", **headers: str) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(content)

        def told(self, value: Any) -> None:
            self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

        def do_GET(self) -> None:
            _, name, options, _ = self.asked()
            if not name:
                first, last = options.get("startOffset", ""), options.get("endOffset")
                names = [one for one in sorted(objects) if one.startswith(options.get("prefix", "")) and one >= first]
                self.told({"items": [about(one) for one in names if last is None or one < last]})
            elif name not in objects:
                self.answer(404)
            elif options.get("alt") == "media":
                self.answer(200, objects[name], x_goog_generation="1", x_goog_stored_content_length="1")
            else:
                self.told(about(name))

        def do_POST(self) -> None:
            _, _, options, body = self.asked()
            objects[options["name"]] = body
            self.told(about(options["name"]))

        def do_DELETE(self) -> None:
            _, name, _, _ = self.asked()
            self.answer(204 if objects.pop(name, None) is not None else 404)

    def about(name: str) -> dict[str, str]:
        return {"name": name, "generation": "1", "size": str(len(objects[name])), "bucket": "b"}

    server = ThreadingHTTPServer(("localhost", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://localhost:{server.server_port}", objects
    finally:
        server.shutdown()
        server.server_close()
